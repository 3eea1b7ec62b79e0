"""Coded chunks that lie or are damaged: found, named, and never shown to a decoder where a checksum tells."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

import ckptpipe
from ckptpipe.pipeline.codecs import parse_compress
from ckptpipe.pipeline.codecs.chunk_codec import ChunkCodec
from ckptpipe.pipeline.codecs.encoding import Encoding
from ckptpipe.pipeline.cuda import host_decoder
from ckptpipe.pipeline.errors import ImageCorrupt, UnsupportedImage, UsageError
from ckptpipe.pipeline.image import records
from ckptpipe.pipeline.image.records import ChunkRecord, PlaneRecord
from ckptpipe.pyx.checksum import crc32c
from ckptpipe.pyx.errors import CkptpipeError
from tests.faults.crafted import Piece, craft, flip, raw
from tests.pipeline.runs import KIB, SMALL, memory_dir, run

__all__ = ["memory_dir"]

CHUNK = 1 << 20
chance = random.Random(6)


def weights(nbytes: int) -> bytes:
    """bf16 of a normal distribution."""
    values = numpy.random.default_rng(7).standard_normal(nbytes // 2).astype(numpy.float32)
    return (values.view(numpy.uint32) >> 16).astype("<u2").tobytes()


WEIGHTS = weights(300_000)
TEXT = b"".join(b"line %d\n" % number for number in range(30_000))


def coded(name: str, data: bytes, codec: str, transform: int, block: int = 0) -> Piece:
    room = bytearray(len(data))
    encoding = Encoding(parse_compress(codec), transform, block)
    made = ChunkCodec().encode(encoding, memoryview(data), memoryview(room))
    assert made.stored_bytes, "it does not shrink"
    stored = bytes(room[: made.stored_bytes])
    return Piece(name, len(data), stored, crc32c(data), made.planes, transform=made.transform)


@pytest.fixture(autouse=True)
def decoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The stored checksum of each chunk that decoders were shown. None may be shown other bytes."""
    shown: list[int] = []
    decode = ChunkCodec.decode

    def watched(self: ChunkCodec, record: ChunkRecord, source: memoryview, destination: memoryview) -> int:
        assert crc32c(source) == record.stored_crc32c, "a decoder was shown bytes whose checksum failed"
        shown.append(record.stored_crc32c)
        return decode(self, record, source, destination)

    monkeypatch.setattr(ChunkCodec, "decode", watched)
    yield shown


def refused(image: Path, kind: type[Exception] = ImageCorrupt) -> str:
    """What restore says, which is what verify says too; the target was not even left behind with files."""
    target = image.parent.parent / "target"
    with pytest.raises(kind) as verified:
        run(ckptpipe.verify(str(image), settings=SMALL))
    with pytest.raises(kind) as caught:
        run(ckptpipe.restore(str(image), to=target, settings=SMALL))
    assert str(verified.value) == str(caught.value)
    assert not [path for path in target.rglob("*") if path.is_file()] if target.exists() else True
    return str(caught.value)


@pytest.mark.parametrize("codec", ["deflate:0", "deflate:1", "deflate:5", "zstd:1"])
@pytest.mark.parametrize("transform", [0, 1, 2])
@pytest.mark.parametrize("block", [0, 4096, 50_001])
def test_what_is_well_coded_is_restored(
    workdir: Path, decoded: list[int], codec: str, transform: int, block: int
) -> None:
    pieces = [coded("files/text", TEXT, codec, transform, block), raw("files/raw", b"raw")]
    if transform == 1:
        pieces.append(coded("files/weights", WEIGHTS, codec, transform, block))
    image = craft(workdir / "store" / "i", pieces)
    assert run(ckptpipe.verify(str(image), settings=SMALL)).codec_backend == "cpu"
    run(ckptpipe.restore(str(image), to=workdir / "target", settings=SMALL))
    assert (workdir / "target" / "text").read_bytes() == TEXT
    if transform == 1:
        assert (workdir / "target" / "weights").read_bytes() == WEIGHTS
    assert len(decoded) == 2 * (len(pieces) - 1)


def planes_changed(piece: Piece, number: int, **fields: object) -> Piece:
    planes = list(piece.planes)
    planes[number] = planes[number]._replace(**fields)
    return Piece(
        piece.name, piece.raw_bytes, piece.stored, piece.raw_crc32c, tuple(planes), transform=piece.transform
    )


