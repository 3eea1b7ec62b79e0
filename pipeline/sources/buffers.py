"""Host memory as a source: anything with the buffer protocol, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptpipe.pipeline.chunk import Chunk, released_on_error
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.edge import Outlet
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.parallel import in_parallel
from ckptpipe.pipeline.sources.abc import Source, Stream, clear_padding, fillers, lease_in_order, stream_of
from ckptpipe.pyx.staging import Lease


class BuffersSource(Source):
    """``buffers``: {name: buffer}. Each becomes the stream ``host/<name>``, copied once, checksummed on the way.

    The copy is what makes the image consistent: a buffer that its owner writes to while it is saved gives a
    mixture of old and new bytes, but never bytes that disagree with their checksum.
    """

    kind = "buffers"

    def __init__(self, buffers: Mapping[str, Any]) -> None:
        self._buffers = dict(buffers)
        if not self._buffers:
            raise UsageError("no buffer to save", cure='pass at least one: {"name": buffer}')
        for name in self._buffers:
            if not isinstance(name, str):
                raise UsageError(f"{name!r} cannot name a buffer", cure="name buffers by texts")
        self._leases: list[Lease] = []
        self.streams = []
        self.tree = []

    async def open(self, context: GraphContext) -> None:
        self._context = context
        for name, buffer in self._buffers.items():
            stream = stream_of(name)
            try:
                lease = lease_in_order(buffer)
            except (TypeError, BufferError, ValueError) as error:
                raise UsageError(
                    f"buffer {name!r} cannot be read as contiguous bytes: {error}",
                    cure="pass bytes, bytearray, memoryview or a C-contiguous array",
                ) from error
            self._leases.append(lease)
            self.streams.append(Stream(stream, "buffer", lease.nbytes))
        self.total_bytes = sum(stream.nbytes for stream in self.streams)

    async def run(self, outlet: Outlet) -> None:
        context, ring, step = self._context, self._context.ring, self._context.chunk_bytes
        work = self._work(step)

        async def fill() -> None:
            for stream, number, nbytes in work:
                if outlet.dropped:
                    return
                with released_on_error(await ring.acquire()) as slot:
                    with self._leases[stream].slice(number * step, nbytes) as part:
                        scan = await context.workers.copy(slot, part, nbytes)
                    if scan.zero:
                        slot.release()
                        chunk = Chunk(stream, number, nbytes, scan.crc32c, None)
                    else:
                        clear_padding(slot, nbytes)
                        chunk = Chunk(stream, number, nbytes, scan.crc32c, slot)
                await outlet.emit(chunk)

        await in_parallel(fillers(context), fill)

    def _work(self, step: int) -> Iterator[tuple[int, int, int]]:
        for index, stream in enumerate(self.streams):
            for number, offset in enumerate(range(0, stream.nbytes, step)):
                yield index, number, min(step, stream.nbytes - offset)

    async def aclose(self) -> None:
        while self._leases:
            self._leases.pop().release()
