"""The chunk index: builder, encoding, decoding, reading rows."""

from __future__ import annotations

import random
import struct
import zlib

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.image import (
    ChunkFlags,
    ChunkRecord,
    Index,
    IndexBuilder,
    PlaneRecord,
    index_builder,
    whole_plane,
    zero_record,
)
from ckptpipe.pyx.checksum import crc32c
from tests.pipeline.image.samples import CHUNK, make_sample, noise, sample, text


def test_the_bytes() -> None:
    """One raw chunk and one zero chunk, field by field, against bytes put together here by hand."""
    data = noise(CHUNK, 9)
    made = make_sample({"files/a": data + bytes(10)})
    crc = crc32c(data)
    header = b"CKPTIDX1" + struct.pack("<IIQQII", 1, 64, 2, 0, 1, CHUNK) + bytes(20)
    header += struct.pack("<I", crc32c(header))
    raw_row = struct.pack("<IHBBQIHHQIIIIQQ", 0, 0, 0, 0, 0, 0, 0, 0, 0, CHUNK, CHUNK, crc, crc, 0, 0)
    zero_row = struct.pack("<IHBBQIHHQIIIIQQ", 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 10, 0, crc32c(bytes(10)), 0, 0)
    assert made.table == header + raw_row + zero_row
    assert made.manifest.index.compression == "deflate"
    assert made.manifest.index.raw_bytes == 192


def test_zstd_is_only_in_an_index_whose_chunks_need_it_anyhow() -> None:
    streams = {"files/a": text(CHUNK, 1), "files/b": noise(CHUNK, 2)}
    for compress, packed in (("none", "deflate"), ("deflate:0", "deflate"), ("zstd", "zstd")):
        made = make_sample(streams, compress=compress)
        assert made.manifest.index.compression == packed
        assert len(made.table) == made.manifest.index.raw_bytes
        assert f'"compression": "{packed}"'.encode() in made.manifest.encode()
        assert {row.stream for row in Index.decode(made.index, made.manifest).rows()} == {0, 1}
    facts = zstandard.get_frame_parameters(made.index)
    assert facts.content_size == len(made.table) and not facts.has_checksum


def test_plane_record_bytes() -> None:
    made = make_sample({"files/a": text(CHUNK, 1)}, compress="zstd:7")
    stored = Index.decode(made.index, made.manifest).row(0, 0).stored_bytes
    assert made.table[128:] == struct.pack("<BbHIIIII", 1, 7, 0, CHUNK, CHUNK, stored, 1, stored)


@pytest.mark.parametrize("compress", ["none", "zstd:3"])
@pytest.mark.parametrize("lanes", [1, 3])
def test_decode_gives_the_rows_back(compress: str, lanes: int) -> None:
    made = sample(compress, lanes=lanes)
    index = Index.decode(made.index, made.manifest)
    assert len(index) == made.manifest.totals.chunks
    rows = list(index.rows())
    assert [(row.stream, row.number) for row in rows] == sorted((row.stream, row.number) for row in rows)
    assert sum(row.raw_bytes for row in rows) == made.manifest.totals.raw_bytes
    for row in rows:
        assert index.row(row.stream, row.number) == row
    for stream, entry in enumerate(made.manifest.streams):
        assert len(list(index.rows(stream))) == entry.chunks
    assert [row.zero for row in index.rows(2)] == [True, True, True]
    assert any(row.planes for row in rows) == (compress != "none")
    assert any(row.is_raw for row in rows)


def test_rows_that_do_not_exist() -> None:
    made = sample()
    index = Index.decode(made.index, made.manifest)
    for stream, number in ((-1, 0), (99, 0), (0, -1), (0, 3), (3, 0)):
        with pytest.raises(IndexError):
            index.row(stream, number)


def test_storage_order() -> None:
    made = sample("zstd:3", lanes=2)
    index = Index.decode(made.index, made.manifest)
    count = len(made.manifest.objects)
    assert count == 2
    for streams, rows in ((None, list(index.rows())), ([1], list(index.rows(1))), ([], [])):
        zeros, objects = index.by_object(streams, count)
        assert list(zeros) == [row for row in rows if row.zero]
        for number, found in enumerate(objects):
            stored = [row for row in rows if not row.zero and row.object == number]
            assert list(found) == sorted(stored, key=lambda row: row.offset)


def test_statistics() -> None:
    made = make_sample(
        {"files/a": bytes(CHUNK + 1), "files/b": text(CHUNK, 1), "files/c": noise(CHUNK + 7, 2)},
        compress="zstd:3",
    )
    statistics = Index.decode(made.index, made.manifest).statistics()
    assert list(statistics) == ["none", "zero", "zstd"]
    assert (statistics["zero"].chunks, statistics["zero"].raw_bytes, statistics["zero"].stored_bytes) == (
        2,
        CHUNK + 1,
        0,
    )
    assert (statistics["none"].chunks, statistics["none"].stored_bytes) == (2, CHUNK + 7)
    assert statistics["zstd"].chunks == 1
    assert statistics["zstd"].stored_bytes < statistics["zstd"].raw_bytes == CHUNK


def test_an_image_without_chunks() -> None:
    made = make_sample({"files/empty": b""})
    assert list(Index.decode(made.index, made.manifest).rows()) == []
    made = make_sample({}, lanes=0)
    assert len(Index.decode(made.index, made.manifest)) == 0


