"""Indexes that somebody made to do harm: each is refused, by name, before anything large is allocated."""

from __future__ import annotations

import hashlib
import random
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptpipe.pipeline.errors import ImageCorrupt, ImageIncomplete, UnsupportedImage
from ckptpipe.pipeline.image import Index, Manifest
from ckptpipe.pipeline.image.records import PlaneRecord, check_planes
from ckptpipe.pyx.errors import CkptpipeError
from tests.pipeline.image.samples import CHUNK, SAVE_ID, Sample, make_sample, noise, sample, text
from tests.pipeline.image.second_reader import Refused, parse_index, parse_manifest

GOOD = sample(lanes=2)
ROWS_AT = 64
FIELDS = {
    "stream": ("<I", 0), "flags": ("<H", 4), "transform": ("<B", 6), "planes": ("<B", 7), "chunk": ("<Q", 8),
    "object": ("<I", 16), "lane": ("<H", 20), "reserved": ("<H", 22), "offset": ("<Q", 24), "stored": ("<I", 32),
    "raw": ("<I", 36), "stored_crc": ("<I", 40), "raw_crc": ("<I", 44), "plane_offset": ("<Q", 48), "last": ("<Q", 56),
}  # fmt: skip


def refused(made: Sample) -> CkptpipeError:
    with pytest.raises((ImageCorrupt, UnsupportedImage)) as caught:
        Index.decode(made.index, made.manifest)
    assert f"index-{SAVE_ID}" in str(caught.value)
    assert caught.value.cure
    return caught.value


def put(row: int, field: str, value: int, made: Sample = GOOD) -> Sample:
    table = made.table
    form, at = FIELDS[field]
    struct.pack_into(form, table, ROWS_AT + row * 64 + at, value)
    return made.with_table(table)


def rows_of(made: Sample) -> list[Any]:
    return list(Index.decode(made.index, made.manifest).rows())


ROWS = rows_of(GOOD)
RAW = next(number for number, row in enumerate(ROWS) if row.is_raw)
CODED = next(number for number, row in enumerate(ROWS) if row.planes)
ZERO = next(number for number, row in enumerate(ROWS) if row.zero)
PLANES_AT = ROWS_AT + 64 * len(ROWS)


def test_the_object_must_be_the_one_of_the_manifest() -> None:
    short = replace(GOOD, index=GOOD.index[:-1])
    assert isinstance(refused(short), ImageIncomplete)
    refused(replace(GOOD, index=GOOD.index + b"\0"))
    assert "SHA-256" in str(refused(replace(GOOD, index=GOOD.index[:-1] + b"\0")))


def test_every_flipped_byte_is_refused() -> None:
    for position in range(len(GOOD.index)):
        stored = bytearray(GOOD.index)
        stored[position] ^= 0x10
        refused(replace(GOOD, index=bytes(stored)))


