"""The chunk: what travels through the graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ckptpipe.pipeline.image.records import PlaneRecord
from ckptpipe.pyx.staging import Lease
from ckptpipe.storage_backends.abc import LocalFile


@contextmanager
def released_on_error(lease: Lease) -> Iterator[Lease]:
    """Own ``lease`` for a block: released where the block fails, unless somebody took and released it."""
    try:
        yield lease
    except BaseException:
        if not lease.released:
            lease.release()
        raise


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Where a chunk's stored bytes lie in a local file, and one hold on it."""

    file: LocalFile
    offset: int

    def share(self) -> FilePlace:
        return FilePlace(self.file.share(), self.offset)


class Chunk:
    """One chunk of one stream, and the lease on its bytes.

    ``lease[:stored_bytes]`` are the bytes as they will be stored; zeros follow up to `padded`. A zero chunk
    has no lease; nor has one that was not read, whose bytes lie at ``place`` (only for sinks that can fetch them
    from there), or one that has ``landed``: its sink said where to, and they are there. ``planes`` is empty where the
    stored bytes are the raw ones. Whoever holds a chunk passes it on or calls `release`, once. ``version``: of a
    chunk that is sent again, since it changed: the highest counts, in whatever order they arrive.
    """

    __slots__ = (
        "landed",
        "lease",
        "number",
        "place",
        "planes",
        "raw_bytes",
        "raw_crc32c",
        "stored_bytes",
        "stored_crc32c",
        "stream",
        "transform",
        "unsettled",
        "verified",
        "version",
    )

    def __init__(
        self,
        stream: int,
        number: int,
        raw_bytes: int,
        raw_crc32c: int,
        lease: Lease | None,
        version: int = 0,
    ) -> None:
        self.stream = stream
        self.number = number
        self.raw_bytes = raw_bytes
        self.raw_crc32c = raw_crc32c
        self.lease = lease
        self.place: FilePlace | None = None
        self.landed = False
        self.stored_bytes = raw_bytes if lease is not None else 0
        self.stored_crc32c = raw_crc32c if lease is not None else 0
        self.transform = 0
        self.planes: tuple[PlaneRecord, ...] = ()
        self.version = version
        self.unsettled = False  # its bytes may change while they are stored: then a higher version comes
        self.verified = True  # False: `raw_crc32c` is what the bytes should have; the sink finds out

    @property
    def zero(self) -> bool:
        return self.lease is None and self.place is None and not self.landed

    def encode(
        self,
        lease: Lease,
        stored_bytes: int,
        stored_crc32c: int,
        planes: tuple[PlaneRecord, ...],
        transform: int = 0,
    ) -> None:
        """Replace the bytes by their encoded form; the old lease is released, the new one is the chunk's."""
        if self.lease is not None:
            self.lease.release()
        self.lease = lease
        self.stored_bytes = stored_bytes
        self.stored_crc32c = stored_crc32c
        self.planes = planes
        self.transform = transform

    def share(self) -> Chunk:
        """The same chunk for one more branch, with a lease of its own."""
        twin = Chunk.__new__(Chunk)
        twin.stream = self.stream
        twin.number = self.number
        twin.raw_bytes = self.raw_bytes
        twin.raw_crc32c = self.raw_crc32c
        twin.lease = None if self.lease is None else self.lease.share()
        twin.landed = self.landed
        twin.place = None if self.place is None else self.place.share()
        twin.stored_bytes = self.stored_bytes
        twin.stored_crc32c = self.stored_crc32c
        twin.transform = self.transform
        twin.planes = self.planes
        twin.verified = self.verified
        twin.version = self.version
        twin.unsettled = self.unsettled
        return twin

    def release(self) -> None:
        if self.lease is not None:
            self.lease.release()
            self.lease = None
        if self.place is not None:
            self.place.file.release()
            self.place = None
