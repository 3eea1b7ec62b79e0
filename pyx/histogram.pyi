"""Entropy of bytes by position, and how often words repeat (types of histogram.pyx)."""

import sys

if sys.version_info >= (3, 12):
    from collections.abc import Buffer
else:
    from typing_extensions import Buffer

def byte_facts(
    data: Buffer, piece: int = 65536, pieces: int = 4
) -> tuple[tuple[float, float, float, float, float, float, float], float, float, int]:
    """``(entropies, zeros, repeats, sampled)``. ``entropies`` in bits a byte: of all bytes, of those at even and odd
    positions, of those at positions 0, 1, 2 and 3 modulo 4; ``zeros`` and ``repeats`` are shares, ``sampled`` bytes."""
