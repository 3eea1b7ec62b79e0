"""What the tests of the I/O engines share: every engine, every loop, aligned memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from ckptpipe.pyx.engine import Engine
from ckptpipe.pyx.io_engine import EngineName, open_engine, probe
from ckptpipe.pyx.staging import Lease, StagingRing

T = TypeVar("T")
ENGINES: tuple[EngineName, ...] = ("io_uring", "libaio", "threads")
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
# A machine whose kernel or container refuses an engine cannot test it; "auto" is tested everywhere.
REFUSED = {found.name: found.why for found in probe() if not found.works}


def run(main: Coroutine[Any, Any, T], loop: str = "asyncio") -> T:
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(main)


@asynccontextmanager
async def engine(kind: EngineName, **options: Any) -> AsyncIterator[Engine]:
    opened = open_engine(kind, **options)
    assert isinstance(opened, Engine)
    try:
        yield opened
    finally:
        await opened.aclose()


@contextmanager
def ring(slots: int = 4, slot_bytes: int = 1 << 16) -> Iterator[StagingRing]:
    made = StagingRing(slots, slot_bytes, huge_pages="off", prefault_threads=1)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def descriptor(path: Path | str, flags: int, mode: int = 0o600) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    """(read end, write end); a test may close either itself."""
    ends = os.pipe()
    try:
        yield ends
    finally:
        for fd in ends:
            try:
                os.close(fd)
            except OSError:
                pass


def fill(lease: Lease, data: bytes) -> None:
    with memoryview(lease) as view:
        view[: len(data)] = data


def content(lease: Lease, nbytes: int) -> bytes:
    with memoryview(lease) as view:
        return bytes(view[:nbytes])
