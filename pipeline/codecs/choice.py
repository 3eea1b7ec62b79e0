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
DEFLATE_DEFAULT_LEVEL = 1

ANS_TYPES = ("u8", "f16", "fp8")
"""What nvCOMP's ANS takes a chunk for; a choice has the position as its level."""

# Lowest, highest and default level. deflate and gdeflate: nvCOMP's levels; `deflate.py` says what a CPU makes of them.
_LEVELS: dict[str, tuple[int, int, int]] = {
    "zstd": (ZSTD_MIN_LEVEL, ZSTD_MAX_LEVEL, ZSTD_DEFAULT_LEVEL),
    "deflate": (0, 5, DEFLATE_DEFAULT_LEVEL),
    "gdeflate": (0, 5, DEFLATE_DEFAULT_LEVEL),
    "ans": (0, len(ANS_TYPES) - 1, 0),
}
_PLAIN = ("none", "auto")  # without levels
WORDS = ("none", "auto", "zstd", "deflate", "ans", "gdeflate")  # what may be asked for

CPU_CODECS = frozenset({"none", "zstd", "deflate"})
"""Codecs that are written and read without a GPU."""

_INTEGER = re.compile(r"[+-]?[0-9]{1,9}", re.ASCII)


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """A codec's name and level. ``level`` is None for one that has none; of ans, a position in `ANS_TYPES`.

    ``auto`` stands for a choice that is made from samples and rates; it is the name of no codec.
    """

    name: str = "none"
    level: int | None = None

    def __str__(self) -> str:
        if self.level is None:
            return self.name
        return f"{self.name}:{self.type or self.level}"

    @property
    def id(self) -> int:
        """The codec's number in plane records."""
        return CODEC_IDS[self.name]

    @property
    def compresses(self) -> bool:
        return self.name != "none"

    @property
    def type(self) -> str:
        """What ans takes a chunk for, "" for other codecs."""
        return ANS_TYPES[self.level or 0] if self.name == "ans" else ""

    @property
    def auto(self) -> bool:
        return self.name == "auto"

    @property
    def needs_gpu(self) -> bool:
        return not self.auto and self.name not in CPU_CODECS


NONE = CodecChoice()


def parse_compress(text: str) -> CodecChoice:
    """``none``, ``auto``, ``zstd[:LEVEL]`` (-100 to 22, not 0; 3 by default), ``deflate[:LEVEL]`` and
    ``gdeflate[:LEVEL]`` (0 to 5; 1 by default), ``ans[:TYPE]`` (u8, f16, fp8; u8 by default). UsageError otherwise."""
    name, colon, level_text = text.strip().partition(":")
    if name in _PLAIN:
        if colon:
            raise UsageError(f"codec '{name}' has no levels", cure=f"write '{name}'")
        return CodecChoice(name)
    if name not in _LEVELS:
        raise _unknown(name)
    low, high, default = _LEVELS[name]
    if not colon:
        return CodecChoice(name, default)
    if name == "ans":
        if level_text not in ANS_TYPES:
            raise UsageError(
                f"ans knows no type '{level_text}'", cure=f"use one of {', '.join(ANS_TYPES)}, as in ans:f16"
            )
        return CodecChoice(name, ANS_TYPES.index(level_text))
    zero = ", not 0" if name == "zstd" else ""
    if not _INTEGER.fullmatch(level_text):
        raise UsageError(
            f"'{level_text}' is no level of {name}", cure=f"use a whole number from {low} to {high}{zero}"
        )
    level = int(level_text)
    if not low <= level <= high or (zero and level == 0):
        fast = (
            f"use 1 (fast) to {high} (small), or -1 to {low} (faster still)"
            if zero
            else f"use {low} (fast, entropy only) to {high} (small)"
        )
        raise UsageError(f"{name} has no level {level}", cure=f"{fast}; the default is {default}")
    return CodecChoice(name, level)


def choice_of(name: str, level: int | None = None) -> CodecChoice:
    """The choice with these two fields, checked as `parse_compress` checks a text."""
    if level is None:
        return parse_compress(name)
    if name == "ans":
        if not 0 <= level < len(ANS_TYPES):
            raise UsageError(f"ans has no type {level}", cure=f"use one of {', '.join(ANS_TYPES)}")
        return CodecChoice(name, level)
    return parse_compress(f"{name}:{level}")


def _unknown(name: str) -> UsageError:
    if name in CODEC_IDS:
        return UsageError(
            f"{name} is not written: it gains nothing on weights and activations",
            cure=f"use one of {', '.join(WORDS)}",
        )
    near = difflib.get_close_matches(name.lower(), WORDS, n=1)
    cure = (
        f"did you mean '{near[0]}'?"
        if near
        else "use none, auto, zstd[:LEVEL], deflate[:LEVEL], ans[:TYPE] or gdeflate[:LEVEL]"
    )
    return UsageError(f"no codec is called '{name}'", cure=cure)
