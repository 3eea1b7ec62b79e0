"""A GPU as a decoder for host memory: a restore into files of what no CPU decodes, or shall not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda import codec_device
from ckptpipe.pipeline.cuda.driver import CudaDriver, Gpu, borrowed
from ckptpipe.pipeline.cuda.gpu_decoding import GpuDecoding, readable
from ckptpipe.pipeline.cuda.links import Link, Links
from ckptpipe.pipeline.cuda.places import DevicePlaces
from ckptpipe.pipeline.decoding import BadChunk, differs, require_cpu
from ckptpipe.pipeline.image.codec_use import codecs_used
from ckptpipe.pipeline.image.reader import ImageReader
from ckptpipe.pipeline.image.records import ChunkRecord, PlaneRecord
from ckptpipe.pyx.cuda import cuda_error
from ckptpipe.pyx.cuda_errors import NO_DEVICE
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.pyx.staging import Lease

PLACES = 8  # chunks of device memory into which is decoded: while some are decoded, others are copied out


class GpuDecoder:
    """Implements `HostDecoder`. ``places``: of a chunk each."""

    def __init__(self, link: Link, decoding: GpuDecoding, places: DevicePlaces) -> None:
        self._link = link
        self._decoding = decoding
        self._places = places

    def takes(self, planes: Sequence[PlaneRecord]) -> bool:
        return bool(planes) and self._decoding.takes(planes)

    async def decode(self, row: ChunkRecord, stored: Lease, raw: Lease) -> None:
        link = self._link
        assert link.codec is not None, "made with a codec"
        async with self._places.one(link) as place:
            await codec_device.decode(link.codec, row, stored, place)
            scan = await link.queue.fetch(raw, row.raw_bytes, place)
        if scan.zero:  # that is not copied
            with memoryview(raw) as view:
                view[: row.raw_bytes] = bytes(row.raw_bytes)
        if scan.crc32c != row.raw_crc32c:
            raise BadChunk(differs("decoded", scan.crc32c, row.raw_crc32c))

    def decoded_by(self) -> dict[str, int]:
        return self._link.decoded_by()


@asynccontextmanager
async def gpu_decoder(
    reader: ImageReader, context: GraphContext, streams: Sequence[str] | None
) -> AsyncIterator[GpuDecoder]:
    """On the GPU with most memory free. UnsupportedImage, UsageError or CkptpipeError where that cannot be."""
    asked = context.settings.decompress_backend
    async with AsyncExitStack() as stack:
        try:
            cuda = await stack.enter_async_context(borrowed(None))
            links = await stack.enter_async_context(Links(cuda))
            await links.open(context, [await _freest(cuda)])
            await links.open_codecs(context, asked)
        except CkptpipeError as error:
            if asked == "auto":
                require_cpu(reader, codecs_used(reader.index, reader.select(streams)), error)
            raise
        decoding = await readable(links, context, reader, streams)
        (link,) = links
        places = await DevicePlaces.open(cuda, link.context, PLACES, context.chunk_bytes)
        try:
            yield GpuDecoder(link, decoding, places)
        finally:
            await link.drain()
            await places.aclose()
        context.notes.extend(links.notes())


async def _freest(cuda: CudaDriver) -> Gpu:
    free: dict[int, int] = {}
    gpus = await cuda.devices()
    for gpu in gpus:
        handle = await cuda.retain(gpu.ordinal)
        try:
            free[gpu.ordinal], _ = await cuda.memory(handle)
        finally:
            await cuda.release(gpu.ordinal)
    if not gpus:
        raise cuda_error(NO_DEVICE, "cuDeviceGetCount", detail="no GPU is visible")
    return max(gpus, key=lambda gpu: free[gpu.ordinal])
