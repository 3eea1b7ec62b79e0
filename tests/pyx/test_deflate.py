"""Deflate's own encoder against zlib's decoder, and ISA-L's decoder against zlib's encoder."""

from __future__ import annotations

import random
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptpipe.pipeline.codecs.deflate import libraries
from ckptpipe.pyx.deflate import Inflater, literals_blocks, literals_size

chance = random.Random(11)
EXPONENTS = bytes(chance.choices(range(110, 126), weights=[2**n for n in range(16)], k=300_001))
# Counts like Fibonacci's numbers make Huffman's code as deep as can be: deeper than the format allows.
FIBONACCI = [1, 1]
while len(FIBONACCI) < 25:
    FIBONACCI.append(FIBONACCI[-1] + FIBONACCI[-2])
DEEP = b"".join(bytes([byte]) * count for byte, count in enumerate(FIBONACCI))
SAMPLES = {
    "exponents": EXPONENTS,
    "deep": DEEP,
    "noise": chance.randbytes(200_000),
    "zeros": bytes(131_073),
    "one byte": b"a",
    "two": b"ab",
    "all bytes": bytes(range(256)),
    "text": b"the quick brown fox %d " * 5000,
}


def inflated(stream: bytes) -> bytes:
    """By zlib, which must find one final stream and nothing behind it."""
    decoder = zlib.decompressobj(-15)
    raw = decoder.decompress(stream)
    assert decoder.eof and not decoder.unused_data
    return raw


def deflated(raw: bytes, level: int = 6, strategy: int = zlib.Z_DEFAULT_STRATEGY) -> bytes:
    coder = zlib.compressobj(level, zlib.DEFLATED, -15, 9, strategy)
    return coder.compress(raw) + coder.flush()


