"""What the cases of the conformance suite work with: a backend, memory to write from, data that is known."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from ckptpipe.pyx.checksum import crc32c
from ckptpipe.pyx.staging import StagingRing
from ckptpipe.storage_backends.abc import Backend, BackendContext, Extent, ObjectInfo, ObjectWriter

SLOT = 1 << 20  # bytes of a slot: the largest extent of a case
PAGE = 4096

OpenBackend: TypeAlias = Callable[[BackendContext, str], Awaitable[Backend]]
"""Opens the backend at a place of its own, named by the string; the same string is the same place."""


def data_of(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


@dataclass(slots=True)
class Bench:
    """``backend`` stands at an empty place and `check(writing=True)` has passed."""

    open_backend: OpenBackend
    where: str
    context: BackendContext
    ring: StagingRing
    backend: Backend
    readable: bool

    @asynccontextmanager
    async def another(self) -> AsyncIterator[Backend]:
        """A second backend of the same place: another process, as far as the store can tell."""
        backend = await self.open_backend(self.context, self.where)
        try:
            yield backend
        finally:
            await backend.aclose()

    @asynccontextmanager
    async def extent(self, data: bytes) -> AsyncIterator[Extent]:
        """``data`` in a slot, as long as the block lasts; the slot is free again when the writer is done too."""
        with await self.ring.acquire() as lease:
            with memoryview(lease) as view:
                view[: len(data)] = data
            yield Extent(lease, len(data), crc32c(data))

    async def append(self, writer: ObjectWriter, data: bytes) -> int:
        async with self.extent(data) as extent:
            return await writer.append([extent])

    async def write(
        self, name: str, data: bytes, *, lane: int = 0, backend: Backend | None = None
    ) -> ObjectInfo:
        """A whole object, a slot at a time."""
        writer = await (backend or self.backend).create(name, lane=lane, size_hint=len(data))
        try:
            for start in range(0, len(data), SLOT):
                await self.append(writer, data[start : start + SLOT])
            return await writer.finish()
        except BaseException:
            await writer.abort()
            raise

    async def read(self, name: str, nbytes: int, *, offset: int = 0, backend: Backend | None = None) -> bytes:
        """Bytes of an object, a slot at a time, at most."""
        parts = []
        for start in range(0, nbytes, SLOT):
            count = min(SLOT, nbytes - start)
            with await self.ring.acquire() as lease:
                await (backend or self.backend).read_into(name, offset + start, count, lease)
                with memoryview(lease) as view:
                    parts.append(bytes(view[:count]))
        return b"".join(parts)

    async def names(self, prefix: str = "", *, backend: Backend | None = None) -> list[str]:
        return [info.name async for info in (backend or self.backend).list(prefix)]


def expect(condition: bool, message: str) -> None:
    """An assertion that survives ``python -O`` and that pytest need not rewrite."""
    if not condition:
        raise AssertionError(message)


@contextmanager
def raises(kind: type[BaseException], what: str) -> Iterator[None]:
    """``kind``, and nothing else, comes out of the block."""
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{what}: {kind.__name__} was expected, nothing was raised")
