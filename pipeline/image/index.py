"""The chunk table of an image as a reader sees it: checked whole, once, then read row by row."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

from ckptpipe.pipeline.codecs import CODEC_NAMES, DECODABLE
from ckptpipe.pipeline.codecs.zstd import ZstdCodec
from ckptpipe.pipeline.codecs.zstd_frame import read_frame
from ckptpipe.pipeline.errors import ImageCorrupt, ImageIncomplete, UnsupportedImage
from ckptpipe.pipeline.image.index_limits import INDEX_WINDOW_MAX, check_index_sizes
from ckptpipe.pipeline.image.manifest import Manifest
from ckptpipe.pipeline.image.records import (
    HEADER,
    MAGIC,
    PLANE,
    ROW,
    TRANSFORM_NAMES,
    VERSION,
    ChunkFlags,
    ChunkRecord,
    PlaneRecord,
    check_planes,
    planes_bound,
)
from ckptpipe.pipeline.image.strict_json import CURE
from ckptpipe.pyx.checksum import crc32c, crc32c_zeros

_UPGRADE = "read it with a newer ckptpipe"
_PLACE = struct.Struct("<I4xQ")  # object and offset of a row, from byte 16
_PLACE_AT, _FLAGS_AT = 16, 4
_EMPTY: tuple[PlaneRecord, ...] = ()


@dataclass(slots=True)
class CodecStatistics:
    """How many chunks are stored one way. ``stored_bytes`` without padding."""

    chunks: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0


class Index:
    """A decoded chunk table: as much memory as its unpacked bytes, no object per chunk.

    Every row has been checked against the manifest: each chunk of each stream is there exactly once, has the
    right raw length, and lies inside an object that the manifest names, apart from every other chunk.
    """

    def __init__(self, table: bytearray, manifest: Manifest, rows: int) -> None:
        self._table = table
        self._planes_at = HEADER.size + rows * ROW.size
        first = array("Q", [0])
        for stream in manifest.streams:
            first.append(first[-1] + stream.chunks)
        self._first = first

    @staticmethod
    def decode(stored: bytes, manifest: Manifest) -> Index:
        """The index object's bytes, checked against ``manifest``.

        ImageIncomplete where the object is too short, ImageCorrupt where it is not what was saved or
        contradicts the manifest or itself, UnsupportedImage for a codec, transform or flag not known here.
        """
        table = _unpack(stored, manifest)
        rows = _check_header(table, manifest)
        index = Index(table, manifest, rows)
        _Audit(index, manifest).run()
        return index

    def __len__(self) -> int:
        return self._first[-1]

    def row(self, stream: int, chunk: int) -> ChunkRecord:
        """One row. IndexError where there is no such stream or chunk."""
        if not 0 <= stream < len(self._first) - 1:
            raise IndexError(f"no stream {stream}")
        number = self._first[stream] + chunk
        if not self._first[stream] <= number < self._first[stream + 1]:
            raise IndexError(f"stream {stream} has no chunk {chunk}")
        return self._record(ROW.unpack_from(self._table, HEADER.size + number * ROW.size))

    def rows(self, stream: int | None = None) -> Iterator[ChunkRecord]:
        """The rows of a stream (of all streams) in order, each made when it is asked for."""
        if stream is None:
            start, stop = 0, self._first[-1]
        else:
            start, stop = self._first[stream], self._first[stream + 1]
        with memoryview(self._table) as view:
            with view[HEADER.size + start * ROW.size : HEADER.size + stop * ROW.size] as part:
                for values in ROW.iter_unpack(part):
                    yield self._record(values)

    def in_storage_order(self, streams: Sequence[int] | None = None) -> Iterator[ChunkRecord]:
        """The rows of the streams (of all where None) as their bytes lie, object by object, front to back;
        zero chunks first. Takes 48 bytes a row while it runs."""
        first = self._first
        chosen = range(len(first) - 1) if streams is None else streams
        table, size, start = self._table, ROW.size, HEADER.size
        keys = []
        for stream in chosen:
            for number in range(first[stream], first[stream + 1]):
                at = start + number * size
                if table[at + _FLAGS_AT] & ChunkFlags.ZERO:
                    keys.append(number)
                else:
                    object_number, offset = _PLACE.unpack_from(table, at + _PLACE_AT)
                    keys.append((object_number + 1) << 96 | offset << 32 | number)
        keys.sort()
        for key in keys:
            yield self._record(ROW.unpack_from(table, start + (key & 0xFFFF_FFFF) * size))

    def statistics(self) -> dict[str, CodecStatistics]:
        """Chunks and bytes by how they are stored: ``zero``, ``none``, ``zstd``, …; several codecs in one
        chunk are joined by ``+``."""
        made: dict[str, CodecStatistics] = {}
        for record in self.rows():
            if record.zero:
                key = "zero"
            elif not record.planes:
                key = "none"
            else:
                key = "+".join(sorted({CODEC_NAMES[plane.codec] for plane in record.planes}))
            entry = made.setdefault(key, CodecStatistics())
            entry.chunks += 1
            entry.raw_bytes += record.raw_bytes
            entry.stored_bytes += record.stored_bytes
        return dict(sorted(made.items()))

    def _record(self, values: tuple[int, ...]) -> ChunkRecord:
        (
            stream,
            flags,
            transform,
            planes,
            chunk,
            number,
            lane,
            _,
            offset,
            stored,
            raw,
            stored_crc,
            raw_crc,
            at,
            _,
        ) = values
        return ChunkRecord(
            stream,
            chunk,
            raw,
            raw_crc,
            number,
            lane,
            offset,
            stored,
            stored_crc,
            flags,
            transform,
            self._plane_records(at, planes) if planes else _EMPTY,
        )

    def _plane_records(self, at: int, count: int) -> tuple[PlaneRecord, ...]:
        """Plane records from ``at`` in the plane area. struct.error where the area ends before they do."""
        position = self._planes_at + at
        made = []
        for _ in range(count):
            codec, level, reserved, block_bytes, raw, stored, blocks = PLANE.unpack_from(
                self._table, position
            )
            position += PLANE.size
            if reserved:
                raise struct.error("reserved bits are set")
            lengths: tuple[int, ...] = ()
            if blocks:
                if blocks * 4 > len(self._table) - position:
                    raise struct.error("the plane area ends inside its block lengths")
                lengths = struct.unpack_from(f"<{blocks}I", self._table, position)
                position += 4 * blocks
            made.append(PlaneRecord(codec, level, block_bytes, raw, stored, lengths))
        return tuple(made)


def _refuse(manifest: Manifest, problem: str) -> NoReturn:
    raise ImageCorrupt(f"{manifest.index.name}: {problem}", cure=CURE)


def _unpack(stored: bytes, manifest: Manifest) -> bytearray:
    entry = manifest.index
    if len(stored) < entry.bytes:
        raise ImageIncomplete(f"{entry.name}: {len(stored)} bytes where {entry.bytes} belong", cure=CURE)
    if len(stored) > entry.bytes:
        _refuse(manifest, f"{len(stored)} bytes where {entry.bytes} belong")
    if hashlib.sha256(stored).hexdigest() != entry.sha256:
        _refuse(manifest, "its SHA-256 is not the one in the manifest")
    problem = check_index_sizes(entry.bytes, entry.raw_bytes, entry.rows)
    if problem:
        _refuse(manifest, f"raw_bytes {problem}")
    most = HEADER.size + entry.rows * (ROW.size + planes_bound(manifest.chunk_bytes))
    if entry.raw_bytes > most:
        _refuse(manifest, f"{entry.raw_bytes} bytes unpacked, {entry.rows} rows take {most} at most")
    with memoryview(stored) as source:
        try:
            facts = read_frame(source)
            if facts.content_size != entry.raw_bytes:
                raise ValueError(f"it declares {facts.content_size} bytes, the manifest {entry.raw_bytes}")
            codec = ZstdCodec(max_window=INDEX_WINDOW_MAX)
            table = bytearray(entry.raw_bytes)
            with memoryview(table) as destination:
                codec.decompress_into(source, destination)
        except ValueError as error:
            raise ImageCorrupt(f"{entry.name}: {error}", cure=CURE) from error
    return table


def _check_header(table: bytearray, manifest: Manifest) -> int:
    if len(table) < HEADER.size:
        _refuse(manifest, f"{len(table)} bytes unpacked are no index")
    magic, version, row_bytes, rows, plane_bytes, streams, chunk_bytes, checksum = HEADER.unpack_from(table)
    if magic != MAGIC:
        _refuse(manifest, "it does not begin with CKPTIDX1")
    if version != VERSION:
        raise UnsupportedImage(
            f"{manifest.index.name}: index version {version}, this ckptpipe knows version {VERSION}",
            cure=_UPGRADE,
        )
    if crc32c(table[: HEADER.size - 4]) != checksum:
        _refuse(manifest, "the CRC32C of its header is wrong")
    if any(table[40 : HEADER.size - 4]):
        _refuse(manifest, "reserved bytes of its header are set")
    for what, found, wanted in (
        ("row size", row_bytes, ROW.size),
        ("rows", rows, manifest.index.rows),
        ("plane-area size", plane_bytes, len(table) - HEADER.size - manifest.index.rows * ROW.size),
        ("number of streams", streams, len(manifest.streams)),
        ("chunk size", chunk_bytes, manifest.chunk_bytes),
    ):
        if found != wanted:
            _refuse(manifest, f"its header gives {found} as {what}, not {wanted}")
    return manifest.index.rows


class _Audit:
    """One pass over a fresh index; every doubt is an exception that names stream and chunk."""

    def __init__(self, index: Index, manifest: Manifest) -> None:
        self.index = index
        self.manifest = manifest
        self.extents = [array("Q") for _ in manifest.objects]  # offset in pages << 16 | pages
        self.planes_end = 0
        self.zero_crcs: dict[int, int] = {}

    def run(self) -> None:
        zeros = 0
        chunk_bytes = self.manifest.chunk_bytes
        table = memoryview(self.index._table)
        try:
            at = HEADER.size
            for stream, entry in enumerate(self.manifest.streams):
                end = at + entry.chunks * ROW.size
                last = entry.chunks - 1
                tail = entry.bytes - last * chunk_bytes
                for chunk, values in enumerate(ROW.iter_unpack(table[at:end])):
                    if values[0] != stream or values[4] != chunk:
                        self.refuse(
                            stream, chunk, f"missing: its row is of chunk {values[4]} of stream {values[0]}"
                        )
                    self.check_row(stream, chunk, values, tail if chunk == last else chunk_bytes)
                    zeros += values[1] & ChunkFlags.ZERO
                at = end
        finally:
            table.release()
        manifest = self.manifest
        if self.planes_end != len(self.index._table) - self.index._planes_at:
            _refuse(manifest, "bytes follow the last plane record")
        if zeros != manifest.totals.zero_chunks:
            _refuse(manifest, f"{zeros} zero chunks, the manifest says {manifest.totals.zero_chunks}")
        self.check_extents()

    def refuse(self, stream: int, chunk: int, problem: str) -> NoReturn:
        _refuse(self.manifest, f"{self.place(stream, chunk)}: {problem}")

    def place(self, stream: int, chunk: int) -> str:
        return f"stream {self.manifest.streams[stream].name!a}, chunk {chunk}"

    def unknown(self, stream: int, chunk: int, what: str) -> NoReturn:
        raise UnsupportedImage(
            f"{self.manifest.index.name}: {self.place(stream, chunk)}: {what}, which this ckptpipe does not know",
            cure=_UPGRADE,
        )

    def check_row(self, stream: int, chunk: int, values: tuple[int, ...], raw_wanted: int) -> None:
        (
            _,
            flags,
            transform,
            planes,
            _,
            number,
            lane,
            reserved,
            offset,
            stored,
            raw,
            stored_crc,
            raw_crc,
            at,
            last,
        ) = values
        if flags & ~ChunkFlags.ZERO:
            self.unknown(stream, chunk, f"flags {flags:#06x}")
        if transform:
            self.unknown(stream, chunk, f"transform {TRANSFORM_NAMES.get(transform, str(transform))}")
        if reserved or last:
            self.refuse(stream, chunk, "reserved bits of its row are set")
        if raw != raw_wanted:
            self.refuse(stream, chunk, f"{raw} raw bytes where {raw_wanted} belong")
        if flags:
            if number or lane or offset or stored or stored_crc or planes or at:
                self.refuse(stream, chunk, "a zero chunk that is stored somewhere")
            if raw not in self.zero_crcs:
                self.zero_crcs[raw] = crc32c_zeros(raw)
            if raw_crc != self.zero_crcs[raw]:
                self.refuse(stream, chunk, "a zero chunk with the checksum of something else")
            return
        if number >= len(self.extents):
            self.refuse(stream, chunk, f"object {number}, the manifest has {len(self.extents)}")
        entry = self.manifest.objects[number]
        if lane != entry.lane:
            self.refuse(stream, chunk, f"lane {lane}, its object is in lane {entry.lane}")
        if offset & 4095:
            self.refuse(stream, chunk, f"offset {offset} is not a multiple of 4096")
        if not 0 < stored <= raw:
            self.refuse(stream, chunk, f"{stored} stored bytes for {raw} raw ones")
        pages = (stored + 4095) >> 12
        if offset + (pages << 12) > entry.bytes:
            self.refuse(
                stream,
                chunk,
                f"bytes {offset} to {offset + stored} of {entry.name}, which has {entry.bytes}",
            )
        self.extents[number].append(offset >> 12 << 16 | pages)
        if planes:
            self.check_planes(stream, chunk, at, planes, raw, stored)
        elif stored != raw or at or stored_crc != raw_crc:
            self.refuse(stream, chunk, "a raw chunk whose stored side is not its raw side")

    def check_planes(self, stream: int, chunk: int, at: int, count: int, raw: int, stored: int) -> None:
        if at != self.planes_end:
            self.refuse(stream, chunk, f"plane records at {at}, not {self.planes_end}")
        if count != 1:
            self.refuse(stream, chunk, f"{count} planes without a transform")
        try:
            planes = self.index._plane_records(at, count)
        except struct.error as error:
            self.refuse(stream, chunk, f"damaged plane records: {error}")
        problem = check_planes(planes, 0, raw, stored)
        if problem:
            self.refuse(stream, chunk, problem)
        for plane in planes:
            self.planes_end += PLANE.size + 4 * len(plane.block_lengths)
            if plane.codec not in DECODABLE:
                self.unknown(stream, chunk, f"codec {CODEC_NAMES.get(plane.codec, str(plane.codec))}")
            if plane.codec and len(plane.block_lengths) != 1:
                self.unknown(
                    stream, chunk, f"{CODEC_NAMES[plane.codec]} in {len(plane.block_lengths)} blocks"
                )

    def check_extents(self) -> None:
        for entry, extents in zip(self.manifest.objects, self.extents, strict=True):
            for first, second in pairwise(sorted(extents)):
                if (first >> 16) + (first & 0xFFFF) > second >> 16:
                    self.refuse_overlap(entry.name, (second >> 16) << 12)

    def refuse_overlap(self, name: str, offset: int) -> NoReturn:
        sharing = [
            self.place(record.stream, record.number)
            for record in self.index.rows()
            if not record.zero
            and self.manifest.objects[record.object].name == name
            and record.offset <= offset < record.offset + record.stored_bytes
        ]
        _refuse(self.manifest, f"{name}: two chunks lie at byte {offset}: {'; '.join(sharing[:3])}")