@given(st.lists(st.integers(0, 40), max_size=6), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_rows_may_come_in_any_order(counts: list[int], chance: random.Random) -> None:
    rows = []
    for stream, count in enumerate(counts):
        for number in range(count):
            kind = chance.randrange(3)
            crc, offset = chance.getrandbits(32), chance.randrange(1000) * 4096
            if kind == 0:
                rows.append(zero_record(stream, number, 4096, crc))
            elif kind == 1:
                rows.append(ChunkRecord(stream, number, 4096, crc, 1, 2, offset, 4096, crc))
            else:
                rows.append(
                    ChunkRecord(
                        stream, number, 4096, crc, 0, 0, offset, 99, 5, planes=whole_plane(1, -7, 4096, 99)
                    )
                )
    shuffled = list(rows)
    chance.shuffle(shuffled)
    tables = []
    for order in (rows, shuffled):
        builder = IndexBuilder(4096)
        for row in order:
            builder.add(row)
        encoded = builder.encode(counts)
        assert encoded.rows == len(rows) and encoded.zero_chunks == sum(row.zero for row in rows)
        if encoded.compression == "zstd":
            tables.append(zstandard.ZstdDecompressor().decompress(encoded.stored))
        else:
            tables.append(zlib.decompress(encoded.stored, -15))
        assert len(tables[-1]) == encoded.raw_bytes
    assert tables[0] == tables[1]


GOOD_PLANE = whole_plane(1, 3, 4096, 100)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (ChunkRecord(0, -1, 4096, 0, stored_bytes=4096), "negative"),
        (ChunkRecord(0, 0, 0, 0), "raw bytes"),
        (ChunkRecord(0, 0, 4097, 0, stored_bytes=4097), "raw bytes"),
        (ChunkRecord(0, 0, 4096, 1, stored_bytes=4096, stored_crc32c=2), "checksum"),
        (ChunkRecord(0, 0, 4096, 1, stored_bytes=4095, stored_crc32c=1), "stored length"),
        (ChunkRecord(0, 0, 4096, 1, stored_bytes=4096, stored_crc32c=1, transform=1), "transform"),
        (ChunkRecord(0, 0, 4096, 1, offset=1, stored_bytes=4096, stored_crc32c=1), "multiple of 4096"),
        (ChunkRecord(0, 0, 4096, 1, flags=ChunkFlags.BASE), "base"),
        (ChunkRecord(0, 0, 4096, 1, stored_bytes=1, flags=ChunkFlags.ZERO), "zero chunk"),
        (ChunkRecord(0, 0, 4096, 1, stored_bytes=99, planes=GOOD_PLANE), "100 stored bytes"),
        (ChunkRecord(0, 0, 4095, 1, stored_bytes=100, planes=GOOD_PLANE), "4096 raw bytes"),
        (ChunkRecord(0, 0, 10, 1, stored_bytes=11, planes=whole_plane(1, 3, 10, 11)), "more than raw"),
        (ChunkRecord(0, 0, 4096, 1, stored_bytes=100, planes=GOOD_PLANE * 2), "2 planes"),
        (
            ChunkRecord(
                0, 0, 4096, 1, stored_bytes=100, planes=(PlaneRecord(1, 3, 2048, 4096, 100, (100,)),)
            ),
            "blocks of 2048",
        ),
    ],
)
def test_the_builder_refuses_nonsense(row: ChunkRecord, words: str) -> None:
    builder = IndexBuilder(4096)
    with pytest.raises(ValueError, match=words):
        builder.add(row)
    assert builder.encode([]).rows == 0


def test_the_builder_wants_every_chunk_once() -> None:
    row = ChunkRecord(0, 1, 4096, 1, stored_bytes=4096, stored_crc32c=1)

    def built() -> IndexBuilder:
        builder = IndexBuilder(4096)
        builder.add(row)
        return builder

    with pytest.raises(ValueError, match="stream 0, chunk 1: added twice"):
        built().add(row)
    with pytest.raises(ValueError, match="1 chunks were added, the streams have 2"):
        built().encode([2])
    with pytest.raises(ValueError, match="stream 0 has 1 chunks, not 2"):
        built().encode([1])
    with pytest.raises(ValueError, match="stream 0, where there are 0"):
        built().encode([])
    with pytest.raises(ValueError, match="were added"):
        IndexBuilder(4096).encode([1])


def test_too_many_chunks_name_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_builder, "INDEX_RAW_MAX", 64 + 3 * 64)
    builder = IndexBuilder(4096)
    for number in range(3):
        builder.add(zero_record(0, number, 4096, 0))
    with pytest.raises(UsageError, match="chunks larger than 4096 bytes"):
        builder.add(zero_record(1, 0, 4096, 0))


def test_the_table_is_under_a_thousandth_of_the_data() -> None:
    chunk = 8 << 20
    builder = IndexBuilder(chunk)
    count = 1000
    for number in range(count):
        stored = 6_000_000 + number
        builder.add(
            ChunkRecord(
                0,
                number,
                chunk,
                77 * number,
                0,
                0,
                number * chunk,
                stored,
                number,
                planes=whole_plane(1, 3, chunk, stored),
            )
        )
    assert builder.encode([count]).raw_bytes < count * chunk / 50_000
