"""Chunk codecs: what they are called, which this version has, and how one is made."""

from __future__ import annotations

from ckptpipe.pipeline.codecs.abc import Codec
from ckptpipe.pipeline.codecs.choice import CODEC_IDS, CODEC_NAMES, NONE, CodecChoice, parse_compress
from ckptpipe.pipeline.codecs.none import NoneCodec
from ckptpipe.pipeline.codecs.zstd import ZstdCodec

__all__ = [
    "CODEC_IDS",
    "CODEC_NAMES",
    "DECODABLE",
    "NONE",
    "Codec",
    "CodecChoice",
    "codec_for_id",
    "codec_name",
    "make_codec",
    "parse_compress",
]

_DECODERS: dict[int, type[NoneCodec] | type[ZstdCodec]] = {NoneCodec.id: NoneCodec, ZstdCodec.id: ZstdCodec}
DECODABLE = frozenset(_DECODERS)  # ids that this version can decode


def make_codec(choice: CodecChoice) -> Codec:
    """The codec of a choice that `parse_compress` made."""
    if choice.name == NoneCodec.name:
        return NoneCodec()
    if choice.name == ZstdCodec.name:
        return ZstdCodec() if choice.level is None else ZstdCodec(choice.level)
    raise ValueError(f"no codec is called '{choice.name}'")


def codec_for_id(number: int) -> Codec:
    """The decoder of an id in a plane record. KeyError for one that is not in `DECODABLE`."""
    return _DECODERS[number]()


def codec_name(number: int) -> str:
    """What the codec of an id is called; ``codec 42`` for one that is not known."""
    return CODEC_NAMES.get(number, f"codec {number}")
