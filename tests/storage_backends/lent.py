"""What the tests of single backends share: a context, a ring, whole objects in one call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ckptpipe.pyx.checksum import crc32c
from ckptpipe.pyx.io_engine import EngineName
from ckptpipe.pyx.staging import StagingRing
from ckptpipe.storage_backends.abc import Backend, BackendContext, Extent, ObjectInfo, ObjectWriter
from ckptpipe.storage_backends.registry import open_backend
from ckptpipe.storage_backends.testing import lent_context

SLOT = 1 << 18
T = TypeVar("T")


@dataclass
class Lent:
    context: BackendContext
    ring: StagingRing

    async def open(self, url: object, options: Mapping[str, object] | None = None) -> Backend:
        """Opened, checked for writing; the test closes it."""
        backend = await open_backend(str(url), self.context, options)
        await backend.check(writing=True)
        return backend

    async def append(self, writer: ObjectWriter, data: bytes) -> int:
        with await self.ring.acquire() as lease:
            with memoryview(lease) as view:
                view[: len(data)] = data
            return await writer.append([Extent(lease, len(data), crc32c(data))])

    async def write(self, backend: Backend, name: str, data: bytes, *, lane: int = 0) -> ObjectInfo:
        writer = await backend.create(name, lane=lane)
        for start in range(0, len(data), SLOT):
            await self.append(writer, data[start : start + SLOT])
        return await writer.finish()

    async def read(self, backend: Backend, name: str, nbytes: int, offset: int = 0) -> bytes:
        with await self.ring.acquire() as lease:
            await backend.read_into(name, offset, nbytes, lease)
            with memoryview(lease) as view:
                return bytes(view[:nbytes])


def run(
    main: Callable[[Lent], Awaitable[T]], *, io_engine: EngineName = "auto", inflight_bytes: int = 16 << 20
) -> T:
    """``main`` on a loop of its own; every slot must be free at the end."""

    async def lend() -> T:
        ring = StagingRing(16, SLOT, huge_pages="off", prefault_threads=1)
        async with lent_context(io_engine=io_engine, inflight_bytes=inflight_bytes) as context:
            result = await main(Lent(context, ring))
        ring.close()
        return result

    return asyncio.run(lend())
