"""A target: one process, held by a pidfd so that a reused pid is never hit, and what /proc says of it."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import re
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ckptpipe.pipeline.cuda.errors import TargetError, TargetGone
from ckptpipe.pipeline.cuda.pidfds import ended, open_pidfd
from ckptpipe.pipeline.tracing import ptrace_scope
from ckptpipe.pyx.cuda import CudaError

T = TypeVar("T")

ROOT = Path("/")
DEATH_GRACE = 0.3  # seconds
_FIRST_MIG_CAPABILITY = (
    3  # /dev/nvidia-caps: 1 and 2 are MIG's configuration and monitoring, the rest instances
)


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


@dataclass(frozen=True, slots=True)
class Mapping:
    """One line of /proc/PID/maps. ``path`` "" for anonymous memory."""

    start: int
    end: int
    permissions: str
    path: str

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def anonymous_private(self) -> bool:
        """Readable, writable, private, with no file behind it."""
        return self.permissions == "rw-p" and (not self.path or self.path.startswith("[anon:"))


class Target:
    """Made by `open`, closed by `close`. ``start_time`` in clock ticks since boot, with ``boot_id`` the name of
    a process for ever."""

    def __init__(self, pid: int, pidfd: int, root: Path) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self._root = root
        stat = _read(root / f"proc/{pid}/stat", pid)
        fields = stat[stat.rindex(")") + 2 :].split()
        self.start_time = int(fields[19])
        self.zombie = fields[0] in "ZX"
        self.name = stat[stat.index("(") + 1 : stat.rindex(")")]
        status = _read(root / f"proc/{pid}/status", pid)
        self.uid = int(next(line.split()[1] for line in status.splitlines() if line.startswith("Uid:")))
        self.boot_id = (root / "proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()

    @classmethod
    def open(cls, pid: int, root: Path = ROOT) -> Target:
        """TargetGone where there is no such process, TargetError where it may not be touched."""
        if pid == os.getpid():
            raise TargetError(
                f"pid {pid} is this process, which cannot checkpoint itself",
                pid=pid,
                cure="call ckptpipe from another process",
            )
        pidfd = open_pidfd(pid)
        try:
            target = cls(pid, pidfd, root)
            target._check()
        except BaseException:
            os.close(pidfd)
            raise
        return target

    def _check(self) -> None:
        if self.zombie or not self.alive:
            raise TargetGone(f"{self} has ended", pid=self.pid)
        if os.geteuid() not in (0, self.uid):
            raise TargetError(
                f"{self} belongs to user {self.uid}, not to user {os.geteuid()}",
                pid=self.pid,
                cure="run ckptpipe as its user, or as root",
            )

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    async def end(self) -> bool:
        """Whether it ends within `DEATH_GRACE`: the driver can answer an error before a killed process is dead."""
        return await asyncio.to_thread(ended, self.pidfd, DEATH_GRACE)

    @property
    def alive(self) -> bool:
        """False from the moment in which the process ends, also when its pid is given to another."""
        return not ended(self.pidfd)

    def require_alive(self) -> None:
        if not self.alive:
            raise TargetGone(f"{self} has ended", pid=self.pid)

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.name})"

    def maps(self) -> list[Mapping]:
        """Its mappings now. TargetError without the permission to trace it."""
        try:
            text = (self._root / f"proc/{self.pid}/maps").read_text(encoding="utf-8", errors="replace")
        except (ProcessLookupError, FileNotFoundError) as error:
            raise TargetGone(f"{self} has ended", pid=self.pid) from error
        except PermissionError as error:
            raise self.not_permitted() from error
        if not text:
            self.require_alive()
        return [_mapping(line) for line in text.splitlines()]

    def require_readable(self) -> None:
        """TargetError where process_vm_readv(2) is not allowed to read its memory."""
        for mapping in self.maps():
            if mapping.permissions.startswith("r") and mapping.path != "[vvar]":
                break
        else:
            raise self.not_permitted()
        byte = ctypes.create_string_buffer(1)
        local, remote = _IoVec(ctypes.addressof(byte), 1), _IoVec(mapping.start, 1)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.process_vm_readv(self.pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) < 0:
            number = ctypes.get_errno()
            if number == errno.ESRCH:
                raise TargetGone(f"{self} has ended", pid=self.pid)
            if number != errno.EFAULT:
                raise self.not_permitted()

    def not_permitted(self) -> TargetError:
        """The process that the memory belongs to is left as it is."""
        scope = ptrace_scope(self._root)
        tracing = "run as root or with CAP_SYS_PTRACE (containers: --cap-add SYS_PTRACE)"
        if scope >= 3:
            tracing = "boot with another kernel.yama.ptrace_scope, since 3 cannot be changed"
        elif scope:
            tracing += ", or set kernel.yama.ptrace_scope=0"
        why = f" (kernel.yama.ptrace_scope is {scope})" if scope else ""
        return TargetError(
            f"the memory of {self} may not be read{why}",
            pid=self.pid,
            cure=f"start the program with ckptpipe launch, which needs no such permission, or {tracing}",
        )

    def devices(self) -> tuple[list[int], bool]:
        """Minor numbers of the GPUs that it has open, and whether it holds a MIG instance."""
        minors, mig = set(), False
        folder = self._root / f"proc/{self.pid}/fd"
        try:
            entries = os.listdir(folder)
        except (PermissionError, FileNotFoundError):
            return [], False
        for entry in entries:
            try:
                path = os.readlink(folder / entry)
            except OSError:  # closed meanwhile
                continue
            if found := re.fullmatch(r"/dev/nvidia(\d+)", path):
                minors.add(int(found[1]))
            elif found := re.fullmatch(r"/dev/nvidia-caps/nvidia-cap(\d+)", path):
                mig = mig or int(found[1]) >= _FIRST_MIG_CAPABILITY
        return sorted(minors), mig

    def gpu_uuids(self) -> list[str]:
        """UUIDs of the GPUs that it has open; more than it uses may be among them; [] where that is not known."""
        minors, _ = self.devices()
        found = {}
        for file in sorted(self._root.glob("proc/driver/nvidia/gpus/*/information")):
            text = file.read_text(encoding="utf-8", errors="replace")
            facts = {
                key.strip(): value.strip()
                for key, _, value in (line.partition(":") for line in text.splitlines())
            }
            if facts.get("Device Minor", "").isdigit():
                found[int(facts["Device Minor"])] = facts.get("GPU UUID", "").lower().replace("gpu-", "GPU-")
        return [found[minor] for minor in minors if found.get(minor)]


def _mapping(line: str) -> Mapping:
    fields = line.split(maxsplit=5)
    start, _, end = fields[0].partition("-")
    return Mapping(int(start, 16), int(end, 16), fields[1], fields[5] if len(fields) > 5 else "")


def _read(path: Path, pid: int) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError) as error:
        raise TargetGone(f"there is no process with pid {pid}", pid=pid) from error


def gone_in_the_middle(dead: Sequence[Target]) -> TargetGone:
    return TargetGone(f"{' and '.join(map(str, dead))} ended in the middle", pid=dead[0].pid)


async def while_alive(targets: Sequence[Target], work: Coroutine[Any, Any, T]) -> T:
    """``work``, cancelled where one of the targets ends: TargetGone then, with what came of it as its cause."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    gone: asyncio.Future[None] = loop.create_future()
    watched = [target for target in targets if target.pidfd >= 0]

    def end() -> None:
        for target in watched:
            loop.remove_reader(target.pidfd)
        if not gone.done():
            gone.set_result(None)

    for target in watched:
        loop.add_reader(target.pidfd, end)
    cancelled = stopped = False
    try:
        while not task.done():
            try:
                waited: list[asyncio.Future[Any]] = [task] if stopped else [task, gone]
                await asyncio.wait(waited, return_when="FIRST_COMPLETED")
            except asyncio.CancelledError:
                cancelled = True
                task.cancel()
            if gone.done() and not stopped:
                stopped = True
                task.cancel()
    finally:
        end()
    failure = asyncio.CancelledError() if task.cancelled() else task.exception()
    if isinstance(failure, CudaError):
        await asyncio.gather(*(target.end() for target in targets))
    dead = [target for target in targets if not target.alive]
    if failure is not None and dead and not cancelled and not isinstance(failure, TargetGone):
        raise gone_in_the_middle(dead) from (None if task.cancelled() else failure)
    if cancelled and failure is not None:
        raise asyncio.CancelledError from (None if task.cancelled() else failure)
    return task.result()
