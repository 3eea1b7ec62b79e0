"""The chunk table while a save runs: rows come in any order, packed at once, 64 bytes each."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import zstandard

from ckptpipe.pipeline.codecs import CODEC_IDS
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.image.entries import IndexCompression
from ckptpipe.pipeline.image.index_limits import INDEX_RAW_MAX
from ckptpipe.pipeline.image.records import (
    HEADER,
    MAGIC,
    ROW,
    VERSION,
    ChunkFlags,
    ChunkRecord,
    check_planes,
)
from ckptpipe.pyx.checksum import crc32c

ZSTD = CODEC_IDS["zstd"]
_LEVEL = 3
_DEFLATE_LEVEL = 4  # a fifth larger than zstd's level 3 makes it, at about 100 MB/s
_PIECE = 4 << 20
_FLAGS_AT, _RAW_AT, _PLANES_AT = (
    4,
    36,
    48,
)  # byte positions in a row: flags, raw length (never 0), plane offset


@dataclass(frozen=True, slots=True)
class EncodedIndex:
    """The index object, and what a manifest says of it."""

    stored: bytes
    raw_bytes: int
    rows: int
    sha256: str
    zero_chunks: int
    compression: IndexCompression


class IndexBuilder:
    """Takes each chunk's record and makes the index object. A chunk has one row: that of its highest version.

    Memory: 64 bytes a chunk, and what the plane records of coded chunks need (24 bytes for zstd).
    """

    def __init__(self, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.rows = 0
        self.zero_chunks = 0
        self._streams: dict[int, bytearray] = {}
        self._planes = bytearray()
        self._zstd = False  # whether a chunk is coded with it
        self._versions: dict[tuple[int, int], int] = {}  # of chunks that were sent again

    def add(self, record: ChunkRecord, version: int = 0) -> None:
        """Take one row. ValueError for one that contradicts itself, or is there in this version already.

        A higher version replaces the row, a lower one that comes late is dropped; what was stored of either stays
        in its object as bytes that no row refers to.
        """
        (
            stream,
            chunk,
            raw,
            raw_crc32c,
            number,
            lane,
            offset,
            stored,
            stored_crc32c,
            flags,
            transform,
            planes,
        ) = record
        problem = ""
        plane_offset = plane_bytes = 0
        if stream < 0 or chunk < 0:
            problem = "a negative number"
        elif not 0 < raw <= self.chunk_bytes:
            problem = f"{raw} raw bytes in chunks of {self.chunk_bytes}"
        elif flags & ~ChunkFlags.ZERO:
            problem = "a flag that version 1 does not have" + (" (base)" if flags & ChunkFlags.BASE else "")
        elif flags & ChunkFlags.ZERO:
            if number or lane or offset or stored or stored_crc32c or transform or planes:
                problem = "a zero chunk that is stored somewhere"
        elif planes:
            problem = check_planes(planes, transform, raw, stored)
            if stored > raw:
                problem = f"{stored} stored bytes, more than raw ({raw})"
        elif stored != raw or transform or stored_crc32c != raw_crc32c:
            problem = "a raw chunk with another stored length or checksum, or with a transform"
        if not problem and offset % 4096:
            problem = f"offset {offset} is not a multiple of 4096"
        if problem:
            raise ValueError(f"stream {stream}, chunk {chunk}: {problem}")
        rows = self._streams.get(stream)
        if rows is None:
            rows = self._streams[stream] = bytearray()
        start = chunk * ROW.size
        if (
            start >= INDEX_RAW_MAX
            or HEADER.size + (self.rows + 1) * ROW.size + len(self._planes) > INDEX_RAW_MAX
        ):
            raise UsageError(
                f"an image of more than {self.rows} chunks needs an index over {INDEX_RAW_MAX >> 20} MiB",
                cure=f"save with chunks larger than {self.chunk_bytes} bytes",
            )
        missing = start + ROW.size - len(rows)
        replaced = False
        if missing > 0:
            rows += bytes(missing)
        elif rows[start + _RAW_AT : start + _RAW_AT + 4] != b"\0\0\0\0":
            there = self._versions.get((stream, chunk), 0)
            if version == there:
                raise ValueError(f"stream {stream}, chunk {chunk}: added twice")
            if version < there:
                return
            replaced = True
            self.zero_chunks -= rows[start + _FLAGS_AT] & ChunkFlags.ZERO
        if version:
            self._versions[stream, chunk] = version
        if planes:
            plane_offset = len(self._planes)
            for plane in planes:
                self._planes += plane.pack()
                self._zstd = self._zstd or plane.codec == ZSTD
            plane_bytes = len(self._planes) - plane_offset
        # The last field is zero in the image; here it is the length of the plane records until `encode`.
        ROW.pack_into(
            rows,
            start,
            stream,
            flags,
            transform,
            len(planes),
            chunk,
            number,
            lane,
            0,
            offset,
            stored,
            raw,
            stored_crc32c,
            raw_crc32c,
            plane_offset,
            plane_bytes,
        )
        self.rows += not replaced
        self.zero_chunks += flags & ChunkFlags.ZERO

    def encode(self, chunk_counts: Sequence[int]) -> EncodedIndex:
        """The index of an image whose stream i has ``chunk_counts[i]`` chunks. ValueError unless exactly
        these were added. The builder is used up.

        It is packed with deflate where no chunk is coded with zstd: who reads such an image needs no zstd at all.
        """
        self._check_complete(chunk_counts)
        planes = self._order_planes()
        header = HEADER.pack(
            MAGIC, VERSION, ROW.size, self.rows, len(planes), len(chunk_counts), self.chunk_bytes, 0
        )
        header = header[:-4] + struct.pack("<I", crc32c(header[:-4]))
        pieces: list[bytes | bytearray] = [
            header,
            *(self._streams[stream] for stream in sorted(self._streams)),
            planes,
        ]
        raw_bytes = sum(map(len, pieces))
        if raw_bytes > INDEX_RAW_MAX:
            raise UsageError(
                f"the index would have {raw_bytes} bytes, {INDEX_RAW_MAX} is the most",
                cure=f"save with chunks larger than {self.chunk_bytes} bytes",
            )
        compression: IndexCompression = "zstd" if self._zstd else "deflate"
        stored = _compress(pieces, _zstd_packer(raw_bytes) if self._zstd else _deflate_packer())
        self._streams.clear()
        sha256 = hashlib.sha256(stored).hexdigest()
        return EncodedIndex(stored, raw_bytes, self.rows, sha256, self.zero_chunks, compression)

    def _check_complete(self, chunk_counts: Sequence[int]) -> None:
        for stream, rows in self._streams.items():
            if not 0 <= stream < len(chunk_counts):
                raise ValueError(f"chunks of stream {stream}, where there are {len(chunk_counts)} streams")
            if len(rows) != chunk_counts[stream] * ROW.size:
                raise ValueError(
                    f"stream {stream} has {chunk_counts[stream]} chunks, not {len(rows) // ROW.size}"
                )
        if self.rows != sum(chunk_counts):
            raise ValueError(f"{self.rows} chunks were added, the streams have {sum(chunk_counts)}")

    def _order_planes(self) -> bytearray:
        """Plane records in the order of the rows, and the rows' plane offsets made to fit."""
        ordered = bytearray()
        if not self._planes:
            return ordered
        fields = struct.Struct("<QQ")
        for stream in sorted(self._streams):
            rows = self._streams[stream]
            for tail in range(_PLANES_AT, len(rows), ROW.size):
                start, nbytes = fields.unpack_from(rows, tail)
                if nbytes:
                    fields.pack_into(rows, tail, len(ordered), 0)
                    ordered += self._planes[start : start + nbytes]
        self._planes = bytearray()
        return ordered


class _Packer(Protocol):
    def compress(self, data: memoryview, /) -> bytes: ...
    def flush(self) -> bytes: ...


def _zstd_packer(raw_bytes: int) -> _Packer:
    packer: _Packer = zstandard.ZstdCompressor(
        level=_LEVEL, write_content_size=True, write_checksum=False, write_dict_id=False
    ).compressobj(size=raw_bytes)
    return packer


def _deflate_packer() -> _Packer:
    return zlib.compressobj(_DEFLATE_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)


def _compress(pieces: Sequence[bytes | bytearray], packer: _Packer) -> bytes:
    stored = bytearray()
    for piece in pieces:
        with memoryview(piece) as view:
            for start in range(0, len(piece), _PIECE):
                stored += packer.compress(view[start : start + _PIECE])
    stored += packer.flush()
    return bytes(stored)
