"""A sink that writes into the pool of a launched process, from which the driver then restores."""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import mmap
from typing import TYPE_CHECKING

from ckptpipe.pipeline.chunk import Chunk
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda.launched_pool import LaunchedPool, PooledImage
from ckptpipe.pipeline.edge import Edge
from ckptpipe.pipeline.errors import ImageIncomplete, UsageError
from ckptpipe.pipeline.parallel import in_parallel
from ckptpipe.pipeline.sinks.abc import RestoringSink
from ckptpipe.pipeline.sources.abc import Source
from ckptpipe.pipeline.sources.image import ImageSource
from ckptpipe.pyx.staging import Lease, lease_buffer
from ckptpipe.pyx.workers import WorkerPool

if TYPE_CHECKING:
    from ckptpipe.pipeline.cuda.early_start import Arrivals
    from ckptpipe.pipeline.cuda.image_window import Fillers


PATIENCE = 0.02  # seconds in which a chunk of 8 MiB is read and checksummed several times over


@dataclass(frozen=True, slots=True)
class PoolRange:
    """``window``: bytes at the image's place that all of it goes through, a multiple of the chunks; 0: it has room."""

    pool: LaunchedPool
    image: PooledImage
    window: int = 0

    def at(self, start: int) -> int:
        """Where a chunk that starts at ``start`` in the image lies in the pool."""
        return self.image.offset + (start % self.window if self.window else start)


class PoolSink(RestoringSink):
    """``ranges``: where each stream of an `ImageSource` goes. All of it must be holes, which is what zeros become; in a
    window they are written. Its source sees to it that there is room in a window for what it sends.

    What lies in a local file is read from there to its place, checksummed while it is in the CPU's cache; chunks that
    come with their bytes are checksummed again by the pass that copies them. A chunk has arrived when its checksum is
    right; until then the driver is kept from it by the gate.
    """

    name = "pool"
    url = "pool"

    def __init__(
        self,
        ranges: Mapping[str, PoolRange],
        context: GraphContext,
        arrivals: Arrivals | None = None,
        fillers: Fillers | None = None,
    ) -> None:
        """``arrivals``: hears of every chunk, and knows those that are there already. ``fillers``: do the work in
        place of the usual threads; those that yield, while the driver is busy with what has come."""
        self._arrivals = arrivals
        self._fillers = fillers
        self._by_stream = dict(ranges)
        self._context = context
        self._ranges: list[PoolRange] = []
        self._zeros: Lease | None = None

    async def check(self, source: Source) -> None:
        if {stream.name: stream.nbytes for stream in source.streams} != {
            name: each.image.nbytes for name, each in self._by_stream.items()
        }:
            raise UsageError("the image and the pool do not have the same streams")
        self._source = source
        self._ranges = [self._by_stream[stream.name] for stream in source.streams]
        self._huge = {id(each.pool): each.pool.collapses for each in self._ranges}

    async def begin(self, source: Source) -> None:
        return

    async def run(self, edge: Edge) -> None:
        async def write() -> None:
            while (chunk := await edge.get()) is not None:
                try:
                    to = self._ranges[chunk.stream]
                    arrived = self._arrivals is not None and self._arrivals.has(to, chunk.number)
                    if arrived:
                        pass
                    elif not chunk.zero:
                        await self._put(chunk, to)
                    elif to.window:
                        await self._clear(chunk, to)
                    if self._arrivals is not None:
                        self._arrivals.add(to, chunk.number)
                    self.done_bytes += chunk.raw_bytes
                finally:
                    chunk.release()

        await in_parallel(self._context.workers.threads + 2, write)

    def _workers(self, to: PoolRange) -> WorkerPool:
        fillers = self._fillers
        if fillers is None or (fillers.yields and to.pool.hungry(to.image)):
            return self._context.workers
        return fillers.workers

    def _judge(self, workers: WorkerPool, to: PoolRange, seconds: float) -> None:
        """Threads that yield, and for which the driver has to wait, are starved: other programs keep the CPUs busy."""
        fillers = self._fillers
        if fillers is None or not fillers.yields or workers is not fillers.workers:
            return
        if seconds > PATIENCE and to.pool.hungry(to.image):
            self._fillers = None

    def _makes_pages(self, to: PoolRange, start: int) -> bool:
        """Whether huge pages are wanted at a chunk's place: it is the first one there. To ask for them once more costs a
        message to every CPU."""
        return self._huge[id(to.pool)] and not (to.window and start >= to.window)

    async def _clear(self, chunk: Chunk, to: PoolRange) -> None:
        """What lay there before was another part of the image."""
        if self._zeros is None:
            self._zeros = lease_buffer(mmap(-1, self._context.chunk_bytes))
        start = chunk.number * self._context.chunk_bytes
        huge = self._makes_pages(to, start)
        with to.pool.lend(to.at(start), chunk.raw_bytes, writable=True) as lent:
            await self._workers(to).copy(lent, self._zeros, chunk.raw_bytes, huge=huge)

    async def _put(self, chunk: Chunk, to: PoolRange) -> None:
        workers, nbytes, start = self._workers(to), chunk.raw_bytes, chunk.number * self._context.chunk_bytes
        huge = self._makes_pages(to, start)
        part = self._fillers.part_bytes if to.window and self._fillers is not None else 0
        began = time.perf_counter()
        with to.pool.lend(to.at(start), nbytes, writable=True) as lent:
            if (place := chunk.place) is not None:
                try:
                    found = await workers.read_file(
                        place.file, place.offset, lent, nbytes, huge=huge, part=part
                    )
                except OSError as error:
                    if error.errno != errno.ENODATA:
                        raise
                    raise ImageIncomplete(
                        f"{place.file.path} ended while it was read",
                        cure="restore from another copy of the image",
                    ) from error
            else:
                assert chunk.lease is not None
                found = (await workers.copy(lent, chunk.lease, nbytes, huge=huge)).crc32c
        self._judge(workers, to, time.perf_counter() - began)
        if found != chunk.raw_crc32c:
            assert isinstance(self._source, ImageSource), "a pool is filled from an image"
            raise self._source.refuse(chunk.stream, chunk.number, found)

    async def aclose(self) -> None:
        """Returns when nothing writes into the pools any more."""
        for each in self._by_stream.values():
            await each.pool.drained()
        if self._zeros is not None:
            self._zeros.release()
            self._zeros = None
