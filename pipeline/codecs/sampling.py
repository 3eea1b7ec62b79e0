"""What a sample of a stream says of it: entropy by byte position, zeros, repeats; and the transform that follows.

A sample costs a fraction of a millisecond whatever the stream's size. Entropy coders reach the entropy within a few per
cent, so the entropies predict them well; what a match finder (zstd, deflate above level 0) adds on repetitive data is
only hinted at by ``repeats``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptpipe.pyx.histogram import byte_facts

if TYPE_CHECKING:
    from ckptpipe.pipeline.codecs.choice import CodecChoice

if sys.version_info >= (3, 12):
    from collections.abc import Buffer
else:
    from typing_extensions import Buffer

PIECE_BYTES = 16 << 10
PIECES = 4
"""Pieces of a sample, spread evenly. 64 KiB bound the error of an entropy to a few hundredths of a bit."""

RANDOM_BITS = 7.92
"""Entropy in bits a byte from which on an entropy coder gains nothing (its own header costs as much)."""
FEW_REPEATS = 0.02
TRANSFORM_GAIN = 0.03
"""A transform must make the stored bytes smaller by this share of them: a pass over memory is not free."""
CODER_LOSS = 0.04
"""What Huffman codes of whole bits and their tables cost over the entropy, as a share of it."""


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """Entropies in bits a byte (0 to 8) and shares (0 to 1) of ``sampled`` bytes.

    ``entropy``: of all bytes. ``planes2``: of the bytes at even and at odd positions. ``planes4``: of those at
    positions 0 to 3 modulo 4. ``zeros``: share of zero bytes. ``repeats``: share of positions whose 4 bytes came
    shortly before.
    """

    entropy: float
    planes2: tuple[float, float]
    planes4: tuple[float, float, float, float]
    zeros: float
    repeats: float
    sampled: int

    @property
    def random(self) -> bool:
        """Whether no codec will find anything, whatever the transform."""
        return self.repeats < FEW_REPEATS and min(self.entropy, *self.planes2, *self.planes4) >= RANDOM_BITS

    def planes(self, transform: int) -> tuple[float, ...]:
        """The entropy of each plane that ``transform`` (an id of `TRANSFORMS`) makes."""
        return (self.planes4 if transform == 2 else self.planes2) if transform else (self.entropy,)

    def expected_ratio(self, transform: int) -> float:
        """Raw over stored bytes of an entropy coder, planes that do not shrink being stored raw. At least 1."""
        bits = [min(8.0, entropy * (1 + CODER_LOSS) + 0.01) for entropy in self.planes(transform)]
        stored = [8.0 if each > 8 * 0.95 else each for each in bits]
        return 8 * len(stored) / sum(stored)

    def as_json(self) -> dict[str, object]:
        return {
            "entropy": round(self.entropy, 2),
            "planes2": [round(each, 2) for each in self.planes2],
            "planes4": [round(each, 2) for each in self.planes4],
            "zeros": round(self.zeros, 3),
            "repeats": round(self.repeats, 3),
        }


def sample_facts(data: Buffer) -> SampleFacts:
    """The facts of ``data``, from at most `PIECES` pieces of `PIECE_BYTES`. Lets go of the GIL; 0.1 to 0.3 ms.

    ``data`` begins at a multiple of 4 bytes of its stream. Pieces of a stream that lie in another memory can be put
    one behind the other, where each is a multiple of 4 bytes.
    """
    entropies, zeros, repeats, sampled = byte_facts(data, PIECE_BYTES, PIECES)
    whole, even, odd, *four = entropies
    first, second, third, fourth = four
    return SampleFacts(whole, (even, odd), (first, second, third, fourth), zeros, repeats, sampled)


def pick_transform(facts: SampleFacts, codec: CodecChoice) -> int:
    """The transform (0 none, 1 planes2, 2 planes4) that suits ``codec`` on such bytes.

    The simplest one that is within `TRANSFORM_GAIN` of the best. Splitting hides some repeats from a match finder,
    which counts against it.
    """
    if not codec.compresses or facts.random or not facts.sampled:
        return 0
    if ":f16" in str(codec) or ":fp8" in str(codec):
        return 0  # it splits the elements itself
    best, least = 0, (1 - 0.5 * facts.repeats) / facts.expected_ratio(0)
    for transform in (1, 2):
        stored = (1 - 0.45 * facts.repeats) / facts.expected_ratio(transform)
        if stored < least * (1 - TRANSFORM_GAIN):
            best, least = transform, stored
    return best
