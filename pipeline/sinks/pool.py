"""A sink that writes into the pool of a launched process, from which the driver then restores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda.launched_pool import LaunchedPool, PooledImage
from ckptpipe.pipeline.edge import Edge
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.result import SinkResult
from ckptpipe.pipeline.sinks.abc import Sink
from ckptpipe.pipeline.sources.abc import Source, in_parallel
from ckptpipe.pipeline.sources.image import ImageSource

if TYPE_CHECKING:
    from ckptpipe.pipeline.cuda.early_start import Arrivals


@dataclass(frozen=True, slots=True)
class PoolRange:
    pool: LaunchedPool
    image: PooledImage


class PoolSink(Sink):
    """``ranges``: where each stream of an `ImageSource` goes. All of it must be holes, which is what zeros become.

    Chunks come verified, and each is checksummed again by the pass that copies it.
    """

    name = "pool"
    url = "pool"

    def __init__(
        self, ranges: Mapping[str, PoolRange], context: GraphContext, arrivals: Arrivals | None = None
    ) -> None:
        """``arrivals``: hears of every chunk, and knows those that are there already."""
        self._arrivals = arrivals
        self._by_stream = dict(ranges)
        self._context = context
        self._ranges: list[PoolRange] = []

    async def check(self, source: Source) -> None:
        if {stream.name: stream.nbytes for stream in source.streams} != {
            name: each.image.nbytes for name, each in self._by_stream.items()
        }:
            raise UsageError("the image and the pool do not have the same streams")
        self._source = source
        self._ranges = [self._by_stream[stream.name] for stream in source.streams]

    async def begin(self, source: Source) -> None:
        return

    async def run(self, edge: Edge) -> None:
        workers = self._context.workers

        async def write() -> None:
            while (chunk := await edge.get()) is not None:
                try:
                    to = self._ranges[chunk.stream]
                    arrived = self._arrivals is not None and self._arrivals.has(to, chunk.number)
                    if chunk.lease is not None and not arrived:
                        at = to.image.offset + chunk.number * self._context.chunk_bytes
                        with to.pool.lend(at, chunk.raw_bytes, writable=True) as lent:
                            found = (await workers.copy(lent, chunk.lease, chunk.raw_bytes)).crc32c
                        if found != chunk.raw_crc32c:
                            assert isinstance(self._source, ImageSource), "a pool is filled from an image"
                            raise self._source.refuse(chunk.stream, chunk.number, found)
                    if self._arrivals is not None:
                        self._arrivals.add(to, chunk.number)
                    self.done_bytes += chunk.raw_bytes
                finally:
                    chunk.release()

        await in_parallel(workers.threads + 2, write)

    async def commit(self) -> None:
        return

    async def settle(self) -> None:
        return

    async def abort(self) -> None:
        return

    async def aclose(self) -> None:
        """Returns when nothing writes into the pools any more."""
        for each in self._by_stream.values():
            await each.pool.drained()

    def result(self) -> SinkResult:
        return SinkResult(url=self.url, image_url="", policy=self.policy, ok=True)
