"""What a storage backend is: named byte objects under one URL, and what it guarantees of them.

A backend knows nothing of images, chunks or codecs. The graph obeys its `Capabilities` and reports its
`BackendReport`. Third parties register a class under the entry-point group ``ckptpipe.storage_backends``
and run `ckptpipe.storage_backends.testing` against it.
"""

from __future__ import annotations

import builtins
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, Self

from ckptpipe.pyx.io_engine import IoEngine
from ckptpipe.pyx.staging import Lease
from ckptpipe.pyx.workers import WorkerPool
from ckptpipe.storage_backends.errors import BadName

DirectMode = Literal["auto", "on", "off"]

NAME_PATTERN = re.compile(r"[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*", re.ASCII)
NAME_MAX = 255  # bytes of one component (NAME_MAX of Linux file systems)
TEMPORARY_PREFIX = ".tmp-"  # of files that `put_atomic` has not renamed yet; no object may be named so
WRITE_PROBE = "write-probe"
"""The name of the upload or temporary file by which `Backend.check` proves that it may write; with a random
part behind it, of the empty object by which gc asks for the store's clock. Never another object's."""


def is_name(name: str) -> bool:
    """Whether `check_name` takes it."""
    try:
        check_name(name)
    except BadName:
        return False
    return True


def check_name(name: str) -> str:
    """``name`` itself; BadName where it is not `[A-Za-z0-9._-]+` joined by `/`, or could leave its URL."""
    if NAME_PATTERN.fullmatch(name) is None:
        raise BadName(f"object name {name!r} is refused: only A-Z a-z 0-9 . _ - are allowed, joined by /")
    for part in name.split("/"):
        if part in (".", "..") or part.startswith(TEMPORARY_PREFIX) or len(part) > NAME_MAX:
            raise BadName(f"object name {name!r} is refused: {part[:40]!r} cannot be part of one")
    return name


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Of a backend that takes none."""


@dataclass(frozen=True, slots=True)
class BackendContext:
    """What the graph lends to its backends: they share one engine and one pool, and close neither."""

    io: IoEngine
    workers: WorkerPool
    inflight_bytes: int = 128 << 20  # footprint of leases that all writers of one backend may hold together


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the graph must know before it writes."""

    write_size: int  # bytes of one append that the store likes best (part size, direct-write size)
    lanes: int = 1  # objects to write side by side
    max_object_bytes: int = 1 << 40  # the packer starts a new object before this
    stripes: int = 1  # directories or devices that lanes are spread over (lane i goes to stripe i % stripes)
    put_atomic: Literal["rename", "conditional-put", "put", "memory", "in-place"] = "rename"
    if_absent: Literal["atomic", "checked"] = "atomic"  # "checked": look first, then write; a race can lose
    durable: bool = True  # finish() and put_atomic() return only when a crash of the machine cannot undo them
    takes_files: bool = False  # `ObjectWriter.append_file`: bytes in the page cache need no memory of ours
    reads_through: bool = False  # `read_through`, most of the time
    reads_anew: bool = False  # a second read asks the store again: what was garbled on the way may come right
    keeps: bool = True  # what was stored can be looked at and read
    in_memory: bool = False  # takes bytes as fast as the CPU copies them: encoding them first only costs


@dataclass(frozen=True, slots=True)
class Extent:
    """``lease[:nbytes]`` as the next bytes of an object; ``crc32c`` is that of exactly these bytes.

    ``nbytes`` is a multiple of 4096 (the packer pads with zeros).
    """

    lease: Lease
    nbytes: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object. ``modified``: Unix seconds by the store's clock. ``crc32c`` None where it is not known."""

    name: str
    size: int
    modified: float
    crc32c: int | None = None


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """An incomplete multipart upload (or a temporary file) that some save left behind."""

    name: str
    token: str
    started: float


@dataclass(slots=True)
class BackendReport:
    """What ran, for the result: requested and effective mode are separate facts."""

    backend: str
    engine: str = ""  # io_uring | libaio | threads | http | https | ""
    direct: str = ""  # "on", "off", "on (2 of 3 objects: …)"; "" where it has no meaning
    retries: int = 0
    notes: list[str] = field(default_factory=list)  # each fallback, in words
    unlisted: str = ""  # what `pending` could not find out, once it was asked; it is among the notes, too


class LocalFile(Protocol):
    """An object that is a file of this machine, open for reading: one hold on it.

    The descriptor stays open, and its number this file's, until every hold is released. Reading it goes through
    the page cache. ``size`` is the file's when it was opened.
    """

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int: ...

    def fileno(self) -> int: ...

    def share(self) -> Self:
        """One more hold."""

    def release(self) -> None:
        """Give this hold up, once."""


@dataclass(frozen=True, slots=True)
class Landing:
    """Where ``nbytes`` stored bytes go that nobody needs in memory: to ``offset`` of the open file ``fd``, or nowhere
    (-1). ``path`` names the file in errors.
    """

    nbytes: int
    fd: int = -1
    offset: int = 0
    path: str = ""


