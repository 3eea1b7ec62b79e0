"""Deflate as a codec: every level, every library that decodes, whatever block size."""

from __future__ import annotations

import random
import zlib

import pytest

from ckptpipe.pipeline.codecs import deflate, make_codec, parse_compress
from ckptpipe.pipeline.codecs.deflate import DeflateCodec, libraries

chance = random.Random(3)
EXPONENTS = bytes(chance.choices(range(112, 124), weights=[2**n for n in range(12)], k=200_001))
TEXT = b"".join(b"line %d of a log\n" % number for number in range(9000))
LIBRARIES = ("isal", "isal-python", "zlib")


def test_every_library_is_here() -> None:
    assert libraries() == LIBRARIES


def test_the_fastest_is_the_default_and_a_clone_keeps_what_it_was_given() -> None:
    codec = make_codec(parse_compress("deflate:4"))
    assert isinstance(codec, DeflateCodec) and (codec.level, codec.library) == (4, "isal")
    twin = DeflateCodec(2, library="zlib").clone()
    assert (twin.level, twin.library) == (2, "zlib")


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("level", range(6))
@pytest.mark.parametrize("block", [4096, 65536, 1 << 20])
def test_what_it_writes_any_inflate_reads(library: str, level: int, block: int) -> None:
    for raw in (EXPONENTS, TEXT):
        codec = DeflateCodec(level, library=library)
        room = bytearray(len(raw))
        lengths = codec.compress_blocks(memoryview(raw), memoryview(room), block)
        assert len(lengths) == -(-len(raw) // block)
        at = 0
        for number, length in enumerate(lengths):
            decoder = zlib.decompressobj(-15)
            assert decoder.decompress(bytes(room[at : at + length])) == raw[number * block :][:block]
            assert decoder.eof and not decoder.unused_data
            at += length
        back = bytearray(len(raw))
        codec.decompress_blocks(memoryview(room)[:at], lengths, memoryview(back), block)
        assert back == raw


def test_from_level_1_on_the_shorter_of_matches_and_entropy_is_taken() -> None:
    def size(raw: bytes, level: int) -> int:
        room = bytearray(len(raw) + 1000)
        return sum(DeflateCodec(level).compress_blocks(memoryview(raw), memoryview(room), 65536))

    entropy = size(EXPONENTS, 0)
    assert all(size(EXPONENTS, level) <= entropy for level in range(1, 6))
    assert size(TEXT, 1) < size(TEXT, 0) / 3


@pytest.mark.parametrize("level", range(6))
def test_what_does_not_fit_gives_nothing(level: int) -> None:
    noise = chance.randbytes(100_000)
    room = memoryview(bytearray(100_000))
    assert DeflateCodec(level).compress_blocks(memoryview(noise), room, 65536) == ()
    assert DeflateCodec(level).compress_into(memoryview(noise), room) == 0
    assert DeflateCodec(level).compress_blocks(memoryview(TEXT), room[:100], 65536) == ()
    assert DeflateCodec(level).compress_into(memoryview(TEXT), room[:0]) == 0


@pytest.mark.parametrize("library", LIBRARIES)
def test_damage_is_named(library: str) -> None:
    codec = DeflateCodec(1, library=library)
    room = bytearray(len(TEXT))
    lengths = list(codec.compress_blocks(memoryview(TEXT), memoryview(room), 65536))
    stored = bytes(room[: sum(lengths)])
    back = memoryview(bytearray(len(TEXT)))
    second = lengths[0]

    def refused(stored: bytes, lengths: list[int]) -> str:
        with pytest.raises(ValueError, match="block") as caught:
            codec.decompress_blocks(memoryview(stored), lengths, back, 65536)
        return str(caught.value)

    damaged = stored[:second] + b"\x07" + stored[second + 1 :]
    assert refused(damaged, lengths) == "deflate block 1 of 3 is damaged"
    moved = [lengths[0], lengths[1] - 1, lengths[2] + 1]
    assert refused(stored, moved) == "deflate block 1 of 3 ends before its stream does"
    moved = [lengths[0], lengths[1] + 1, lengths[2] - 1]
    assert refused(stored, moved) == "deflate block 1 of 3 has 1 bytes after its stream"
    with pytest.raises(ValueError, match="block 2 of 3 gives more than"):
        codec.decompress_blocks(memoryview(stored), lengths, back[:-1], 65536)
    short = DeflateCodec(0).compress_into(memoryview(b"abc"), memoryview(room))
    with pytest.raises(ValueError, match="block 0 of 1 gives 3 bytes where 4 belong"):
        codec.decompress_into(memoryview(room)[:short], back[:4])


def test_without_isal_zlib_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "isal", None)
    libraries.cache_clear()
    try:
        assert libraries() == ("zlib",)
        codec = DeflateCodec(2)
        room = bytearray(len(TEXT))
        lengths = codec.compress_blocks(memoryview(TEXT), memoryview(room), 65536)
        back = bytearray(len(TEXT))
        codec.decompress_blocks(memoryview(room)[: sum(lengths)], lengths, memoryview(back), 65536)
        assert back == TEXT
    finally:
        libraries.cache_clear()


@pytest.mark.parametrize("missing", ["open_isal", "_known_answer"])
def test_without_entry_points_its_python_functions_do_it(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(deflate, missing, lambda *_: False)
    libraries.cache_clear()
    try:
        assert libraries() == ("isal-python", "zlib")
    finally:
        libraries.cache_clear()
