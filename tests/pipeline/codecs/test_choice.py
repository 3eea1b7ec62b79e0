"""How a codec is chosen: what may be written on a command line."""

from __future__ import annotations

import pytest

from ckptpipe.pipeline.codecs import (
    CODEC_IDS,
    CODEC_NAMES,
    DECODABLE,
    CodecChoice,
    codec_for_id,
    codec_name,
    make_codec,
    parse_compress,
)
from ckptpipe.pipeline.errors import UsageError


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("none", CodecChoice("none", None)),
        ("zstd", CodecChoice("zstd", 3)),
        ("zstd:1", CodecChoice("zstd", 1)),
        ("zstd:22", CodecChoice("zstd", 22)),
        ("zstd:-100", CodecChoice("zstd", -100)),
        (" zstd:+7 ", CodecChoice("zstd", 7)),
    ],
)
def test_what_is_understood(text: str, choice: CodecChoice) -> None:
    assert parse_compress(text) == choice
    assert parse_compress(str(choice)) == choice
    assert make_codec(choice).name == choice.name == CODEC_NAMES[choice.id]
    assert choice.compresses == (choice.name != "none")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "use none, zstd or zstd:LEVEL"),
        ("zst", "did you mean 'zstd'"),
        ("ZSTD:3", "did you mean 'zstd'"),
        ("nona", "did you mean 'none'"),
        ("gzip", "no codec is called 'gzip'"),
        ("none:1", "no levels"),
        ("zstd:", "no level of zstd"),
        ("zstd:fast", "no level of zstd"),
        ("zstd:1.5", "no level of zstd"),
        ("zstd:0", "no level 0; use 1 (fast) to 22 (small)"),
        ("zstd:23", "no level 23"),
        ("zstd:-101", "no level -101"),
        ("zstd:99999999999999999999", "no level of zstd"),
        ("zstd:\u0663", "no level of zstd"),
        ("zstd:3:4", "no level of zstd"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_compress(text)
    assert words in str(caught.value)
    assert caught.value.exit_code == 2


def test_ids_are_those_of_the_format() -> None:
    """FORMAT.md, section 4: never renumbered."""
    assert CODEC_IDS == {
        "none": 0, "zstd": 1, "deflate": 2, "ans": 3, "gdeflate": 4, "lz4": 5, "snappy": 6, "bitcomp": 7,
    }  # fmt: skip
    assert {0, 1} == DECODABLE
    for number in DECODABLE:
        assert codec_for_id(number).id == number
    with pytest.raises(KeyError):
        codec_for_id(2)
    assert codec_name(1) == "zstd" and codec_name(99) == "codec 99"
