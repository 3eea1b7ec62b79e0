"""Decode what a codec has just made, before the only other copy of it is given up."""

from __future__ import annotations

from ckptpipe.pipeline.chunk import Chunk
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.edge import Edge, Outlet
from ckptpipe.pipeline.errors import SaveFailed
from ckptpipe.pipeline.image.records import ChunkRecord
from ckptpipe.pipeline.parallel import in_parallel
from ckptpipe.pipeline.stages.abc import Stage, pass_each


class ProveStage(Stage):
    """Passes chunks on that decode to the bytes that they were; SaveFailed for one that does not."""

    def __init__(self, name: str, context: GraphContext) -> None:
        self.name = name
        self._context = context
        self._threads = context.codecs.threads
        self._ring = context.make_ring(self._threads)

    async def run(self, edge: Edge, outlet: Outlet) -> None:
        async def prove(chunk: Chunk) -> None:
            if chunk.planes:
                await self._prove(chunk)

        await in_parallel(self._threads, lambda: pass_each(edge, outlet, prove))
        outlet.end()

    async def _prove(self, chunk: Chunk) -> None:
        assert chunk.lease is not None
        record = ChunkRecord(
            chunk.stream,
            chunk.number,
            chunk.raw_bytes,
            chunk.raw_crc32c,
            stored_bytes=chunk.stored_bytes,
            stored_crc32c=chunk.stored_crc32c,
            transform=chunk.transform,
            planes=chunk.planes,
        )
        with await self._ring.acquire() as slot:
            try:
                await self._context.codecs.decompress(record, chunk.lease, slot)
                same = await self._context.workers.crc32c(slot, chunk.raw_bytes) == chunk.raw_crc32c
            except ValueError as error:
                raise self._failed(chunk, str(error)) from error
        if not same:
            raise self._failed(chunk, "the bytes are others")

    @staticmethod
    def _failed(chunk: Chunk, why: str) -> SaveFailed:
        return SaveFailed(
            f"stream {chunk.stream} chunk {chunk.number} does not decode to what was encoded: {why}",
            cure="the old image stands; check this machine's memory, and report it",
        )