@pytest.mark.parametrize(
    ("row", "field", "value", "words"),
    [
        (RAW, "stream", 1, "missing"),
        (RAW, "chunk", 1, "missing"),
        (RAW, "chunk", 2**64 - 1, "missing"),
        (RAW, "raw", CHUNK - 1, "raw bytes where"),
        (RAW, "raw", 0, "raw bytes where"),
        (RAW, "raw", 2**32 - 1, "raw bytes where"),
        (RAW, "object", 2, "object 2, the manifest has 2"),
        (RAW, "object", 2**32 - 1, "the manifest has 2"),
        (RAW, "lane", 9, "lane 9"),
        (RAW, "reserved", 1, "reserved"),
        (RAW, "last", 1, "reserved"),
        (RAW, "offset", 1, "multiple of 4096"),
        (RAW, "offset", 2**64 - 4096, "which has"),
        (RAW, "offset", 1 << 40, "which has"),
        (RAW, "stored", CHUNK - 1, "stored side"),
        (RAW, "stored", 0, "stored bytes for"),
        (RAW, "stored", CHUNK + 1, "stored bytes for"),
        (RAW, "stored_crc", 1, "stored side"),
        (RAW, "plane_offset", 24, "stored side"),
        (RAW, "planes", 1, "plane"),
        (RAW, "transform", 1, "stored side"),
        (ZERO, "transform", 2, "zero chunk"),
        (CODED, "transform", 1, "1 planes where its transform makes 2"),
        (CODED, "transform", 2, "1 planes where its transform makes 4"),
        (CODED, "planes", 0, "stored side"),
        (CODED, "planes", 2, "2 planes"),
        (CODED, "planes", 255, "255 planes"),
        (CODED, "plane_offset", 24, "plane records at"),
        (CODED, "plane_offset", 2**63, "plane records at"),
        (CODED, "stored", 100, "planes hold"),
        (ZERO, "stored", 1, "zero chunk"),
        (ZERO, "offset", 4096, "zero chunk"),
        (ZERO, "object", 1, "zero chunk"),
        (ZERO, "planes", 1, "zero chunk"),
        (ZERO, "raw_crc", 7, "checksum of something else"),
    ],
)
def test_hostile_rows(row: int, field: str, value: int, words: str) -> None:
    error = refused(put(row, field, value))
    assert isinstance(error, ImageCorrupt)
    assert words in str(error)
    entry = GOOD.manifest.streams[ROWS[row].stream]
    assert f"stream {entry.name!a}, chunk {ROWS[row].number}" in str(error)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("flags", 2, "flags 0x0002"),
        ("flags", 0x8000, "flags 0x8000"),
        ("transform", 3, "transform 3"),
        ("transform", 255, "transform 255"),
    ],
)
def test_unknown_flags_and_transforms(field: str, value: int, words: str) -> None:
    error = refused(put(RAW, field, value))
    assert isinstance(error, UnsupportedImage)
    assert words in str(error)
    assert "stream 'files/weights.bin', chunk 0" in str(error)


@pytest.mark.parametrize("codec", [8, 200, 255])
def test_unknown_codecs(codec: int) -> None:
    table = GOOD.table
    table[PLANES_AT] = codec
    error = refused(GOOD.with_table(table))
    assert isinstance(error, UnsupportedImage)
    assert f"codec {codec}, which" in str(error) and "chunk" in str(error)


@pytest.mark.parametrize("codec", range(1, 8))
def test_codecs_of_the_format_are_taken_whether_or_not_the_cpu_has_them(codec: int) -> None:
    table = GOOD.table
    table[PLANES_AT] = codec
    made = GOOD.with_table(table)
    first = Index.decode(made.index, made.manifest).first_chunks
    row = ROWS[CODED]
    assert first[codec][row.stream] == row.number


