"""What the targets' buffers hold, so that a test can say it without asking: standard library alone."""

from __future__ import annotations

import array
import functools
import random

_PIECE = 1 << 20
_MASK = (1 << 64) - 1
COMPRESSIBLE = 1 << 63
"""Seeds from here on make buffers of targets/plain.c that compress."""


def contents(seed: int, buffer: int, step: int, nbytes: int) -> bytes:
    """Buffer ``buffer`` as the Python targets last wrote it, at ``step`` (0: at the start)."""
    source = random.Random(f"{seed}/{buffer}/{step}")
    return b"".join(source.randbytes(min(_PIECE, nbytes - at)) for at in range(0, nbytes, _PIECE))


def plain_contents(seed: int, buffer: int, step: int, nbytes: int) -> bytes:
    """The same for targets/plain.c: word i is (i + 1) * 0x9e3779b97f4a7c15 ^ mix, of a seed from
    `COMPRESSIBLE` on less every other byte."""
    mix = (seed + 1000003 * buffer + 7919 * step) & _MASK
    count = nbytes // 8
    mixes = int.from_bytes(mix.to_bytes(8, "little") * count, "little")
    words = _multiples(count) ^ mixes
    if seed >= COMPRESSIBLE:
        words &= int.from_bytes(b"\0\xff" * (4 * count), "little")
    return words.to_bytes(8 * count, "little")


@functools.lru_cache(maxsize=8)
def _multiples(count: int) -> int:
    """The words without their mix, as one number."""
    words = array.array("Q", [(i + 1) * 0x9E3779B97F4A7C15 & _MASK for i in range(count)])
    return int.from_bytes(words.tobytes(), "little")
