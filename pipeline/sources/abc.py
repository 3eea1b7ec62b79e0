"""What a source is: named streams, cut into chunks."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptpipe.pipeline.chunk import Chunk
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.edge import Outlet
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.image.entries import StreamKind, TreeEntry
from ckptpipe.pipeline.image.layout import padded
from ckptpipe.pipeline.image.names import host_stream
from ckptpipe.pyx.checksum import crc32c_zeros
from ckptpipe.pyx.staging import Lease, lease_buffer

if TYPE_CHECKING:
    from ckptpipe.pipeline.spec import GraphSpec
    from ckptpipe.pipeline.stages.encoded import EncodedStage


_FIELD_NAME = re.compile(r":[^:]*:")  # in a format of the struct module


@dataclass(slots=True)
class Stream:
    """One named byte range. ``nbytes`` is final when the source has ended (stdin grows until then).

    ``mode`` (permission bits), ``mtime_ns`` and ``sparse`` belong to files.
    """

    name: str
    kind: StreamKind
    nbytes: int = 0
    mode: int | None = None
    mtime_ns: int | None = None
    sparse: bool = False


class Source(ABC):
    """Produces the chunks of its streams into an outlet; leases come from the context's ring.

    Order of calls: `open` (checks everything that can be checked, touches no sink), `run` once, `aclose`.
    """

    kind: str
    streams: list[Stream]
    tree: list[TreeEntry]
    total_bytes: int | None = None

    @abstractmethod
    async def open(self, context: GraphContext) -> None: ...

    async def take_stages(self, spec: GraphSpec) -> Mapping[str, tuple[EncodedStage, object]]:
        """Compress stages of ``spec`` that this source does itself, by name: what takes the stage's place, and
        what its edge wants of `Outlet.parts`. Called after `open`, before anything runs."""
        return {}

    @abstractmethod
    async def run(self, outlet: Outlet) -> None:
        """Emit every chunk of every stream; returns early where the outlet is dropped."""

    @abstractmethod
    async def aclose(self) -> None: ...

    @property
    def need_bytes(self) -> int:
        """What an uncompressed copy of everything takes up; 0 where that is not known."""
        return self.total_bytes or 0

    def codec_facts(self) -> dict[str, Any]:
        """For the manifest's ``codec``, where chunks are stored as this source emits them."""
        return {"name": "none"}

    def facts(self) -> dict[str, Any]:
        """For the manifest's ``source``: plain facts, no secrets."""
        return {"kind": self.kind}

    def process(self) -> dict[str, Any] | None:
        """For the manifest's ``process``, where the streams are a process's memory."""
        return None

    def notes(self) -> list[str]:
        """What the result should say, such as a fallback."""
        return []


def stream_of(name: str) -> str:
    """The stream of a buffer or of stdin; UsageError where the name is not possible."""
    try:
        return host_stream(name)
    except ValueError as error:
        raise UsageError(
            f"{name!r} cannot name a stream: {error}", cure="take a relative path without .."
        ) from error


def lease_in_order(buffer: Any) -> Lease:
    """A lease over a buffer's bytes. BufferError where its items do not lie one behind the other in C's order (an array in
    Fortran's order would come back transposed from the stream of its bytes), and where they are not bytes, but
    references to Python objects."""
    with memoryview(buffer) as view:
        if "O" in _FIELD_NAME.sub("", view.format):
            raise BufferError("its items are references to Python objects")
        if not view.c_contiguous:
            raise BufferError("its items do not lie one behind the other in C order")
    return lease_buffer(buffer)


def clear_padding(lease: Lease, nbytes: int) -> None:
    """Zero the bytes from ``nbytes`` to the next multiple of 4096: the padding that will be stored."""
    end = min(padded(nbytes), lease.nbytes)
    if end > nbytes:
        with memoryview(lease) as view:
            view[nbytes:end] = bytes(end - nbytes)


def zero_chunk(stream: int, number: int, nbytes: int) -> Chunk:
    return Chunk(stream, number, nbytes, crc32c_zeros(nbytes), None)


async def scanned_chunk(context: GraphContext, lease: Lease, stream: int, number: int, nbytes: int) -> Chunk:
    """Checksum and zero-test ``lease[:nbytes]``; the lease goes into the chunk, or back where it is zeros.

    The lease stays the caller's when this raises.
    """
    scan = await context.workers.scan(lease, nbytes)
    if scan.zero:
        lease.release()
        return Chunk(stream, number, nbytes, scan.crc32c, None)
    clear_padding(lease, nbytes)
    return Chunk(stream, number, nbytes, scan.crc32c, lease)


def fillers(context: GraphContext) -> int:
    """How many tasks of a source fill slots side by side."""
    return max(2, min(context.ring.slots // 2, 8))