@pytest.mark.parametrize(("codec", "most"), [(2, 4 << 20), (3, 1 << 20), (4, 64 << 10), (5, 4 << 20)])
def test_blocks_longer_than_a_codec_takes(codec: int, most: int) -> None:
    """As long as is allowed: taken. Longer: refused, by name."""
    raw = 2 * most
    for block, taken in ((most, True), (most + 4096, False)):
        lengths = (1000,) * -(-raw // block)
        record = PlaneRecord(codec, 0, block, raw, sum(lengths), lengths)
        problem = check_planes((record,), 0, raw, sum(lengths))
        assert problem == "" if taken else f"blocks of {block} bytes, {most} is the most" in problem


@pytest.mark.parametrize(
    ("at", "form", "value", "words"),
    [
        (0, "<B", 0, "raw but has blocks"),
        (2, "<H", 1, "reserved"),
        (4, "<I", 0, "blocks of 0 bytes"),
        (4, "<I", 4096, "has 1 blocks of 4096"),
        (4, "<I", 64, "blocks of 64 bytes"),
        (4, "<I", 2**31, "blocks of 2147483648"),
        (8, "<I", 1, "1 raw bytes"),
        (12, "<I", 1, "1 stored bytes"),
        (16, "<I", 0, "has 0 blocks"),
        (16, "<I", 2, "has 2 blocks"),
        (16, "<I", 2**32 - 1, "ends inside"),
        (16, "<I", 10**6, "ends inside"),
        (20, "<I", 0, "empty block"),
        (20, "<I", 2**32 - 1, "blocks of 4294967295 bytes together"),
    ],
)
def test_hostile_plane_records(at: int, form: str, value: int, words: str) -> None:
    table = GOOD.table
    struct.pack_into(form, table, PLANES_AT + at, value)
    assert words in str(refused(GOOD.with_table(table)))


@pytest.mark.parametrize(
    ("at", "form", "value", "words"),
    [
        (0, "<B", 0, "CKPTIDX1"),
        (8, "<I", 2, "index version 2, this ckptpipe knows version 1"),
        (12, "<I", 32, "row size"),
        (16, "<Q", 1, "rows"),
        (16, "<Q", 2**64 - 1, "rows"),
        (24, "<Q", 0, "plane-area size"),
        (32, "<I", 1, "number of streams"),
        (36, "<I", 4096, "chunk size"),
        (40, "<I", 1, "reserved"),
    ],
)
def test_hostile_headers(at: int, form: str, value: int, words: str) -> None:
    table = GOOD.table
    struct.pack_into(form, table, at, value)
    assert words in str(refused(GOOD.with_table(table)))
    if at not in (0, 8):
        assert "CRC32C of its header" in str(refused(GOOD.with_table(table, header=False)))


def test_missing_doubled_and_surplus_rows() -> None:
    table = GOOD.table
    without = table[:64] + table[128:]
    assert "plane-area size" in str(refused(GOOD.with_table(without)))
    doubled = bytearray(table)
    doubled[64:128] = table[128:192]
    assert "missing" in str(refused(GOOD.with_table(doubled)))
    swapped = table[:64] + table[128:192] + table[64:128] + table[192:]
    assert "missing" in str(refused(GOOD.with_table(swapped)))
    longer = bytearray(table + bytes(24))
    struct.pack_into("<Q", longer, 24, len(longer) - PLANES_AT)
    assert "follow the last plane record" in str(refused(GOOD.with_table(longer)))
    shorter = bytearray(table[:-4])
    struct.pack_into("<Q", shorter, 24, len(shorter) - PLANES_AT)
    assert "damaged plane records" in str(refused(GOOD.with_table(shorter)))


def test_overlapping_extents() -> None:
    made = make_sample({"files/a": noise(CHUNK, 1), "files/b": noise(CHUNK, 2)})
    for offset in (0, 4096):
        error = refused(put(1, "offset", offset, made))
        assert "two chunks lie at byte" in str(error)
        assert "'files/a', chunk 0" in str(error) and "'files/b', chunk 0" in str(error)


def test_zero_chunks_are_counted() -> None:
    totals = replace(GOOD.manifest.totals, zero_chunks=GOOD.manifest.totals.zero_chunks - 1)
    assert "zero chunks" in str(refused(replace(GOOD, manifest=replace(GOOD.manifest, totals=totals))))


# -- frames ------------------------------------------------------------------------------------------------


def frame(window_log: int, content: int | None, body: bytes = b"\x01\x00\x00") -> bytes:
    """A zstd frame header as RFC 8878 has it, then ``body`` (default: one empty last block)."""
    descriptor = 0xC0 if content is not None else 0
    made = struct.pack("<IBB", 0xFD2FB528, descriptor, (window_log - 10) << 3)
    return made + (b"" if content is None else struct.pack("<Q", content)) + body


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (frame(31, 64 * len(ROWS) + 64), "window of 2147483648 bytes"),
        (frame(24, 64 * len(ROWS) + 64), "window of 16777216 bytes"),
        (frame(20, 1 << 40), "declares 1099511627776 bytes"),
        (frame(20, None), "no content size"),
        (b"", "no zstd frame"),
        (b"\x50\x2a\x4d\x18" + bytes(8), "skippable"),
        (bytes(100), "wrong magic"),
        (frame(20, 64 * len(ROWS) + 64, b"\x07\x00\x00"), "reserved type"),
        (frame(20, 64 * len(ROWS) + 64, b"\xff\xff\xff"), "block of"),
        (frame(20, 64 * len(ROWS) + 64, b"\x00\x00\x00" * 50), "more than"),
        (frame(20, 64 * len(ROWS) + 64), "damaged zstd frame"),
    ],
)
def test_hostile_frames(stored: bytes, words: str) -> None:
    raw_bytes = 64 * len(ROWS) + 64
    if not stored:
        made = GOOD.with_index(stored, raw_bytes)
        made = replace(made, manifest=replace(made.manifest, index=replace(made.manifest.index, bytes=0)))
        refused(made)
        return
    tracemalloc.start()
    error = refused(GOOD.with_index(stored, raw_bytes))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert words in str(error)
    assert peak < 1 << 20