@pytest.mark.parametrize("codec", ["deflate:0", "zstd:1"])
@pytest.mark.parametrize("transform", [0, 1])
def test_a_block_table_that_lies(workdir: Path, codec: str, transform: int) -> None:
    """Every sum is right, so the index is; the blocks are not where it says."""
    piece = coded("files/w", TEXT, codec, transform, 16 * KIB)
    plane = piece.planes[-1]
    lengths = list(plane.block_lengths)
    lengths[1] -= 3
    lengths[2] += 3
    image = craft(
        workdir / "store" / "i", [planes_changed(piece, len(piece.planes) - 1, block_lengths=tuple(lengths))]
    )
    words = refused(image)
    assert "stream files/w chunk 0" in words and "cannot be decoded: " in words
    assert f"block 1 of {len(lengths)}" in words
    assert ("plane 1: " in words) == (transform == 1)


def test_blocks_in_another_order(workdir: Path) -> None:
    """Each decodes to its size: only the checksum of the raw bytes tells."""
    piece = coded("files/w", TEXT[: 64 * KIB], "deflate:1", 0, 16 * KIB)
    assert piece.stored is not None
    lengths = piece.planes[0].block_lengths
    ends = [sum(lengths[: number + 1]) for number in range(4)]
    blocks = [piece.stored[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    order = (1, 0, 2, 3)
    piece.stored = b"".join(blocks[number] for number in order)
    image = craft(
        workdir / "store" / "i",
        [planes_changed(piece, 0, block_lengths=tuple(lengths[number] for number in order))],
    )
    words = refused(image)
    assert "stream files/w chunk 0" in words and "decoded bytes have the checksum" in words


def one_block(stored: bytes, raw_bytes: int, codec: int = 2, crc: int = 0) -> Piece:
    plane = PlaneRecord(codec, 0, raw_bytes, raw_bytes, len(stored), (len(stored),))
    return Piece("files/w", raw_bytes, stored, crc, (plane,))


def deflated(data: bytes) -> bytes:
    return zlib.compress(data, 9, wbits=-15)


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (deflated(bytes(9_999)), "gives 9999 bytes where 10000 belong"),
        (deflated(bytes(10_001)), "gives more than 10000 bytes"),
        (deflated(bytes(50 << 20)), "gives more than 10000 bytes"),
        (deflated(bytes(10_000)) + b"\0", "has 1 bytes after its stream"),
        (deflated(bytes(10_000)) + deflated(b""), "has 2 bytes after its stream"),
        (deflated(bytes(10_000))[:-1], "ends before its stream does"),
        (zlib.compress(bytes(10_000)), "deflate block 0 of 1"),  # with zlib's header
        (chance.randbytes(3000), "deflate block 0 of 1"),
        (b"\x07", "is damaged"),
        (b"", "bytes"),
    ],
)
def test_streams_that_are_not_what_the_index_says(workdir: Path, stored: bytes, words: str) -> None:
    if len(stored) > 10_000:
        stored = stored[:10_000]
    if not stored:
        with pytest.raises(ValueError, match="empty block"):
            craft(workdir / "store" / "i", [one_block(stored, 10_000)])
        return
    found = refused(craft(workdir / "store" / "i", [one_block(stored, 10_000)]))
    assert "stream files/w chunk 0" in found and words in found


def test_right_length_and_wrong_bytes(workdir: Path, decoded: list[int]) -> None:
    piece = one_block(deflated(b"a" * 10_000), 10_000, crc=crc32c(b"b" * 10_000))
    words = refused(craft(workdir / "store" / "i", [piece]))
    assert "stream files/w chunk 0" in words and "decoded bytes have the checksum" in words
    assert len(decoded) == 2


