"""Bytes like those of tensors, made without any library of arrays: patterns long enough that no codec sees them repeat."""

from __future__ import annotations

import array
import random
from collections.abc import Callable

SIGMA = 0.02  # of a weight matrix


def _gaussian(count: int, seed: int = 1) -> array.array[float]:
    chance = random.Random(seed)
    return array.array("f", (chance.gauss(0.0, SIGMA) for _ in range(count)))


def bf16(nbytes: int) -> bytes:
    """Gaussian weights as bfloat16, little-endian: the upper halves of float32."""
    whole = _gaussian(-(-nbytes // 2)).tobytes()
    made = bytearray(len(whole) // 2)
    made[0::2], made[1::2] = whole[2::4], whole[3::4]
    return bytes(made[:nbytes])


def fp32(nbytes: int) -> bytes:
    """Gaussian weights as float32."""
    return _gaussian(-(-nbytes // 4)).tobytes()[:nbytes]


def fp8(nbytes: int) -> bytes:
    """Gaussian activations as E4M3: sign, four bits of exponent (bias 7), three of mantissa, truncated."""
    words = memoryview(_gaussian(nbytes, 2)).cast("B").cast("I")
    made = bytearray(nbytes)
    for i, word in enumerate(words):
        exponent = (word >> 23 & 0xFF) - 127 + 7 + 5  # scaled by 32, so that few underflow
        low = word >> 20 & 7
        small = exponent << 3 | low if exponent > 0 else 0
        made[i] = word >> 24 & 0x80 | min(small, 0x7E)
    return bytes(made)


def noise(nbytes: int) -> bytes:
    return random.Random(3).randbytes(nbytes)


KINDS: dict[str, Callable[[int], bytes]] = {
    "bf16": bf16,
    "fp8": fp8,
    "fp32": fp32,
    "random": noise,
    "zeros": bytes,
}
