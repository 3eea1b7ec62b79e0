"""The client of a launched process's hand-over socket (pyx/preload/handover.h)."""

from __future__ import annotations

import array
import ctypes
import errno
import os
import socket
import struct
import threading
from pathlib import Path
from typing import Self

from ckptpipe.pipeline.launch.errors import HandoverFailed, NotLaunched

_MAGIC, _VERSION, _NAMES = 0x50504B43, 1, 4
_REQUEST = struct.Struct("=IIIIQ")
_ANSWER = struct.Struct("=IIiIQ192s")
_PEER = struct.Struct("iII")
_ATTACH, _ARM, _DISARM, _PREPARE, _SETTLE, _FEED = range(1, 7)
_CLONE_NEWNET = 0x40000000


class Handover:
    """A connection to a launched process. While it is open, what it asked for holds; closed, in whatever way, the
    process goes on as if it had never been. Every call blocks: run it off the event loop. Not for two threads.
    """

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self._socket = connection

    @classmethod
    def connect(cls, pid: int, *, timeout: float = 10.0) -> Handover:
        """NotLaunched where ``pid`` has no pool to hand over, HandoverFailed where it refuses us.

        ``timeout``: seconds that the process has for each answer but `prepare`'s.
        """
        root = Path("/proc") / str(pid)
        try:
            status = (root / "status").read_text(encoding="utf-8", errors="replace")
            stat = (root / "stat").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError) as error:
            raise NotLaunched(f"there is no process {pid}") from error
        inner = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1]
        start_time = stat[stat.rindex(")") + 2 :].split()[19]
        for n in range(_NAMES):
            connection = _connect(root, f"\0ckptpipe/{inner}/{start_time}/{n}", timeout)
            if connection is None:
                break
            peer, _, _ = _PEER.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            )
            if peer == pid:
                return cls(pid, connection)
            connection.close()  # somebody else's of the same name, in another container
        raise NotLaunched(
            f"process {pid} offers no pool: it was not started by ckptpipe launch, or has not used CUDA yet",
            cure="start it with: ckptpipe launch -- PROGRAM…",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def attach(self) -> tuple[int | None, int]:
        """Descriptors of the pool (None where there is none: the control page says why) and of the control page.
        They are the caller's to close."""
        _, descriptors = self._ask(_ATTACH)
        if len(descriptors) == 2:
            return descriptors[0], descriptors[1]
        if len(descriptors) == 1:
            return None, descriptors[0]
        for descriptor in descriptors:
            os.close(descriptor)
        raise HandoverFailed(f"process {self.pid} sent {len(descriptors)} descriptors")

    def arm(self) -> None:
        """A checkpoint is coming: an image may be served whatever thread of the process asks for it."""
        self._ask(_ARM)

    def disarm(self) -> None:
        self._ask(_DISARM)

    def prepare(self, nbytes: int, *, timeout: float = 600.0) -> int:
        """Make so many bytes of the pool ready now, with all workers; returns how many are. The process runs on."""
        value, _ = self._ask(_PREPARE, nbytes, timeout=timeout)
        return value

    def settle(self) -> int:
        """After the driver's checkpoint: what it never wrote becomes zeros. Returns how many bytes that were."""
        value, _ = self._ask(_SETTLE, timeout=600.0)
        return value

    def feed(self) -> None:
        """This connection feeds closed gates: once it is closed, the gate's orphan deadline runs."""
        self._ask(_FEED)

    def _ask(self, kind: int, argument: int = 0, *, timeout: float | None = None) -> tuple[int, list[int]]:
        before = self._socket.gettimeout()
        if timeout is not None:
            self._socket.settimeout(timeout)
        try:
            # Who is refused is told so, and the connection closed: that can come before our request is read.
            try:
                self._socket.send(_REQUEST.pack(_MAGIC, _VERSION, kind, 0, argument))
                return self._receive(kind)
            except (BrokenPipeError, ConnectionResetError):
                return self._receive(kind)
        except TimeoutError as error:
            raise HandoverFailed(
                f"process {self.pid} does not answer: it may be stopped",
                cure="continue it (kill -CONT), or wait until it is not",
            ) from error
        except ConnectionError as error:
            raise HandoverFailed(f"process {self.pid} closed the connection: {error.strerror}") from error
        finally:
            self._socket.settimeout(before)

    def _receive(self, kind: int) -> tuple[int, list[int]]:
        room = 2 * array.array("i").itemsize
        data, ancillary, flags, _ = self._socket.recvmsg(
            _ANSWER.size, socket.CMSG_SPACE(room), socket.MSG_CMSG_CLOEXEC
        )
        descriptors = array.array("i")
        for level, what, payload in ancillary:
            if (level, what) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(payload[: len(payload) // descriptors.itemsize * descriptors.itemsize])
        try:
            value = self._check(kind, data, flags)
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return value, list(descriptors)

    def _check(self, kind: int, data: bytes, flags: int) -> int:
        if not data:
            raise HandoverFailed(f"process {self.pid} closed the connection: it may have ended")
        if len(data) != _ANSWER.size or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise HandoverFailed(f"process {self.pid} sent an answer of another kind")
        magic, version, error, answered, value, text = _ANSWER.unpack(data)
        if magic != _MAGIC or version != _VERSION:
            raise HandoverFailed(
                f"process {self.pid} runs the library of another version of ckptpipe",
                cure="start it again with this one",
            )
        if error:
            why = text.split(b"\0")[0].decode("utf-8", "replace") or os.strerror(error)
            raise HandoverFailed(f"process {self.pid} refused: {why}", cure=_CURES.get(error, ""))
        if answered != kind:
            raise HandoverFailed(f"process {self.pid} answered another request")
        return int(value)


_CURES = {
    errno.EACCES: "call as the user that the process belongs to, or as root",
    errno.EBUSY: "wait until the other one is done",
    errno.ENOMEM: "free memory, or launch with a smaller --pool",
    errno.E2BIG: "launch with a larger --pool or --budget",
}


def _connect(root: Path, name: str, timeout: float) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout)
        connection.connect(name)
        return connection
    except ConnectionRefusedError:
        connection.close()
    except BaseException:
        connection.close()
        raise
    # Abstract names belong to a network namespace.
    try:
        theirs, ours = os.readlink(root / "ns/net"), os.readlink("/proc/self/ns/net")
    except OSError:
        return None
    return None if theirs == ours else _connect_inside(root / "ns/net", name, timeout)


def _connect_inside(namespace: Path, name: str, timeout: float) -> socket.socket | None:
    """By a thread that enters the namespace and ends: setns(2) is of one thread."""
    found: list[socket.socket] = []
    failed: list[int] = []

    def enter() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(descriptor, _CLONE_NEWNET):
                failed.append(ctypes.get_errno())
                return
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(timeout)
            if connection.connect_ex(name):
                connection.close()
            else:
                found.append(connection)
        finally:
            os.close(descriptor)

    thread = threading.Thread(target=enter, name="ckptpipe-setns")
    thread.start()
    thread.join()
    if failed:
        raise NotLaunched(
            f"the process is in another network namespace, which cannot be entered: {os.strerror(failed[0])}",
            cure="call as root, or inside of its container",
        )
    return found[0] if found else None
