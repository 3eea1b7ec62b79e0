"""What a GPU is asked to make of a chunk, and what came of it. Ids are those of FORMAT.md."""

from __future__ import annotations

from typing import NamedTuple

ANS_U8, ANS_F16, ANS_FP8 = 0, 1, 2

Plane = tuple[int, int, int, int, int, tuple[int, ...]]
"""(codec, level, block_bytes, raw_bytes, stored_bytes, block_lengths), in the order of the index's plane records."""


class EncodePlan(NamedTuple):
    """How chunks are encoded.

    ``level``: of deflate and gdeflate, 0 (entropy only, fast) to 5. ``ans_type``: what ans takes the bytes for, `ANS_U8`,
    `ANS_F16` (any 2-byte floating-point format) or `ANS_FP8`; planes are always bytes. ``transform``: 0 none, 1 planes2,
    2 planes4. ``block_bytes``: raw bytes of a block, a multiple of 16 of at least 4096; 0 for the codec's own.
    """

    codec_id: int
    level: int = 0
    ans_type: int = ANS_U8
    transform: int = 0
    block_bytes: int = 0


class Encoded(NamedTuple):
    """What an encoding left in its lease: nothing (``zero``: the chunk is all zeros), the raw bytes (``planes`` is empty,
    ``stored_bytes`` the raw length), or the stored planes one behind the other."""

    zero: bool
    raw_crc32c: int
    stored_bytes: int
    stored_crc32c: int
    transform: int
    planes: tuple[Plane, ...]
