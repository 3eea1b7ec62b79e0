"""Asynchronous file I/O: one interface, three engines (contract; see open_engine)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from ckptpipe.pyx.staging import Lease

EngineName = Literal["auto", "io_uring", "libaio", "threads"]


class IoEngine(Protocol):
    """Reads, writes, syncs and preallocates files without blocking the loop that made it.

    Each call queues one operation and returns a future of that loop. Operations beyond ``depth`` wait inside
    the engine. Short transfers are continued; EINTR and EAGAIN are handled; any other errno becomes the
    exception of `ckptpipe.pyx.errors.io_error` that names ``path`` and the operation. An operation holds its
    lease until the kernel has answered, also when its future was cancelled; ``drain(fd)`` waits for that.
    """

    name: str  # the engine that runs: io_uring | libaio | threads
    requested: str
    why: str  # why a faster engine was not taken, "" when it was
    depth: int

    @property
    def inflight(self) -> int: ...

    def read(self, fd: int, lease: Lease, nbytes: int, offset: int, path: str) -> asyncio.Future[int]:
        """Fill ``lease[:nbytes]`` from ``offset``; the count is short only at end of file."""
        ...

    def write(self, fd: int, lease: Lease, nbytes: int, offset: int, path: str) -> asyncio.Future[int]:
        """Write all of ``lease[:nbytes]`` at ``offset``."""
        ...

    def fsync(self, fd: int, path: str, *, data_only: bool = False) -> asyncio.Future[None]: ...

    def fallocate(self, fd: int, mode: int, offset: int, nbytes: int, path: str) -> asyncio.Future[None]: ...

    async def drain(self, fd: int | None = None) -> None:
        """Wait until no operation on ``fd`` (on any file) is in the kernel; shielded from cancellation."""
        ...

    async def aclose(self) -> None: ...


def open_engine(kind: EngineName = "auto", *, depth: int = 32, buffers: Sequence[object] = ()) -> IoEngine:
    """Open the asked engine on the running loop; ``auto`` tries io_uring, libaio, threads in this order.

    ``buffers``: mappings (staging rings) to register with io_uring where memlock allows. A forced engine
    that cannot run raises IoError with the cure; ``auto`` never fails.
    """
    raise NotImplementedError
