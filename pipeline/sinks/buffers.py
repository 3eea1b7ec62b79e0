"""A sink that fills the caller's own memory: the end of a restore into buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.edge import Edge
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.parallel import in_parallel
from ckptpipe.pipeline.sinks.abc import RestoringSink
from ckptpipe.pipeline.sources.abc import Source, lease_in_order
from ckptpipe.pyx.staging import Lease
from ckptpipe.storage_backends.shielded import in_thread

WRITERS = 4  # chunks copied side by side
_ZEROS = bytes(1 << 20)


class BuffersSink(RestoringSink):
    """``buffers``: {stream name, or the part of it behind ``host/``, ``device/`` or ``files/``: writable buffer}.

    Each buffer must be contiguous and as long as its stream. Chunks are verified before they are copied; when
    a restore fails half-way, the buffers hold the chunks that came before, and the error says so.
    """

    name = "buffers"
    url = "buffers"

    def __init__(self, buffers: Mapping[str, Any], context: GraphContext) -> None:
        self._buffers = dict(buffers)
        self._context = context
        self._leases: list[Lease] = []

    async def check(self, source: Source) -> None:
        if len(source.streams) != len(self._buffers):
            raise UsageError("two buffers are named after one stream", cure="give one buffer for each stream")
        for stream in source.streams:
            name = next((name for name in names_of(stream.name) if name in self._buffers), None)
            assert name is not None, "the source was made from the buffers' names"
            try:
                lease = lease_in_order(self._buffers[name])
            except (TypeError, BufferError, ValueError) as error:
                raise UsageError(
                    f"buffer {name!r} cannot be written as contiguous bytes: {error}",
                    cure="pass a bytearray or a C-contiguous array",
                ) from error
            self._leases.append(lease)
            with memoryview(lease) as view:
                readonly = view.readonly
            if readonly:
                raise UsageError(f"buffer {name!r} is read-only", cure="pass a bytearray or a writable array")
            if lease.nbytes != stream.nbytes:
                raise UsageError(
                    f"buffer {name!r} has {lease.nbytes} bytes, the stream {stream.name} has {stream.nbytes}",
                    cure="make the buffer exactly as long as the stream",
                )

    async def begin(self, source: Source) -> None:
        return

    async def run(self, edge: Edge) -> None:
        step = self._context.chunk_bytes

        async def write() -> None:
            while (chunk := await edge.get()) is not None:
                try:
                    with self._leases[chunk.stream].slice(chunk.number * step, chunk.raw_bytes) as target:
                        if chunk.lease is not None:
                            await self._context.workers.copy(target, chunk.lease, chunk.raw_bytes)
                        else:
                            await in_thread(_clear, target)
                finally:
                    chunk.release()
                self.done_bytes += chunk.raw_bytes

        await in_parallel(WRITERS, write)

    async def aclose(self) -> None:
        while self._leases:
            self._leases.pop().release()


def _clear(target: Lease) -> None:
    with memoryview(target) as view:
        for at in range(0, len(view), len(_ZEROS)):
            view[at : at + len(_ZEROS)] = _ZEROS[: len(view) - at]


def names_of(stream: str) -> tuple[str, ...]:
    """The names under which a caller may mean a stream."""
    short = next(
        (stream.removeprefix(each) for each in ("host/", "device/", "files/") if stream.startswith(each)),
        stream,
    )
    return (stream, short)