@pytest.mark.parametrize(("codec", "most"), [(2, 4 << 20), (3, 1 << 20)])
def test_blocks_longer_than_the_format_allows(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, decoded: list[int], codec: int, most: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(records.BLOCK_MAX, codec, 64 << 20)
        image = craft(
            workdir / "store" / "i", [one_block(deflated(bytes(most + 1)), most + 1, codec)], chunk=8 << 20
        )
    words = refused(image)
    assert "stream 'files/w', chunk 0" in words and f"blocks of {most + 1} bytes, {most} is the most" in words
    assert not decoded


def test_a_bit_of_any_stored_byte(workdir: Path, decoded: list[int]) -> None:
    """Of raw planes, of coded ones, at each block's first and last byte: nothing that fails reaches a decoder."""
    piece = coded("files/w", WEIGHTS, "deflate:0", 1)
    image = craft(workdir / "store" / "i", [piece])
    (path,) = image.glob("data-*")
    low, high = piece.planes
    edges = {0, low.stored_bytes - 1, low.stored_bytes}
    at = low.stored_bytes
    for length in high.block_lengths:
        at += length
        edges |= {at - 1, at}
    places = sorted((edges | {chance.randrange(at) for _ in range(10)}) - {at})
    for place in places:
        bit = chance.randrange(8)
        flip(path, place, bit)
        words = refused(image)
        assert "stream files/w chunk 0" in words and "stored bytes have the checksum" in words
        flip(path, place, bit)
    assert not decoded
    run(ckptpipe.verify(str(image), settings=SMALL))
    assert len(decoded) == 1


def test_a_bit_of_the_index_or_of_the_manifest(workdir: Path, decoded: list[int]) -> None:
    image = craft(workdir / "store" / "i", [coded("files/w", WEIGHTS, "deflate:0", 1)])
    for path in (next(image.glob("index-*")), image / "manifest.json"):
        for place in sorted(chance.randrange(path.stat().st_size) for _ in range(10)):
            flip(path, place)
            refused(image)
            flip(path, place)
    assert not decoded


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is one."""

    def none(driver: object) -> None:
        raise CkptpipeError("no GPU is here")

    monkeypatch.setattr(host_decoder, "borrowed", none)


def ans_image(workdir: Path) -> Path:
    """One chunk of ans, whatever is in it, and one of deflate."""
    plane = PlaneRecord(3, 1, 8192, 8192, 5000, (5000,))
    pieces = [
        Piece("files/gpu", 8192, chance.randbytes(5000), 1, (plane,)),
        coded("files/w", WEIGHTS, "deflate:0", 1),
    ]
    return craft(workdir / "store" / "i", pieces)


def test_a_codec_that_needs_a_gpu_is_refused_before_anything_is_written(
    workdir: Path, decoded: list[int], no_gpu: None
) -> None:
    image = ans_image(workdir)
    target = workdir / "target"
    with pytest.raises(UnsupportedImage) as caught:
        run(ckptpipe.restore(str(image), to=target, settings=SMALL))
    assert "stream files/gpu chunk 0 is coded with ans" in str(caught.value)
    assert "GPU" in str(caught.value) and "ckptpipe[gpu]" in caught.value.cure
    with pytest.raises(UnsupportedImage, match="stream files/gpu chunk 0 is coded with ans"):
        run(ckptpipe.copy(str(image), to=workdir / "copies", compress="zstd", settings=SMALL))
    assert not target.exists() and not (workdir / "copies").exists() and not decoded
    run(ckptpipe.restore(str(image), to=target, streams=["w"], settings=SMALL))
    assert (target / "w").read_bytes() == WEIGHTS


def test_verify_without_a_gpu_checks_what_is_stored_and_says_so(
    workdir: Path, decoded: list[int], no_gpu: None
) -> None:
    image = ans_image(workdir)
    result = run(ckptpipe.verify(str(image), settings=SMALL))
    assert (result.chunks, result.chunks_not_decoded, len(decoded)) == (2, 1, 1)
    assert any("1 chunks are coded with ans and were not decoded" in note for note in result.facts.notes)
    (path,) = image.glob("data-*")
    flip(path, 4000)
    with pytest.raises(ImageCorrupt, match=r"stream files/gpu chunk 0 .*stored bytes have the checksum"):
        run(ckptpipe.verify(str(image), settings=SMALL))


def test_a_forced_cpu_is_no_excuse(workdir: Path) -> None:
    image = ans_image(workdir)
    with pytest.raises((UnsupportedImage, UsageError), match="ans"):
        run(ckptpipe.verify(str(image), decompress_backend="cpu", settings=SMALL))


def test_a_copy_that_keeps_what_is_stored_needs_no_decoder(
    workdir: Path, decoded: list[int], no_gpu: None
) -> None:
    image = ans_image(workdir)
    run(ckptpipe.copy(str(image), to=workdir / "copies", settings=SMALL))
    assert not decoded
    copied = run(ckptpipe.verify(str(workdir / "copies" / "crafted"), settings=SMALL))
    assert copied.chunks_not_decoded == 1


def test_a_gpu_codec_cannot_be_asked_for_where_the_cpu_codes(workdir: Path) -> None:
    (workdir / "file").write_bytes(TEXT)
    with pytest.raises(UsageError, match="ans:f16 is written on a GPU only"):
        run(
            ckptpipe.save(
                workdir / "file",
                to=workdir / "store",
                compress="ans:f16",
                settings=SMALL,
                allow_gpu_only=True,
            )
        )
    assert not (workdir / "store").exists()
