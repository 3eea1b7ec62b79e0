"""What a manifest lists: streams, objects, the tree, the index. Plain frozen values; sizes are bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StreamKind = Literal["file", "buffer", "stdin", "gpu", "driver"]
TreeKind = Literal["directory", "symlink"]
STREAM_KINDS: tuple[StreamKind, ...] = ("file", "buffer", "stdin", "gpu", "driver")
IndexCompression = Literal["zstd", "deflate"]
INDEX_COMPRESSIONS: tuple[IndexCompression, ...] = ("zstd", "deflate")
MODE_BITS = 0o777  # set-user-id, set-group-id and sticky bits are not kept


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """One stream. ``name`` is spelled as `names` says; ``mode``, ``mtime_ns``, ``sparse`` belong to files."""

    name: str
    bytes: int
    chunks: int
    kind: StreamKind = "file"
    mode: int | None = None
    mtime_ns: int | None = None
    sparse: bool = False

    @property
    def facts(self) -> dict[str, int | bool]:
        """What a file has beside its name and bytes, by the names of the fields; empty for other kinds."""
        found: dict[str, int | bool] = {}
        if self.mode is not None:
            found["mode"] = self.mode
        if self.mtime_ns is not None:
            found["mtime_ns"] = self.mtime_ns
        if self.sparse:
            found["sparse"] = True
        return found

    def __post_init__(self) -> None:
        _settle_mode(self)


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """One data object; a row of the index refers to it by its position. ``crc32c``: of all its bytes."""

    name: str
    lane: int
    number: int
    bytes: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """A directory or symbolic link beside the ``files/`` streams; ``path`` is spelled, without ``files/``."""

    path: str
    kind: TreeKind
    mode: int | None = None  # of a directory
    target: str = ""  # of a link, spelled
    mtime_ns: int | None = None

    def __post_init__(self) -> None:
        _settle_mode(self)


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """The index object: its size, its unpacked size, the SHA-256 of the stored bytes, and how these are packed."""

    name: str
    bytes: int
    raw_bytes: int
    sha256: str
    rows: int
    compression: IndexCompression = "zstd"


@dataclass(frozen=True, slots=True)
class Totals:
    """``stored_bytes``: of all data objects, padding included."""

    raw_bytes: int
    stored_bytes: int
    chunks: int
    zero_chunks: int


@dataclass(frozen=True, slots=True)
class Writer:
    """The program that saved."""

    name: str
    version: str


def chunk_count(nbytes: int, chunk_bytes: int) -> int:
    return -(-nbytes // chunk_bytes)


def _settle_mode(entry: StreamEntry | TreeEntry) -> None:
    """Modes keep their permission bits alone, and only files and directories have one."""
    if entry.kind not in ("file", "directory"):
        object.__setattr__(entry, "mode", None)
    elif entry.mode is not None and entry.mode & ~MODE_BITS:
        object.__setattr__(entry, "mode", entry.mode & MODE_BITS)
