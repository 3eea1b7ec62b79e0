"""How a codec is chosen: what may be written on a command line."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.codecs import (
    CODEC_IDS,
    CODEC_NAMES,
    DECODABLE,
    CodecChoice,
    Encoding,
    choice_of,
    codec_for_id,
    codec_name,
    make_codec,
    parse_compress,
    parse_transform,
)
from ckptpipe.pipeline.codecs.encoding import TRANSFORM_AUTO
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.settings import TransformName


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("none", CodecChoice("none", None)),
        ("zstd", CodecChoice("zstd", 3)),
        ("zstd:1", CodecChoice("zstd", 1)),
        ("zstd:22", CodecChoice("zstd", 22)),
        ("zstd:-100", CodecChoice("zstd", -100)),
        (" zstd:+7 ", CodecChoice("zstd", 7)),
        ("deflate", CodecChoice("deflate", 1)),
        ("deflate:0", CodecChoice("deflate", 0)),
        ("deflate:5", CodecChoice("deflate", 5)),
    ],
)
def test_what_is_understood(text: str, choice: CodecChoice) -> None:
    assert parse_compress(text) == choice == choice_of(choice.name, choice.level)
    assert parse_compress(str(choice)) == choice
    assert make_codec(choice).name == choice.name == CODEC_NAMES[choice.id]
    assert choice.compresses == (choice.name != "none")
    assert not choice.needs_gpu and not choice.auto and not choice.type


@pytest.mark.parametrize(
    ("text", "level", "kind", "number"),
    [("ans", 0, "u8", 3), ("ans:u8", 0, "u8", 3), ("ans:f16", 1, "f16", 3), ("ans:fp8", 2, "fp8", 3), ("gdeflate:2", 2, "", 4)],
)  # fmt: skip
def test_codecs_of_a_gpu(text: str, level: int, kind: str, number: int) -> None:
    choice = parse_compress(text)
    assert (choice.level, choice.type, choice.id) == (level, kind, number)
    assert choice.needs_gpu and choice.compresses and not choice.auto
    assert parse_compress(str(choice)) == choice == choice_of(choice.name, choice.level)
    with pytest.raises(ValueError, match="the CPU has no codec"):
        make_codec(choice)


def test_auto_is_a_word_and_no_codec() -> None:
    choice = parse_compress("auto")
    assert choice.auto and choice.compresses and not choice.needs_gpu and str(choice) == "auto"
    with pytest.raises(ValueError, match="the CPU has no codec"):
        make_codec(choice)


@pytest.mark.parametrize(
    ("text", "number"), [("auto", TRANSFORM_AUTO), ("none", 0), ("planes2", 1), (" planes4 ", 2)]
)
def test_transforms(text: str, number: int) -> None:
    assert parse_transform(text) == number


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "use one of auto, none, planes2, planes4"), ("planes", "did you mean 'planes"), ("Planes2", "did you mean 'planes2'"), ("xor", "no transform is called 'xor'")],
)  # fmt: skip
def test_transforms_that_are_none(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_transform(text)
    assert words in str(caught.value)


def test_an_encoding_says_what_it_is_and_how_long_its_blocks_are() -> None:
    deflate, zstd = parse_compress("deflate:0"), parse_compress("zstd")
    assert str(Encoding(deflate, 1)) == "deflate:0 planes2" and str(Encoding(zstd)) == "zstd:3"
    assert Encoding(deflate).block_of(8 << 20) == 65536 and Encoding(deflate).block_of(100) == 100
    assert Encoding(zstd).block_of(8 << 20) == 8 << 20
    assert Encoding(zstd, 0, 1 << 20).block_of(8 << 20) == 1 << 20


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "use none, auto, zstd[:LEVEL]"),
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
        ("deflate:6", "use 0 (fast, entropy only) to 5 (small); the default is 1"),
        ("deflate:-1", "no level -1"),
        ("deflate:x", "use a whole number from 0 to 5"),
        ("ans:0", "use one of u8, f16, fp8"),
        ("ans:bf16", "ans knows no type 'bf16'"),
        ("auto:1", "no levels"),
        ("lz4", "lz4 is not written"),
        ("bitcomp", "use one of none, auto"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_compress(text)
    assert words in str(caught.value)
    assert caught.value.exit_code == 2


def test_levels_of_a_specification_are_checked_too() -> None:
    for name, level in (("ans", 3), ("ans", -1), ("deflate", 9), ("zstd", 0), ("none", 1)):
        with pytest.raises(UsageError):
            choice_of(name, level)


def test_ids_are_those_of_the_format() -> None:
    """FORMAT.md, section 4: never renumbered."""
    assert CODEC_IDS == {
        "none": 0, "zstd": 1, "deflate": 2, "ans": 3, "gdeflate": 4, "lz4": 5, "snappy": 6, "bitcomp": 7,
    }  # fmt: skip
    assert {0, 1, 2} == DECODABLE
    for number in DECODABLE:
        assert codec_for_id(number).id == number
    with pytest.raises(KeyError):
        codec_for_id(3)
    assert codec_name(1) == "zstd" and codec_name(99) == "codec 99"


@pytest.mark.parametrize("transform", ["planes2", "planes4"])
def test_a_transform_alone_is_refused(tmp_path: Path, transform: TransformName) -> None:
    with pytest.raises(UsageError, match=f"{transform} is of no use without a codec.*name a codec"):
        ckptpipe.save_blocking({"a": b"data"}, to=str(tmp_path), name="a", transform=transform)
    ckptpipe.save_blocking({"a": b"data"}, to=str(tmp_path), name="a", transform="auto")
    with pytest.raises(UsageError, match="without a codec"):
        ckptpipe.copy_blocking(str(tmp_path / "a"), to=str(tmp_path), name="b", transform=transform)
    assert not (tmp_path / "b").exists()
