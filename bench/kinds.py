"""Blocks of the kinds of bytes that checkpoints hold, made without numpy and always the same."""

from __future__ import annotations

import random
import statistics
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.image_like import ImageLike

MIB = 1 << 20
BLOCK = 8 * MIB
ROOT = Path(__file__).resolve().parent.parent
_NORMAL = statistics.NormalDist()
_QUANTILES = [_NORMAL.inv_cdf((step + 0.5) / 256) for step in range(256)]
"""A byte of noise becomes a value of a normal distribution by this table: fast, and nothing repeats."""


def bf16() -> bytes:
    """Weights, N(0, 0.02)."""
    return next(ImageLike().weights(1))


def fp8() -> bytes:
    """Weights as e4m3, N(0, 1): sign, four bits of exponent, three of mantissa, the last two of them noise."""

    def code(value: float) -> int:
        word = struct.unpack("<I", struct.pack("<f", value))[0]
        return int(word >> 24 & 0x80 | min(15, max(0, (word >> 23 & 0xFF) - 120)) << 3 | word >> 20 & 4)

    return _either(_noise(1).translate(bytes(map(code, _QUANTILES))), _noise(2).translate(_bits(0x03)))


def optimizer() -> bytes:
    """Second moments of Adam in float32: squares of gradients, with mantissas of noise."""

    def exponent(value: float) -> int:
        return int(struct.unpack("<I", struct.pack("<f", (1e-4 * value) ** 2))[0] >> 23)

    count = BLOCK // 4
    exponents = _noise(3)[:count].translate(bytes(map(exponent, _QUANTILES)))
    made = bytearray(random.Random(4).randbytes(BLOCK))
    low = exponents.translate(bytes((code & 1) << 7 for code in range(256)))
    made[2::4] = _either(bytes(made[2::4]).translate(_bits(0x7F)), low)
    made[3::4] = exponents.translate(bytes(code >> 1 for code in range(256)))
    return bytes(made)


def int4() -> bytes:
    """Weights quantized to 16 levels, two in a byte."""
    levels = [min(15, max(0, 8 + round(2.5 * value))) for value in _QUANTILES]
    high = _noise(5).translate(bytes(level << 4 for level in levels))
    return _either(high, _noise(6).translate(bytes(levels)))


def noise() -> bytes:
    return _noise(7)


def sparse() -> bytes:
    """Pages of bf16 between runs of zeros, three to one: a KV cache that is not full."""
    weights, part = bf16(), 32 << 10
    return b"".join(
        weights[start : start + part] + bytes(3 * part) for start in range(0, len(weights) // 4, part)
    )


def text() -> bytes:
    """Programs: this project's own."""
    files = sorted([*(ROOT / "pipeline").rglob("*.py"), *(ROOT / "tests").rglob("*.py")])
    found = b"".join(path.read_bytes() for path in files)
    return (found * (BLOCK // max(len(found), 1) + 1))[:BLOCK]


def _noise(seed: int) -> bytes:
    return random.Random(seed).randbytes(BLOCK)


def _bits(mask: int) -> bytes:
    """For `bytes.translate`: keeps the bits of ``mask``."""
    return bytes(value & mask for value in range(256))


def _either(one: bytes, other: bytes) -> bytes:
    """Bit by bit."""
    return (int.from_bytes(one, "little") | int.from_bytes(other, "little")).to_bytes(len(one), "little")


KINDS: Mapping[str, Callable[[], bytes]] = {
    "bf16": bf16,
    "fp8": fp8,
    "float32 optimizer": optimizer,
    "int4": int4,
    "zeros and bf16": sparse,
    "text": text,
    "random": noise,
}
