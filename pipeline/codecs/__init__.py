"""Chunk codecs: what they are called, which this version has, and how one is made."""

from __future__ import annotations

from collections.abc import Callable

from ckptpipe.pipeline.codecs.abc import Codec
from ckptpipe.pipeline.codecs.choice import (
    CODEC_IDS,
    CODEC_NAMES,
    NONE,
    CodecChoice,
    choice_of,
    parse_compress,
)
from ckptpipe.pipeline.codecs.deflate import DeflateCodec
from ckptpipe.pipeline.codecs.encoding import Encoding, parse_transform
from ckptpipe.pipeline.codecs.none import NoneCodec
from ckptpipe.pipeline.codecs.zstd import ZstdCodec

__all__ = [
    "CODEC_IDS",
    "CODEC_NAMES",
    "DECODABLE",
    "NONE",
    "Codec",
    "CodecChoice",
    "Encoding",
    "choice_of",
    "codec_for_id",
    "codec_name",
    "make_codec",
    "parse_compress",
    "parse_transform",
]

_CODECS: dict[int, Callable[..., Codec]] = {
    NoneCodec.id: NoneCodec,
    ZstdCodec.id: ZstdCodec,
    DeflateCodec.id: DeflateCodec,
}
DECODABLE = frozenset(_CODECS)  # ids that the CPU can decode; the others need a GPU with nvCOMP


def make_codec(choice: CodecChoice) -> Codec:
    """The CPU's codec of a choice. ValueError for one that only a GPU has, and for ``auto``."""
    make = _CODECS.get(CODEC_IDS.get(choice.name, -1))
    if make is None:
        raise ValueError(f"the CPU has no codec called '{choice.name}'")
    return make() if choice.level is None else make(choice.level)


def codec_for_id(number: int) -> Codec:
    """The decoder of an id in a plane record. KeyError for one that is not in `DECODABLE`."""
    return _CODECS[number]()


def codec_name(number: int) -> str:
    """What the codec of an id is called; ``codec 42`` for one that is not known."""
    return CODEC_NAMES.get(number, f"codec {number}")
