"""A sink that writes into device memory: the end of a restore into a process or into device buffers."""

from __future__ import annotations

from collections.abc import Sequence

from ckptpipe.pipeline.chunk import Chunk
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda.codec_device import decode
from ckptpipe.pipeline.cuda.gpu_decoding import GpuDecoding
from ckptpipe.pipeline.cuda.links import Link, Links
from ckptpipe.pipeline.cuda.loading import load
from ckptpipe.pipeline.decoding import BadChunk
from ckptpipe.pipeline.edge import Edge
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.parallel import in_parallel
from ckptpipe.pipeline.sinks.abc import RestoringSink
from ckptpipe.pipeline.sources.abc import Source
from ckptpipe.pipeline.sources.device import DeviceRange
from ckptpipe.pipeline.sources.image import ImageSource, SinkWork
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.pyx.staging import Lease
from ckptpipe.pyx.workers import Scan

WRITERS_MAX = 64  # chunks under way: more than the driver has at a time


class DeviceSink(RestoringSink):
    """``ranges``: where each stream of the source goes, in any order; sizes must agree.

    When `run` has returned, every byte has arrived on its GPU and is verified: chunks that come unverified
    (`work` says whether they may) are checksummed there, at many times the speed of the link. Chunks that come
    as they are stored are decoded there, by the codecs of ``links``: their stored bytes are checked before.
    """

    name = "device memory"
    url = "device memory"

    def __init__(self, ranges: Sequence[DeviceRange], links: Links, context: GraphContext) -> None:
        self._by_stream = {each.stream: each for each in ranges}
        self._links = links
        self._context = context
        self._ranges: list[DeviceRange] = []

    @staticmethod
    def work(ranges: Sequence[DeviceRange], links: Links, decoding: GpuDecoding) -> SinkWork:
        """What a source can leave to it: checksums where all of the GPUs can, loading where all have a loader."""
        return SinkWork(
            verifies=all(links[each.ordinal].queue.checksum == "device" for each in ranges),
            decodes=decoding.takes,
            loads=all(link.loader is not None for link in links),
            loads_coded=decoding.loads,
        )

    async def check(self, source: Source) -> None:
        self._source = source
        names = [stream.name for stream in source.streams]
        if set(names) != set(self._by_stream):
            odd = sorted(set(names) ^ set(self._by_stream))
            raise UsageError(
                f"the image and the device memory do not have the same streams: {', '.join(odd)}"
            )
        for stream in source.streams:
            target = self._by_stream[stream.name]
            if target.nbytes != stream.nbytes:
                raise UsageError(
                    f"{stream.name} has {stream.nbytes} bytes in the image, and {target.nbytes} bytes in device memory",
                    cure="restore into memory of exactly the size that was saved",
                )
            self._ranges.append(target)

    async def begin(self, source: Source) -> None:
        return

    async def run(self, edge: Edge) -> None:
        writers = min(self._context.ring_bytes // self._context.chunk_bytes, WRITERS_MAX)

        async def write() -> None:
            while (chunk := await edge.get()) is not None:
                target = self._ranges[chunk.stream]
                address = target.address + chunk.number * self._context.chunk_bytes
                try:
                    found = await self._put(chunk, self._links[target.ordinal], address)
                finally:
                    chunk.release()
                if found is not None and found.crc32c != chunk.raw_crc32c:
                    raise self._image.refuse(chunk.stream, chunk.number, found.crc32c)
                self.done_bytes += chunk.raw_bytes

        before = {link.gpu.ordinal: link.decoded_by() for link in self._links}
        await in_parallel(writers, write)
        for link in self._links:
            for backend, chunks in link.decoded_by().items():
                if more := chunks - before[link.gpu.ordinal].get(backend, 0):
                    self._image.counts.count_decoded(backend, more)

    async def _put(self, chunk: Chunk, link: Link, address: int) -> Scan | None:
        """The chunk into device memory; what has arrived there, where that is for us to verify."""
        if chunk.place is not None and chunk.planes:
            await self._load_and_decode(chunk, link, address)
            return None
        if chunk.place is not None:
            return await load(self._image, chunk, link.queue, address)
        if chunk.planes:
            assert chunk.lease is not None, "only chunks of zeros have none"
            await self._decode(chunk, link, chunk.lease, address)
        elif chunk.lease is None:
            await link.queue.clear(address, chunk.raw_bytes)
        elif chunk.verified:
            await link.queue.store(address, chunk.lease, chunk.raw_bytes)
        else:
            return await link.queue.store_and_scan(address, chunk.lease, chunk.raw_bytes)
        return None

    async def _load_and_decode(self, chunk: Chunk, link: Link, address: int) -> None:
        """From a file into memory beside the destination, and decoded from there."""
        assert link.places is not None, "chunks come by their place where there is memory for them"
        async with link.places.one(link) as place:
            await load(self._image, chunk, link.queue, place)
            await self._decode(chunk, link, place, address)

    async def _decode(self, chunk: Chunk, link: Link, stored: Lease | int, address: int) -> None:
        assert link.codec is not None, "what is passed on can be decoded here"
        try:
            await decode(link.codec, chunk, stored, address)
        except BadChunk as error:
            raise self._image.refuse_stored(chunk.stream, chunk.number, str(error)) from error
        except CkptpipeError as error:
            self._image.name(chunk.stream, chunk.number, error)
            raise

    @property
    def _image(self) -> ImageSource:
        assert isinstance(self._source, ImageSource), "no other source leaves chunks unverified"
        return self._source

    async def aclose(self) -> None:
        for link in self._links:  # what was cut off must not write into what a second try has written
            await link.drain()
