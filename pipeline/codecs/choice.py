"""Which codec, and how hard: `zstd:3` as it is written on a command line, in YAML and in a manifest."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from ckptpipe.pipeline.errors import UsageError

# Part of the image format (FORMAT.md, "Codecs"): a number is never used again for anything else.
CODEC_IDS = {
    "none": 0,
    "zstd": 1,
    "deflate": 2,
    "ans": 3,
    "gdeflate": 4,
    "lz4": 5,
    "snappy": 6,
    "bitcomp": 7,
}
CODEC_NAMES = {number: name for name, number in CODEC_IDS.items()}

ZSTD_DEFAULT_LEVEL = 3
ZSTD_MIN_LEVEL = -100  # a plane record keeps the level in a signed byte
ZSTD_MAX_LEVEL = 22

_LEVELS = {"none": None, "zstd": (ZSTD_MIN_LEVEL, ZSTD_MAX_LEVEL, ZSTD_DEFAULT_LEVEL)}
_INTEGER = re.compile(r"[+-]?[0-9]{1,9}", re.ASCII)


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """A codec's name and level. ``level`` is None for a codec that has none."""

    name: str = "none"
    level: int | None = None

    def __str__(self) -> str:
        return self.name if self.level is None else f"{self.name}:{self.level}"

    @property
    def id(self) -> int:
        """The codec's number in plane records."""
        return CODEC_IDS[self.name]

    @property
    def compresses(self) -> bool:
        return self.name != "none"


NONE = CodecChoice()


def parse_compress(text: str) -> CodecChoice:
    """``none``, ``zstd`` or ``zstd:LEVEL`` (LEVEL -100 to 22, not 0; 3 by default). UsageError otherwise."""
    name, colon, level_text = text.strip().partition(":")
    if name not in _LEVELS:
        near = difflib.get_close_matches(name.lower(), _LEVELS, n=1)
        cure = f"did you mean '{near[0]}'?" if near else "use none, zstd or zstd:LEVEL"
        raise UsageError(f"no codec is called '{name}'", cure=cure)
    levels = _LEVELS[name]
    if levels is None:
        if colon:
            raise UsageError(f"codec '{name}' has no levels", cure=f"write '{name}'")
        return CodecChoice(name)
    low, high, default = levels
    if not colon:
        return CodecChoice(name, default)
    if not _INTEGER.fullmatch(level_text):
        raise UsageError(
            f"'{level_text}' is no level of {name}", cure=f"use a whole number from {low} to {high}, not 0"
        )
    level = int(level_text)
    if not low <= level <= high or level == 0:
        raise UsageError(
            f"{name} has no level {level}",
            cure=f"use 1 (fast) to {high} (small), or -1 to {low} (faster still); the default is {default}",
        )
    return CodecChoice(name, level)
