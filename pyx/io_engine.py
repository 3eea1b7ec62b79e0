"""Asynchronous file I/O: one interface, three engines (see `open_engine`)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from ckptpipe.pyx.engine import Engine, live_engines
from ckptpipe.pyx.errors import IoError
from ckptpipe.pyx.libaio import LibaioEngine
from ckptpipe.pyx.threads import ThreadsEngine
from ckptpipe.pyx.uring import UringEngine

if TYPE_CHECKING:
    from ckptpipe.pyx.staging import Lease

__all__ = ["ENGINES", "EngineName", "EngineProbe", "IoEngine", "live_engines", "open_engine", "probe"]

EngineName = Literal["auto", "io_uring", "libaio", "threads"]
ENGINES = ("io_uring", "libaio", "threads")  # fastest first
DENY_VARIABLE = (
    "CKPTPIPE_DENY_IO"  # engines, with commas between: their set-up fails with EPERM, as in containers
)


class IoEngine(Protocol):
    """Reads, writes, syncs and preallocates files without blocking the loop that made it.

    Each call queues one operation and returns a future of that loop. Operations beyond ``depth`` wait inside
    the engine, in order; those under way run in any order. Short transfers are continued; EINTR and EAGAIN
    are handled; any other errno becomes the exception of `ckptpipe.pyx.errors.io_error` that names ``path``
    and the operation. An operation holds its lease until the kernel has answered, also when its future was
    cancelled; ``drain(fd)`` waits for that. Offset -1 is the position of a pipe or socket.
    """

    @property
    def name(self) -> str:
        """The engine that runs: io_uring | libaio | threads."""
        ...

    @property
    def requested(self) -> str: ...

    @property
    def why(self) -> str:
        """Why a faster engine was not taken, "" when it was."""
        ...

    @property
    def notes(self) -> list[str]:
        """What runs otherwise than one would think, in words: unregistered buffers, files left to threads."""
        ...

    @property
    def depth(self) -> int: ...

    @property
    def inflight(self) -> int:
        """Operations that have not been answered, those that wait inside the engine included."""
        ...

    def read(self, fd: int, lease: Lease, nbytes: int, offset: int, path: str) -> asyncio.Future[int]:
        """Fill ``lease[:nbytes]`` from ``offset``; the count is short only at end of file."""
        ...

    def write(self, fd: int, lease: Lease, nbytes: int, offset: int, path: str) -> asyncio.Future[int]:
        """Write all of ``lease[:nbytes]`` at ``offset``."""
        ...

    def fsync(self, fd: int, path: str, *, data_only: bool = False) -> asyncio.Future[None]:
        """Make durable what was written, and answered, before this call."""
        ...

    def fallocate(self, fd: int, mode: int, offset: int, nbytes: int, path: str) -> asyncio.Future[None]:
        """Preallocate, punch or zero a range; ``mode`` is a sum of the FALLOC_* of `ckptpipe.pyx.files`."""
        ...

    async def drain(self, fd: int | None = None) -> None:
        """Wait until no operation on ``fd`` (on any file) is in the kernel; shielded from cancellation. StuckIo
        where nothing was answered for a minute."""
        ...

    async def aclose(self) -> None:
        """Wait for what is under way and free everything. Idempotent. StuckIo as `drain`, with nothing freed."""
        ...


@dataclass(frozen=True, slots=True)
class EngineProbe:
    """Whether an engine runs here, why not, and what is odd about it."""

    name: str
    works: bool
    why: str = ""
    notes: tuple[str, ...] = ()


def open_engine(kind: EngineName = "auto", *, depth: int = 32, buffers: Sequence[object] = ()) -> IoEngine:
    """Open the asked engine on the running loop; ``auto`` tries io_uring, libaio, threads in this order.

    ``buffers``: mappings (staging rings) to register with io_uring where memlock allows; prefaulted, else this
    call touches every page. A forced engine that cannot run raises IoError with the cure; ``auto`` fails only
    where not even a thread can be started.
    """
    if kind in ENGINES:
        return _open(kind, depth, kind, "", buffers)
    if kind != "auto":
        raise ValueError(f"I/O engine {kind!r} is none of auto, {', '.join(ENGINES)}")
    refused: list[str] = []
    for name in ENGINES[:-1]:
        try:
            return _open(name, depth, kind, "; ".join(refused), buffers)
        except IoError as error:
            refused.append(error.message)
    return _open(ENGINES[-1], depth, kind, "; ".join(refused), buffers)


def probe() -> tuple[EngineProbe, ...]:
    """Which engines run here, fastest first: opens each and closes it.

    Has a loop of its own: inside a running loop, call it through `asyncio.to_thread`.
    """
    with asyncio.Runner() as runner:
        return tuple(runner.run(_probe(name)) for name in ENGINES)


async def _probe(name: str) -> EngineProbe:
    try:
        engine = _open(name, 1, name, "", ())
    except IoError as error:
        return EngineProbe(name, False, error.message)
    notes = tuple(engine.notes)
    await engine.aclose()
    return EngineProbe(name, True, "", notes)


def _open(name: str, depth: int, requested: str, why: str, buffers: Sequence[object]) -> Engine:
    denied = name in os.environ.get(DENY_VARIABLE, "").replace(" ", "").split(",")
    if name == "io_uring":
        return UringEngine(depth, requested, why, buffers=buffers, denied=denied)
    if name == "libaio":
        return LibaioEngine(depth, requested, why, denied=denied)
    return ThreadsEngine(depth, requested, why)
