"""How chunks are stored: codec, transform and block size; and how a transform is written."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from ckptpipe.pipeline.codecs.choice import NONE, CodecChoice
from ckptpipe.pipeline.errors import UsageError

GAIN = 0.05
"""A chunk, and a plane of one, is stored raw unless its codec saves at least this share of it."""

DEFLATE_BLOCK = 64 << 10
"""Raw bytes of a deflate block: what GPUs decode side by side, and the window of the format twice over."""

TRANSFORM_AUTO = -1
"""In an `Encoding`: every chunk gets the transform that suits a sample of it."""

TRANSFORM_IDS = {"auto": TRANSFORM_AUTO, "none": 0, "planes2": 1, "planes4": 2}
_TRANSFORM_WORDS = {number: word for word, number in TRANSFORM_IDS.items()}


@dataclass(frozen=True, slots=True)
class Encoding:
    """``transform``: an id of FORMAT.md ("Transforms"), or `TRANSFORM_AUTO`. ``block_bytes``: raw bytes of a block
    of a plane, 0 for the codec's own.

    Which planes are coded is found chunk by chunk: see `GAIN`.
    """

    codec: CodecChoice = NONE
    transform: int = TRANSFORM_AUTO
    block_bytes: int = 0

    def __str__(self) -> str:
        if self.transform in (TRANSFORM_AUTO, 0):
            return str(self.codec)
        return f"{self.codec} {_TRANSFORM_WORDS[self.transform]}"

    def block_of(self, plane_bytes: int) -> int:
        """Raw bytes of each block but the last, of a plane of ``plane_bytes``."""
        own = DEFLATE_BLOCK if self.codec.name == "deflate" else plane_bytes
        return min(self.block_bytes or own, plane_bytes)


def parse_transform(text: str) -> int:
    """``auto``, ``none``, ``planes2`` or ``planes4`` as an `Encoding` has it. UsageError otherwise."""
    word = text.strip()
    if word not in TRANSFORM_IDS:
        near = difflib.get_close_matches(word.lower(), TRANSFORM_IDS, n=1)
        cure = f"did you mean '{near[0]}'?" if near else f"use one of {', '.join(TRANSFORM_IDS)}"
        raise UsageError(f"no transform is called '{word}'", cure=cure)
    return TRANSFORM_IDS[word]
