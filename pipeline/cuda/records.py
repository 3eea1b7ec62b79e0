"""What is known of a process that somebody captures: a lock, and a record of its present checkpoint.

Both live in the runtime directory, by pid: ``targets/PID.lock`` is locked by whoever works on the
process; ``targets/PID.json`` says whose checkpoint it is in, for as long as it is not RUNNING.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import struct
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from ckptpipe.pipeline.cuda.errors import TargetBusy
from ckptpipe.pipeline.cuda.target import Target
from ckptpipe.pipeline.runtime_directory import private_directory, runtime_directory

RECORD_LIMIT = 1 << 20  # bytes
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_WHOLE_FILE = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """One checkpoint of one process. ``nonce`` is made at the checkpoint; an image holds the same one.

    ``controller``: pid of the process that holds the driver's operation (custom storage). ``mappings``: where
    the driver's image lies in the target, as [start, bytes]. ``images``: URLs under which it is durable.
    ``pool``: of a launched process, those that lie in its pool: the first of ``mappings``, in the same order, as
    [slot, generation, offset, bytes]. ``evicted``: the pool does not hold them now, only the images do.
    """

    pid: int
    start_time: int
    boot_id: str
    nonce: str
    capture: str
    controller: int
    controller_start_time: int
    leave: str = "running"
    phase: str = "locked"  # locked | checkpointing | checkpointed | restoring
    images: tuple[str, ...] = ()
    mappings: tuple[tuple[int, int], ...] = ()
    pool: tuple[tuple[int, int, int, int], ...] = ()
    evicted: bool = False
    gpus: dict[str, int] = field(default_factory=dict)  # UUID: bytes

    @property
    def restore_command(self) -> str:
        """What brings the process back from its image."""
        return f"ckptpipe restore {self.images[0] if self.images else 'URL'} --pid {self.pid}"

    def belongs_to(self, target: Target) -> bool:
        return (self.pid, self.start_time, self.boot_id) == (target.pid, target.start_time, target.boot_id)


class TargetLock:
    """Exclusive work on one process, and its record. `take`, then `release` exactly once."""

    def __init__(self, folder: Path, pid: int, descriptor: int) -> None:
        self._folder = folder
        self._pid = pid
        self._descriptor = descriptor

    @classmethod
    def take(cls, target: Target) -> TargetLock:
        """TargetBusy where another process, or another operation of this one, works on the target."""
        folder = _folder()
        path = folder / f"{target.pid}.lock"
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                try:
                    # An open-file-description lock: gone with its holder, and others can ask for it (fcntl(2)).
                    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE)
                except (BlockingIOError, PermissionError) as error:
                    raise TargetBusy(
                        f"{target} is being saved or restored by {_holder(descriptor)}",
                        pid=target.pid,
                        cure="wait for that or cancel it; where it has failed, go on in that process: "
                        f"ckptpipe recover --pid {target.pid}, through its controller",
                    ) from error
                if _is_at(path, descriptor):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                    return cls(folder, target.pid, descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # its holder has just removed the file: take the next one

    def read(self, target: Target) -> CheckpointRecord | None:
        """The record of the present checkpoint; None where there is none, or one of an earlier process."""
        record = _read(self._folder / f"{self._pid}.json")
        return record if record is not None and record.belongs_to(target) else None

    def write(self, record: CheckpointRecord) -> None:
        path = self._folder / f"{self._pid}.json"
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        with open(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb"
        ) as file:
            file.write(json.dumps(asdict(record), sort_keys=True).encode() + b"\n")
        os.replace(temporary, path)

    def erase(self) -> None:
        """The process runs again: its checkpoint is over."""
        (self._folder / f"{self._pid}.json").unlink(missing_ok=True)

    def release(self) -> None:
        if self._descriptor >= 0:
            (self._folder / f"{self._pid}.lock").unlink(missing_ok=True)  # under the lock: see `take`
            os.close(self._descriptor)
            self._descriptor = -1


def read_record(target: Target) -> CheckpointRecord | None:
    """The record of a target's present checkpoint, without taking its lock."""
    record = _read(_folder() / f"{target.pid}.json")
    return record if record is not None and record.belongs_to(target) else None


def busy_with(pid: int) -> int | None:
    """The pid of who works on a process now, None where nobody does."""
    try:
        descriptor = os.open(_folder() / f"{pid}.lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        kind, *_ = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _WHOLE_FILE))
        if kind == fcntl.F_UNLCK:
            return None
        text = os.pread(descriptor, 32, 0).strip()
        return int(text) if text.isdigit() else 0
    finally:
        os.close(descriptor)


def holder_lives(record: CheckpointRecord) -> bool:
    """Whether the process that holds the driver's operation is still there, and is another than this one."""
    # Held by this one, the operation would be at hand.
    return record.controller != os.getpid() and controller_lives(record)


def controller_lives(record: CheckpointRecord) -> bool:
    """Whether the process that opened the driver's operation is still the one that has its pid."""
    try:
        return start_time_of(record.controller) == record.controller_start_time
    except OSError:
        return False


def start_time_of(pid: int) -> int:
    """Clock ticks from boot to the start of a process (proc_pid_stat(5)). OSError where there is none."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return int(file.read().rpartition(")")[2].split()[19])


def new_nonce() -> str:
    return secrets.token_hex(16)


def _folder() -> Path:
    return private_directory(runtime_directory() / "targets")


def _holder(descriptor: int) -> str:
    text = os.pread(descriptor, 32, 0).strip()
    return f"pid {int(text)}" if text.isdigit() else "another process"


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _read(path: Path) -> CheckpointRecord | None:
    """A record that cannot be read is none: then nothing is restored into that process by mistake."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return None
        data = file.read(RECORD_LIMIT)
    try:
        found = json.loads(data)
        known = {each.name for each in fields(CheckpointRecord)}
        record = CheckpointRecord(**{key: value for key, value in found.items() if key in known})
        return replace(
            record,
            images=tuple(str(url) for url in record.images),
            mappings=tuple((int(start), int(nbytes)) for start, nbytes in record.mappings),
            pool=tuple((int(a), int(b), int(c), int(d)) for a, b, c, d in record.pool),
            evicted=bool(record.evicted),
        )
    except (ValueError, TypeError, AttributeError):
        return None
