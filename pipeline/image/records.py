"""Rows of the chunk table and their plane records, byte for byte as FORMAT.md has them ("Index")."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

MAGIC = b"CKPTIDX1"
VERSION = 1

# magic, version, row bytes, rows, plane-area bytes, streams, chunk bytes, 20 reserved bytes, CRC32C of the 60 before
HEADER = struct.Struct("<8sIIQQII20xI")
# stream, flags, transform, planes, chunk, object, lane, reserved, offset, stored, raw, stored CRC, raw CRC,
# plane offset, reserved
ROW = struct.Struct("<IHBBQIHHQIIIIQQ")
# codec, level, reserved, block bytes, raw, stored, blocks; the block lengths (u32) follow
PLANE = struct.Struct("<BbHIIII")


class ChunkFlags:
    """Bits of a row's flags: plain integers, because rows are made by the million."""

    NONE: Final = 0
    ZERO: Final = 1  # the chunk is all zeros and nothing is stored
    BASE: Final = 2  # the chunk is in a base image (reserved: not in version 1)


TRANSFORMS = {0: 1, 1: 2, 2: 4}  # id: number of planes

BLOCK_MIN = 4096  # bytes; a smaller block size is only allowed where one block is the whole plane
# By codec: the largest block size, in raw bytes (FORMAT.md, "Codecs"). A whole plane, what decompression engines take,
# and what nvCOMP's codecs take.
BLOCK_MAX = {1: 64 << 20, 2: 4 << 20, 3: 1 << 20, 4: 64 << 10, 5: 4 << 20, 6: 4 << 20, 7: 4 << 20}
PLANES_MAX = 4


class PlaneRecord(NamedTuple):
    """How one plane of a chunk is stored. ``block_lengths``: the stored length of each block, none for codec 0."""

    codec: int
    level: int
    block_bytes: int
    raw_bytes: int
    stored_bytes: int
    block_lengths: tuple[int, ...] = ()

    def pack(self) -> bytes:
        count = len(self.block_lengths)
        return PLANE.pack(
            self.codec, self.level, 0, self.block_bytes, self.raw_bytes, self.stored_bytes, count
        ) + struct.pack(f"<{count}I", *self.block_lengths)


class ChunkRecord(NamedTuple):
    """One row: where a chunk is stored and what it must hash to. Immutable.

    ``stream`` and ``object`` are positions in the manifest; ``number`` is the chunk's in its stream.
    ``planes`` empty: one raw plane (stored_bytes == raw_bytes) or a zero chunk (stored_bytes == 0).
    """

    stream: int
    number: int
    raw_bytes: int
    raw_crc32c: int
    object: int = 0
    lane: int = 0
    offset: int = 0
    stored_bytes: int = 0
    stored_crc32c: int = 0
    flags: int = 0
    transform: int = 0
    planes: tuple[PlaneRecord, ...] = ()

    @property
    def zero(self) -> bool:
        return bool(self.flags & ChunkFlags.ZERO)

    @property
    def is_raw(self) -> bool:
        return not self.planes and not self.flags & ChunkFlags.ZERO


def zero_record(stream: int, number: int, raw_bytes: int, raw_crc32c: int) -> ChunkRecord:
    """The record of a chunk of zeros. ``raw_crc32c`` is that of ``raw_bytes`` zero bytes."""
    return ChunkRecord(stream, number, raw_bytes, raw_crc32c, flags=ChunkFlags.ZERO)


def whole_plane(codec: int, level: int, raw_bytes: int, stored_bytes: int) -> tuple[PlaneRecord, ...]:
    """The planes of a chunk that one codec call stored as one block (how zstd is used)."""
    return (PlaneRecord(codec, level, raw_bytes, raw_bytes, stored_bytes, (stored_bytes,)),)


def planes_bound(raw: int) -> int:
    """Bytes of plane records that a chunk of ``raw`` bytes can have at most."""
    return PLANES_MAX * (PLANE.size + 4) + 4 * (raw // BLOCK_MIN)


def check_planes(planes: Sequence[PlaneRecord], transform: int, raw: int, stored: int) -> str:
    """What is wrong with a chunk's planes in terms of lengths, "" when nothing is."""
    wanted = TRANSFORMS.get(transform)
    if wanted is not None and len(planes) != wanted:
        return f"{len(planes)} planes where its transform makes {wanted}"
    if sum(plane.raw_bytes for plane in planes) != raw:
        return f"its planes hold {sum(plane.raw_bytes for plane in planes)} raw bytes, the chunk {raw}"
    if sum(plane.stored_bytes for plane in planes) != stored:
        return (
            f"its planes hold {sum(plane.stored_bytes for plane in planes)} stored bytes, the chunk {stored}"
        )
    for number, plane in enumerate(planes):
        wrong = _check_plane(plane)
        if not wrong and wanted and plane.raw_bytes != (raw - number + wanted - 1) // wanted:
            wrong = f"holds {plane.raw_bytes} raw bytes, not every {wanted}th of {raw}"
        if wrong:
            return f"plane {number} {wrong}"
    return ""


def _check_plane(plane: PlaneRecord) -> str:
    if plane.codec == 0:
        if plane.block_lengths or plane.block_bytes or plane.level or plane.stored_bytes != plane.raw_bytes:
            return "is raw but has blocks, a level or another length"
        return ""
    if not plane.raw_bytes:
        return "is coded but empty"
    if plane.block_bytes > plane.raw_bytes or plane.block_bytes < min(BLOCK_MIN, plane.raw_bytes):
        return f"has blocks of {plane.block_bytes} bytes in {plane.raw_bytes}"
    if plane.block_bytes > BLOCK_MAX.get(plane.codec, plane.block_bytes):
        return f"has blocks of {plane.block_bytes} bytes, {BLOCK_MAX[plane.codec]} is the most"
    if len(plane.block_lengths) != -(-plane.raw_bytes // plane.block_bytes):
        return f"has {len(plane.block_lengths)} blocks of {plane.block_bytes} bytes for {plane.raw_bytes}"
    if 0 in plane.block_lengths:
        return "has an empty block"
    if sum(plane.block_lengths) != plane.stored_bytes:
        return f"has blocks of {sum(plane.block_lengths)} bytes together, not {plane.stored_bytes}"
    if plane.stored_bytes > plane.raw_bytes:
        return f"has {plane.stored_bytes} stored bytes for {plane.raw_bytes} raw ones"
    return ""