def test_two_frames_and_trailing_bytes() -> None:
    for more in (b"\0", GOOD.index, b"\x50\x2a\x4d\x18" + bytes(4), zstandard.compress(b"")):
        assert "follow the zstd frame" in str(refused(GOOD.with_index(GOOD.index + more, len(GOOD.table))))


def test_sizes_are_bounded_before_anything_is_allocated() -> None:
    """The manifest reader refuses these too; the index must not rely on it."""
    for raw_bytes in (63, 1 << 29, 1 << 40, len(GOOD.table) + (1 << 20)):
        made = GOOD.with_index(GOOD.index, raw_bytes)
        tracemalloc.start()
        refused(made)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()
    bomb = zstandard.compress(bytes(1 << 20))
    refused(GOOD.with_index(bomb, 1 << 20))


# -- mutations, signed again --------------------------------------------------------------------------------

Mutation = Callable[[bytearray], None]


def outcome(made: Sample) -> Index | None:
    try:
        return Index.decode(made.index, made.manifest)
    except (ImageCorrupt, UnsupportedImage):
        return None


def second_accepts(made: Sample) -> bool:
    try:
        parse_index(made.index, parse_manifest(made.manifest.encode()))
    except Refused:
        return False
    return True


def test_each_byte_of_the_table_matters() -> None:
    """Any bit of the table flipped, and the index signed again: refused, or only a checksum differs.

    Those are found when the chunk is read; in a raw chunk and a zero chunk even they contradict each other.
    """
    table = GOOD.table
    chance = random.Random(2)
    accepted = 0
    for position in range(len(table)):
        flipped = bytearray(table)
        flipped[position] ^= 1 << chance.randrange(8)
        made = GOOD.with_table(flipped)
        index = outcome(made)
        if index is None:
            continue
        accepted += 1
        within = (position - ROWS_AT) % 64
        harmless = 60 <= position < 64  # the header's CRC is computed anew
        checksum = position < PLANES_AT and 40 <= within < 48
        # The codec's level is information; another codec is found when the block is read, or refused then.
        codec = position >= PLANES_AT and (position - PLANES_AT) % 24 in (0, 1)
        offset = position < PLANES_AT and 24 <= within < 32  # into room that no chunk has
        assert harmless or checksum or codec or offset, f"byte {position}"
    assert accepted < len(table) // 8


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_both_readers_agree_on_damaged_tables(data: st.DataObject) -> None:
    table = GOOD.table
    for _ in range(data.draw(st.integers(1, 3))):
        row = data.draw(st.integers(0, len(ROWS) - 1))
        field = data.draw(st.sampled_from(sorted(FIELDS)))
        form, at = FIELDS[field]
        width = struct.calcsize(form)
        value = data.draw(
            st.sampled_from([0, 1, 2, 4096, CHUNK, CHUNK - 1, 2 ** (8 * width) - 1])
            | st.integers(0, 2 ** (8 * width) - 1)
        )
        struct.pack_into(form, table, ROWS_AT + 64 * row + at, value % 2 ** (8 * width))
    made = GOOD.with_table(table)
    try:
        found = Index.decode(made.index, made.manifest)
    except UnsupportedImage:
        assert not second_accepts(made)
        return
    except ImageCorrupt:
        assert not second_accepts(made)
        return
    assert second_accepts(made)
    assert len(list(found.rows())) == len(ROWS)


@given(st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_noise_is_refused(noise_bytes: bytes) -> None:
    assert outcome(GOOD.with_index(noise_bytes, len(GOOD.table))) is None
    assert outcome(GOOD.with_table(noise_bytes)) is None


def test_an_index_of_another_image_is_refused() -> None:
    other = make_sample({"files/a": text(CHUNK, 8)}, compress="zstd:1")
    refused(GOOD.with_index(other.index, other.manifest.index.raw_bytes))
    assert isinstance(GOOD.manifest, Manifest)
    assert hashlib.sha256(GOOD.index).hexdigest() == GOOD.manifest.index.sha256
