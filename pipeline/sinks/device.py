"""A sink that writes into device memory: the end of a restore into a process or into device buffers."""

from __future__ import annotations

from collections.abc import Sequence

from ckptpipe.pipeline.chunk import Chunk
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda.codec_device import decode
from ckptpipe.pipeline.cuda.links import Link, Links
from ckptpipe.pipeline.decoding import BadChunk
from ckptpipe.pipeline.edge import Edge
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.result import SinkResult
from ckptpipe.pipeline.sinks.abc import Sink
from ckptpipe.pipeline.sources.abc import Source, in_parallel
from ckptpipe.pipeline.sources.device import DeviceRange
from ckptpipe.pipeline.sources.image import ImageSource
from ckptpipe.pyx.staging import Lease


class DeviceSink(Sink):
    """``ranges``: where each stream of the source goes, in any order; sizes must agree.

    When `run` has returned, every byte has arrived on its GPU and is verified: chunks that come unverified
    (`verifies` says whether they may) are checksummed there, at many times the speed of the link. Chunks that come
    as they are stored are decoded there, by the codecs of ``links``: their stored bytes are checked before.
    """

    name = "device memory"
    url = "device memory"

    def __init__(self, ranges: Sequence[DeviceRange], links: Links, context: GraphContext) -> None:
        self._by_stream = {each.stream: each for each in ranges}
        self._links = links
        self._context = context
        self._ranges: list[DeviceRange] = []
        self._zeros: Lease | None = None

    @staticmethod
    def verifies(ranges: Sequence[DeviceRange], links: Links) -> bool:
        """Whether all of the GPUs can checksum."""
        return all(links[each.ordinal].queue.checksum == "device" for each in ranges)

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
        writers = self._context.ring.slots  # a chunk whose slot is free again is still being verified

        async def write() -> None:
            while (chunk := await edge.get()) is not None:
                target = self._ranges[chunk.stream]
                address = target.address + chunk.number * self._context.chunk_bytes
                link = self._links[target.ordinal]
                try:
                    if chunk.planes:
                        await self._decode(chunk, link, address)
                    else:
                        lease = chunk.lease if chunk.lease is not None else self._zero_lease()
                        await link.queue.store(address, lease, chunk.raw_bytes)
                finally:
                    chunk.release()
                if not chunk.verified and not chunk.planes:
                    found = (await link.queue.scan(address, chunk.raw_bytes)).crc32c
                    if found != chunk.raw_crc32c:
                        raise self._image.refuse(chunk.stream, chunk.number, found)
                self.done_bytes += chunk.raw_bytes

        before = {link.gpu.ordinal: link.decoded_by() for link in self._links}
        await in_parallel(writers, write)
        for link in self._links:
            for backend, chunks in link.decoded_by().items():
                if more := chunks - before[link.gpu.ordinal].get(backend, 0):
                    self._image.counts.count_decoded(backend, more)

    async def _decode(self, chunk: Chunk, link: Link, address: int) -> None:
        assert link.codec is not None and chunk.lease is not None, "what is passed on can be decoded here"
        try:
            await decode(link.codec, chunk, chunk.lease, address)
        except BadChunk as error:
            raise self._image.refuse_stored(chunk.stream, chunk.number, str(error)) from error

    @property
    def _image(self) -> ImageSource:
        assert isinstance(self._source, ImageSource), "no other source leaves chunks unverified"
        return self._source

    def _zero_lease(self) -> Lease:
        """One slot of zeros for every chunk of zeros."""
        if self._zeros is None:
            self._zeros = self._context.make_ring(1).try_acquire()
            assert self._zeros is not None, "a new ring has a free slot, and new memory is zeros"
        return self._zeros

    async def commit(self) -> None:
        return

    async def settle(self) -> None:
        return

    async def abort(self) -> None:
        return

    async def aclose(self) -> None:
        for link in self._links:  # what was cut off must not write into what a second try has written
            await link.drain()
        if self._zeros is not None:
            self._zeros.release()
            self._zeros = None

    def result(self) -> SinkResult:
        return SinkResult(url=self.url, image_url="", policy=self.policy, ok=True)
