"""Compress a branch's chunks on the CPU, off the loop, several at a time."""

from __future__ import annotations

from ckptpipe.pipeline.chunk import Chunk
from ckptpipe.pipeline.codecs import CODEC_IDS, CodecChoice
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.edge import Edge, Outlet
from ckptpipe.pipeline.image.layout import padded
from ckptpipe.pipeline.image.records import whole_plane
from ckptpipe.pipeline.sources.abc import clear_padding, in_parallel
from ckptpipe.pipeline.stages.abc import Stage
from ckptpipe.pyx.staging import Lease

GAIN = 0.05
"""A chunk is stored raw unless compression saves at least this share of it."""


class CompressStage(Stage):
    """Encodes each chunk with one codec; keeps it raw where the gain is under `GAIN`.

    Output slots come from a ring of the stage's own, and one is reserved before a chunk is taken: a chunk in
    hand never waits for memory that only its own progress could free.
    """

    def __init__(self, name: str, choice: CodecChoice, context: GraphContext, *, sink_bytes: int) -> None:
        """``sink_bytes``: what the sinks behind this stage keep in flight, so that the ring can feed them."""
        self.name = name
        self.choice = choice
        self.compressed = 0
        self.raw = 0
        self._context = context
        self._threads = context.codecs.threads
        self._ring = context.make_ring(self._threads + 1 + max(4, -(-sink_bytes // context.chunk_bytes)))

    @property
    def backend(self) -> str:
        """What ran, for the result."""
        return "cpu" if self.compressed else ""

    async def run(self, edge: Edge, outlet: Outlet) -> None:
        async def encode() -> None:
            while True:
                slot: Lease | None = await self._ring.acquire()
                try:
                    chunk = await edge.get()
                    if chunk is None:
                        return
                    try:
                        if slot is not None and await self._encode(chunk, slot):
                            slot = None
                    except BaseException:
                        chunk.release()
                        raise
                finally:
                    if slot is not None:
                        slot.release()
                await outlet.emit(chunk)
                if outlet.dropped:
                    edge.drop()
                    return

        await in_parallel(self._threads, encode)
        outlet.end()

    async def _encode(self, chunk: Chunk, slot: Lease) -> bool:
        """True where the chunk now owns the slot."""
        if chunk.lease is None or chunk.planes:
            return False  # zeros, or encoded already (a copied image)
        limit = int(chunk.raw_bytes * (1 - GAIN))
        if padded(limit) >= padded(chunk.raw_bytes):
            limit = padded(chunk.raw_bytes) - 4096  # a gain that the padding swallows is none
        stored = 0
        if limit > 0:
            compress = self._context.codecs.compress
            stored = await compress(self.choice, chunk.lease, chunk.raw_bytes, slot, limit)
        if stored == 0:
            self.raw += 1
            return False
        clear_padding(slot, stored)
        crc = await self._context.workers.crc32c(slot, stored)
        planes = whole_plane(CODEC_IDS[self.choice.name], self.choice.level or 0, chunk.raw_bytes, stored)
        chunk.encode(slot, stored, crc, planes)
        self.compressed += 1
        return True