@pytest.fixture
def inflater() -> Inflater:
    assert libraries()[0] == "isal", "the isal that is installed has no entry points"
    return Inflater()


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("block", [1000, 65536, 1 << 20])
def test_zlib_reads_what_is_coded_by_entropy(name: str, block: int) -> None:
    raw = SAMPLES[name]
    room = bytearray(len(raw) + 70 * (len(raw) // block + 1))
    lengths = literals_blocks(raw, room, block)
    assert len(lengths) == -(-len(raw) // block)
    at = 0
    for number, length in enumerate(lengths):
        part = raw[number * block : (number + 1) * block]
        assert inflated(bytes(room[at : at + length])) == part
        assert length == literals_size(part) <= len(part) + 5 * (len(part) // 65535 + 1)
        at += length
    assert not any(room[at:])  # nothing is written behind the last stream


def test_as_short_as_zlib_makes_it_without_matches() -> None:
    for name in ("exponents", "text", "all bytes"):
        raw = SAMPLES[name][:65536]
        assert literals_size(raw) <= len(deflated(raw, 1, zlib.Z_HUFFMAN_ONLY)) + 2


def test_it_writes_to_the_last_byte_of_its_room_and_not_beyond() -> None:
    for name in ("exponents", "deep", "text", "noise"):
        raw = SAMPLES[name][:50_000]
        size = literals_size(raw)
        for room in (size, size + 1, size + 7, size + 8):
            guarded = bytearray(b"\xa5" * (room + 64))
            with memoryview(guarded)[:room] as view:
                assert literals_blocks(raw, view, len(raw)) == (size,)
            assert inflated(bytes(guarded[:size])) == raw
            assert guarded[room:] == b"\xa5" * 64
        with memoryview(bytearray(size - 1)) as view:
            assert literals_blocks(raw, view, len(raw)) == ()
    assert (
        literals_blocks(EXPONENTS, bytearray(70_000), 65536) == ()
    )  # the first blocks fit, the others do not
    assert literals_blocks(b"", bytearray(1), 65536) == ()


@given(st.binary(max_size=600) | st.text("abcde", max_size=3000).map(str.encode), st.integers(1, 700))
@settings(max_examples=200, deadline=None)
def test_any_bytes_come_back(raw: bytes, block: int) -> None:
    room = bytearray(len(raw) + 80 * (len(raw) // block + 1))
    lengths = literals_blocks(raw, room, block)
    at, back = 0, b""
    for length in lengths:
        back += inflated(bytes(room[at : at + length]))
        at += length
    assert back == raw


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("strategy", [zlib.Z_DEFAULT_STRATEGY, zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE, zlib.Z_FIXED])
def test_isal_reads_what_zlib_wrote(inflater: Inflater, name: str, strategy: int) -> None:
    raw = SAMPLES[name]
    for level in (0, 1, 9):
        for block in (4096, 65536):
            streams = [deflated(raw[at : at + block], level, strategy) for at in range(0, len(raw), block)]
            guarded = bytearray(b"\xa5" * (len(raw) + 64))
            with memoryview(guarded)[: len(raw)] as room:
                inflater.blocks(b"".join(streams), [len(each) for each in streams], room, block)
            assert guarded == raw + b"\xa5" * 64


def refusal(inflater: Inflater, stream: bytes, raw_bytes: int) -> str:
    guarded = bytearray(b"\xa5" * (raw_bytes + 64))
    with memoryview(guarded)[:raw_bytes] as room, pytest.raises(ValueError, match="deflate block") as caught:
        inflater.blocks(stream, (len(stream),), room, max(raw_bytes, 1))
    assert guarded[raw_bytes:] == b"\xa5" * 64
    return str(caught.value)


def test_a_stream_of_another_length_is_refused(inflater: Inflater) -> None:
    raw = SAMPLES["text"][:10_000]
    stream = deflated(raw)
    assert refusal(inflater, stream[:-1], 10_000) == "deflate block 0 of 1 ends before its stream does"
    assert refusal(inflater, stream + b"\0\0", 10_000) == "deflate block 0 of 1 has 2 bytes after its stream"
    assert refusal(inflater, stream, 9_999) == "deflate block 0 of 1 gives more than 9999 bytes"
    assert refusal(inflater, stream, 10_001) == "deflate block 0 of 1 gives 10000 bytes where 10001 belong"
    assert refusal(inflater, b"\x07", 10) == "deflate block 0 of 1 is damaged"  # block type 3
    not_final = zlib.compressobj(6, zlib.DEFLATED, -15)
    assert "ends before" in refusal(
        inflater, not_final.compress(raw) + not_final.flush(zlib.Z_SYNC_FLUSH), 10_000
    )
    far = b"\x4b\x04\x82\x00\x00"  # a match that reaches back before the first byte
    assert "block 0 of 1" in refusal(inflater, far, 100)


def test_the_block_is_named(inflater: Inflater) -> None:
    streams = [deflated(bytes([number]) * 1000) for number in range(5)]
    lengths = [len(each) for each in streams]
    streams[3] = b"\x07" + streams[3][1:]
    with pytest.raises(ValueError, match="deflate block 3 of 5 is damaged"):
        inflater.blocks(b"".join(streams), lengths, bytearray(5000), 1000)


def test_no_flipped_bit_writes_outside(inflater: Inflater) -> None:
    """Whatever comes out of a damaged stream: it stays within its room, or is refused."""
    for name in ("exponents", "text"):
        raw = SAMPLES[name][:20_000]
        stream = bytearray(deflated(raw))
        for _ in range(1500):
            at, bit = chance.randrange(len(stream)), 1 << chance.randrange(8)
            stream[at] ^= bit
            guarded = bytearray(b"\xa5" * (len(raw) + 4096))
            try:
                with memoryview(guarded)[: len(raw)] as room:
                    inflater.blocks(stream, (len(stream),), room, len(raw))
            except ValueError:
                pass
            assert guarded[len(raw) :] == b"\xa5" * 4096
            stream[at] ^= bit


def test_block_tables_that_lie_are_refused_before_the_decoder(inflater: Inflater) -> None:
    stream = deflated(bytes(1000))
    size = len(stream)
    for lengths, block, words in (
        ((size,), 999, "1 blocks of 999 bytes for 1000"),
        ((size, 0), 1000, "2 blocks of 1000"),
        ((size - 1,), 1000, "stored bytes together"),
        ((size + 1,), 1000, "stored bytes together"),
        ((size,), 0, "blocks of 0 bytes"),
    ):
        with pytest.raises(ValueError, match=words):
            inflater.blocks(stream, lengths, bytearray(1000), block)
    with pytest.raises(OverflowError):
        inflater.blocks(stream, (-1,), bytearray(1000), 1000)
    with pytest.raises(ValueError, match="blocks of 0 bytes"):
        literals_blocks(b"abc", bytearray(10), 0)
