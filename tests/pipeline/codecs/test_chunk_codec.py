"""Chunks through transform and codecs: what is coded, what is left raw, and that all of it comes back."""

from __future__ import annotations

import random

import numpy
import pytest

from ckptpipe.pipeline.codecs import DECODABLE, deflate, parse_compress
from ckptpipe.pipeline.codecs.chunk_codec import AS_IT_IS, ChunkCodec, Encoded
from ckptpipe.pipeline.codecs.encoding import TRANSFORM_AUTO, Encoding
from ckptpipe.pipeline.image.records import ChunkRecord, PlaneRecord, check_planes
from ckptpipe.pyx.checksum import crc32c

chance = random.Random(8)
CHUNK = 1 << 20


def bf16(nbytes: int) -> bytes:
    """Weights of a normal distribution: the upper halves of float32, little-endian."""
    values = numpy.random.default_rng(1).standard_normal(nbytes // 2 + 1).astype(numpy.float32) * 0.02
    return (values.view(numpy.uint32) >> 16).astype("<u2").tobytes()[:nbytes]


def float32(nbytes: int) -> bytes:
    values = numpy.random.default_rng(2).standard_normal(nbytes // 4 + 1).astype("<f4") * 0.02
    return values.tobytes()[:nbytes]


def encode(text: str, raw: bytes, transform: int = TRANSFORM_AUTO, block: int = 0) -> tuple[Encoded, bytes]:
    room = bytearray(len(raw))
    encoded = ChunkCodec().encode(
        Encoding(parse_compress(text), transform, block), memoryview(raw), memoryview(room)
    )
    assert check_planes(encoded.planes, encoded.transform, len(raw), encoded.stored_bytes) == "" or (
        encoded == AS_IT_IS
    )
    return encoded, bytes(room[: encoded.stored_bytes])


@pytest.fixture(params=["isal", "zlib"], autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whole chunks in one call, and plane by plane."""
    assert request.param in deflate.libraries()
    monkeypatch.setattr(deflate, "libraries", lambda: (request.param,))
    return str(request.param)


def decode(encoded: Encoded, stored: bytes, raw_bytes: int) -> bytes:
    record = ChunkRecord(
        0, 0, raw_bytes, 0, stored_bytes=len(stored), transform=encoded.transform, planes=encoded.planes
    )
    guarded = bytearray(b"\xa5" * (raw_bytes + 64))
    with memoryview(guarded)[:raw_bytes] as room:
        crc = ChunkCodec().decode(record, memoryview(stored), room)
        assert crc == crc32c(room)
    assert guarded[raw_bytes:] == b"\xa5" * 64
    return bytes(guarded[:raw_bytes])


@pytest.mark.parametrize("codec", ["zstd:1", "zstd:-3", "deflate:0", "deflate:1", "deflate:5"])
@pytest.mark.parametrize("transform", [0, 1, 2])
@pytest.mark.parametrize("nbytes", [CHUNK, CHUNK - 1, 65536 * 2 + 3, 20_001, 4097])
def test_what_is_coded_comes_back(codec: str, transform: int, nbytes: int) -> None:
    for raw in (
        bf16(nbytes),
        float32(nbytes),
        b"".join(b"%06d," % n for n in range(nbytes // 7 + 1))[:nbytes],
    ):
        for block in (0, 4096, 100_000):
            encoded, stored = encode(codec, raw, transform, block)
            if encoded != AS_IT_IS:
                assert decode(encoded, stored, nbytes) == raw
                assert encoded.transform == transform and len(stored) < nbytes


def test_bf16_keeps_its_low_bytes_and_codes_sign_and_exponent() -> None:
    raw = bf16(CHUNK)
    for codec, number, blocks, ratio in (
        ("deflate:0", 2, 8, 1.48),
        ("deflate", 2, 8, 1.48),
        ("zstd", 1, 1, 1.40),
    ):
        encoded, stored = encode(codec, raw)
        assert encoded.transform == 1
        low, high = encoded.planes
        assert (low.codec, low.stored_bytes, low.block_lengths) == (0, CHUNK // 2, ())
        assert (high.codec, len(high.block_lengths)) == (number, blocks)
        assert stored[: CHUNK // 2] == raw[::2]
        assert CHUNK / encoded.stored_bytes > ratio
        assert decode(encoded, stored, CHUNK) == raw


def test_float32_codes_one_plane_of_four() -> None:
    raw = float32(CHUNK)
    encoded, stored = encode("deflate:0", raw)
    assert encoded.transform == 2
    assert [plane.codec for plane in encoded.planes] == [0, 0, 0, 2]
    assert decode(encoded, stored, CHUNK) == raw


def test_zeros_between_weights_are_found_in_every_plane() -> None:
    raw = bf16(CHUNK // 2) + bytes(CHUNK // 2)
    encoded, stored = encode("deflate:1", raw, 1)
    assert [plane.codec for plane in encoded.planes] == [2, 2]
    assert decode(encoded, stored, CHUNK) == raw


@pytest.mark.parametrize("codec", ["zstd", "deflate", "none"])
@pytest.mark.parametrize("transform", [TRANSFORM_AUTO, 0, 1, 2])
def test_noise_is_left_as_it_is(codec: str, transform: int) -> None:
    assert encode(codec, chance.randbytes(CHUNK), transform)[0] == AS_IT_IS


def test_tiny_chunks() -> None:
    for nbytes in range(1, 40):
        for transform in (0, 1, 2):
            for raw in (b"\x01" * nbytes, chance.randbytes(nbytes)):
                encoded, stored = encode("deflate:0", raw, transform)
                if encoded != AS_IT_IS:
                    assert decode(encoded, stored, nbytes) == raw


def test_a_chunk_that_does_not_fit_as_a_whole_is_left_as_it_is() -> None:
    """The rule for a whole chunk: one plane of four gains enough for itself, but not for the chunk."""
    raw = float32(CHUNK)
    room = bytearray(CHUNK)
    encoding = Encoding(parse_compress("deflate:0"), 2)
    whole = ChunkCodec().encode(encoding, memoryview(raw), memoryview(room))
    with memoryview(room)[: whole.stored_bytes] as enough:
        assert ChunkCodec().encode(encoding, memoryview(raw), enough) == whole
    with memoryview(room)[: whole.stored_bytes - 1] as less:
        assert ChunkCodec().encode(encoding, memoryview(raw), less) == AS_IT_IS


def test_damage_names_plane_and_block() -> None:
    raw = bf16(CHUNK)
    encoded, stored = encode("deflate:0", raw)
    at = CHUNK // 2 + encoded.planes[1].block_lengths[0]
    damaged = stored[:at] + b"\x07" + stored[at + 1 :]
    with pytest.raises(ValueError, match="plane 1: deflate block 1 of 8 is damaged"):
        decode(encoded, damaged, CHUNK)
    blocks, stored = encode("zstd", raw, 0, 100_000)
    at = blocks.planes[0].block_lengths[0]
    with pytest.raises(ValueError, match=r"^block 1 of 11: no zstd frame: wrong magic number"):
        decode(blocks, stored[:at] + b"\x07" + stored[at + 1 :], CHUNK)


def test_records_that_lie_are_refused_before_a_decoder_is_made() -> None:
    raw = bf16(CHUNK)
    encoded, stored = encode("deflate:0", raw)
    low, high = encoded.planes
    for planes, transform in (
        ((low,), 1),
        ((low, high), 2),
        ((low, high), 0),
        ((low, high), 7),
        ((low, high._replace(stored_bytes=high.stored_bytes - 1)), 1),
        ((low, high._replace(raw_bytes=high.raw_bytes - 1)), 1),
        ((low, high._replace(block_bytes=4096)), 1),
        ((low, high._replace(block_lengths=high.block_lengths[:-1])), 1),
        ((low._replace(stored_bytes=low.stored_bytes + 1), high), 1),
    ):
        with pytest.raises(ValueError):
            decode(Encoded(len(stored), planes, transform), stored, CHUNK)


def test_every_block_size_that_the_format_allows() -> None:
    raw = b"".join(b"%06d," % number for number in range(150_000))[:1_000_001]
    for codec in ("zstd:1", "deflate:1"):
        for block in (4096, 4097, 65536, 262_144, 1_000_000, 1_000_001):
            encoded, stored = encode(codec, raw, 0, block)
            assert encoded.planes[0].block_bytes == block
            assert decode(encoded, stored, len(raw)) == raw


def test_a_codec_that_only_a_gpu_has() -> None:
    assert 3 not in DECODABLE
    plane = PlaneRecord(3, 0, 8192, 8192, 4000, (4000,))
    with pytest.raises(KeyError):
        decode(Encoded(4000, (plane,), 0), bytes(4000), 8192)
