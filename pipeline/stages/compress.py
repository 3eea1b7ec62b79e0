"""Compress a branch's chunks on the CPU, off the loop, several at a time."""

from __future__ import annotations

from ckptpipe.pipeline.chunk import Chunk
from ckptpipe.pipeline.codecs import Encoding
from ckptpipe.pipeline.codecs.encoding import GAIN
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.edge import Edge, Outlet
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.image.layout import padded
from ckptpipe.pipeline.parallel import in_parallel
from ckptpipe.pipeline.sources.abc import clear_padding
from ckptpipe.pipeline.stages.abc import CodingStage
from ckptpipe.pyx.staging import Lease


class CompressStage(CodingStage):
    """Encodes each chunk with one codec, behind a transform; keeps it raw where the gain is under `GAIN`.

    Output slots come from a ring of the stage's own, and one is reserved before a chunk is taken: a chunk in
    hand never waits for memory that only its own progress could free.
    """

    def __init__(self, name: str, encoding: Encoding, context: GraphContext, *, sink_bytes: int) -> None:
        """``sink_bytes``: what the sinks behind this stage keep in flight, so that the ring can feed them.

        UsageError for a codec that only a GPU writes: what comes here lies in host memory.
        """
        choice = encoding.codec
        if choice.needs_gpu:
            raise UsageError(
                f"{choice} is written on a GPU only, and what stage {name} reads lies in host memory",
                cure="take zstd or deflate, which the CPU writes",
            )
        super().__init__(name, choice)
        self.encoding = encoding
        self._context = context
        self._threads = context.codecs.threads
        self._ring = context.make_ring(self._threads + 1 + max(4, -(-sink_bytes // context.chunk_bytes)))

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
        encoded = await encode_chunk(self._context, self.encoding, chunk, slot)
        self.compressed += encoded
        self.raw += not encoded
        return encoded


async def encode_chunk(context: GraphContext, encoding: Encoding, chunk: Chunk, slot: Lease) -> bool:
    """Encode a raw chunk into ``slot``, which is the chunk's then. False where it is better stored as it is."""
    assert chunk.lease is not None
    limit = int(chunk.raw_bytes * (1 - GAIN))
    if padded(limit) >= padded(chunk.raw_bytes):
        limit = padded(chunk.raw_bytes) - 4096  # a gain that the padding swallows is none
    if limit <= 0:
        return False
    encoded = await context.codecs.compress(encoding, chunk.lease, chunk.raw_bytes, slot, limit)
    if not encoded.stored_bytes:
        return False
    clear_padding(slot, encoded.stored_bytes)
    crc = await context.workers.crc32c(slot, encoded.stored_bytes)
    chunk.encode(slot, encoded.stored_bytes, crc, encoded.planes, encoded.transform)
    return True