class ObjectWriter(ABC):
    """Appends to one new object. Not visible, or not yet whole, until `finish` returns.

    The object is exclusively the writer's: names are unique (they hold a save id), so nothing is overwritten.
    """

    name: str

    @abstractmethod
    async def append(self, extents: Sequence[Extent]) -> int:
        """Take the extents as the object's next bytes; returns the offset of the first.

        Offsets are given in the order of the calls, before anything is awaited, so callers may keep several
        appends under way. The writer makes its own leases (`Lease.share`) before it first suspends and
        releases them when the store has the bytes; the caller keeps and releases its own. Suspends while the
        backend holds ``inflight_bytes``. Raises the first error of any earlier append.
        """

    async def append_file(self, file: LocalFile, start: int, nbytes: int, crc32c: int) -> int:
        """As `append`, of ``nbytes`` at ``start`` of an open file, with a hold on it in place of a lease.

        Only where `Capabilities.takes_files` is true. The store compares what it gets with ``crc32c``: a file that
        changes meanwhile is an error.
        """
        raise NotImplementedError

    @abstractmethod
    async def finish(self) -> ObjectInfo:
        """Write out, make durable, give size and CRC32C of the whole object. After an error: raises it."""

    @abstractmethod
    async def abort(self) -> None:
        """Undo: the object and all that was stored for it is gone, every lease is released.

        Idempotent, never raises for what is already gone, shielded from cancellation, waits for operations
        that the kernel or a socket still has.
        """


class Backend(ABC):
    """Named byte objects under one URL. Names are relative, `[A-Za-z0-9._-]+` joined by `/`.

    Guarantees that every backend gives: an object is never seen with bytes other than those appended;
    after `finish` it can be read by another process; `put_atomic` leaves the old object or the new one;
    `list` sees what `finish` and `put_atomic` returned (read-after-write).
    """

    scheme: ClassVar[str]
    options_type: ClassVar[type[Any]] = NoOptions  # a frozen dataclass of fields made by `options.option`
    url: str  # printable, without credentials
    capabilities: Capabilities

    @classmethod
    @abstractmethod
    async def open(cls, url: str, context: BackendContext, options: Mapping[str, object]) -> Self:
        """Open for ``url``. Checks options (BadUrl names the nearest valid one) and opens nothing lazily that
        could fail fast: wrong endpoint, bucket or credentials are errors of `check`, within seconds."""

    @abstractmethod
    async def check(self, *, writing: bool, need_bytes: int = 0) -> None:
        """Prove that the store is there and that we may read (and write) it; NoSpace where ``need_bytes``
        (0: not known) cannot fit. Makes what `create` needs (directories, 0700) when writing."""

    @abstractmethod
    def child(self, name: str) -> Self:
        """The backend of ``URL/name`` (for a striped URL, name under every directory). Shares the client."""

    @abstractmethod
    async def children(self, *, unfinished: bool = False) -> builtins.list[str]:
        """Sorted names one level down under which objects lie (the images of a container URL); with ``unfinished``,
        those too under which nothing but an incomplete upload lies. Names that `child` refuses are left out."""

    @abstractmethod
    async def create(self, name: str, *, lane: int = 0, size_hint: int = 0) -> ObjectWriter: ...

    @abstractmethod
    async def read_into(self, name: str, offset: int, nbytes: int, lease: Lease) -> int | None:
        """Fill ``lease[:nbytes]`` from the object. May scribble over the lease past nbytes up to the next
        multiple of 4096 (direct reads). ObjectTruncated where the object ends early, ObjectNotFound.

        The CRC32C of these bytes as they lie in the lease, where it was taken on the way; never what a store says
        of them. None: whoever wants it takes it."""

    async def read_through(self, name: str, offset: int, to: Sequence[Landing]) -> builtins.list[int] | None:
        """Bring the object's bytes from ``offset`` on to one landing after the other, without a place for all of them
        in memory; the CRC32C of each landing's, of the memory that was written out.

        None, the default, where `read_into` has to do it; some bytes may have been written then, as may after an
        error. When it returns or raises, nothing writes any more. Errors as of `read_into`, and IoError of the file.
        """
        return None

    async def local_file(self, name: str) -> LocalFile | None:
        """The object as an open file, for a reader that copies out of the page cache by itself (into a GPU's memory).

        None, the default, where it is no file, or where another way to read it is better: past the page cache (direct
        I/O), or through a wrapper that must see each read. Only a backend whose `read_into` would read that file
        through the page cache gives it. ObjectNotFound.
        """
        return None

    @abstractmethod
    async def read_bytes(self, name: str, *, limit: int) -> bytes:
        """A whole small object. StorageError where it is larger than ``limit`` bytes."""

    @abstractmethod
    async def put_atomic(self, name: str, data: bytes, *, if_absent: bool = False, lane: int = 0) -> None:
        """Store a small object: the old one or the new one, never a mixture. ObjectExists with ``if_absent``."""

    @abstractmethod
    async def stat(self, name: str) -> ObjectInfo: ...

    @abstractmethod
    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Objects directly in this URL (not deeper) whose name starts with prefix, sorted by name."""

    @abstractmethod
    async def delete(self, name: str) -> None:
        """Gone afterwards; not an error where it already is."""

    @abstractmethod
    async def remove_if_empty(self) -> None:
        """Remove the URL's own directory where the store has such a thing and nothing is in it."""

    @abstractmethod
    async def pending(self) -> builtins.list[PendingUpload]:
        """Incomplete uploads and temporary files in this URL (not deeper)."""

    @abstractmethod
    async def discard(self, upload: PendingUpload) -> None: ...

    @abstractmethod
    def report(self) -> BackendReport: ...

    @abstractmethod
    async def aclose(self) -> None:
        """Idempotent. Leaves no task, thread, connection or descriptor. A `child` need not be closed."""
