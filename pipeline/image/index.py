"""The chunk table of an image as a reader sees it: checked whole, once, then read row by row."""

from __future__ import annotations

import hashlib
import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ckptpipe.pipeline.codecs import CODEC_NAMES, Codec
from ckptpipe.pipeline.codecs.deflate import DeflateCodec
from ckptpipe.pipeline.codecs.zstd import ZstdCodec
from ckptpipe.pipeline.codecs.zstd_frame import read_frame
from ckptpipe.pipeline.errors import ImageCorrupt, ImageIncomplete, UnsupportedImage
from ckptpipe.pipeline.image.index_audit import UPGRADE, Audit, refuse
from ckptpipe.pipeline.image.index_limits import INDEX_WINDOW_MAX, check_index_sizes
from ckptpipe.pipeline.image.manifest import Manifest
from ckptpipe.pipeline.image.records import (
    HEADER,
    MAGIC,
    PLANE,
    ROW,
    VERSION,
    ChunkFlags,
    ChunkRecord,
    PlaneRecord,
    planes_bound,
)
from ckptpipe.pipeline.image.strict_json import CURE
from ckptpipe.pyx.checksum import crc32c

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
        self.table = table
        self.planes_at = HEADER.size + rows * ROW.size
        first = array("Q", [0])
        for stream in manifest.streams:
            first.append(first[-1] + stream.chunks)
        self._first = first
        self.first_chunks: dict[int, dict[int, int]] = {}
        """By codec and stream: the first chunk that the codec is in."""

    @staticmethod
    def decode(stored: bytes, manifest: Manifest) -> Index:
        """The index object's bytes, checked against ``manifest``.

        ImageIncomplete where the object is too short, ImageCorrupt where it is not what was saved or
        contradicts the manifest or itself, UnsupportedImage for a codec, transform or flag not known here.
        """
        table = _unpack(stored, manifest)
        rows = _check_header(table, manifest)
        index = Index(table, manifest, rows)
        Audit(index, manifest).run()
        return index

    def __len__(self) -> int:
        return self._first[-1]

    @property
    def has_coded(self) -> bool:
        """Whether any chunk is coded."""
        return len(self.table) > self.planes_at

    def row(self, stream: int, chunk: int) -> ChunkRecord:
        """One row. IndexError where there is no such stream or chunk."""
        if not 0 <= stream < len(self._first) - 1:
            raise IndexError(f"no stream {stream}")
        number = self._first[stream] + chunk
        if not self._first[stream] <= number < self._first[stream + 1]:
            raise IndexError(f"stream {stream} has no chunk {chunk}")
        return self._record(ROW.unpack_from(self.table, HEADER.size + number * ROW.size))

    def rows(self, stream: int | None = None) -> Iterator[ChunkRecord]:
        """The rows of a stream (of all streams) in order, each made when it is asked for."""
        if stream is None:
            start, stop = 0, self._first[-1]
        else:
            start, stop = self._first[stream], self._first[stream + 1]
        with memoryview(self.table) as view:
            with view[HEADER.size + start * ROW.size : HEADER.size + stop * ROW.size] as part:
                for values in ROW.iter_unpack(part):
                    yield self._record(values)

    def by_object(
        self, streams: Sequence[int] | None, objects: int
    ) -> tuple[Iterator[ChunkRecord], list[Iterator[ChunkRecord]]]:
        """The rows of the streams (of all where None): the zero chunks, and those of each of the ``objects``, front to
        back as their bytes lie. Takes 48 bytes a row while it runs."""
        keys = self._keys(streams)
        starts = [bisect_left(keys, number << 96) for number in range(1, objects + 2)]
        return (
            self._records_of(keys, 0, starts[0]),
            [self._records_of(keys, start, stop) for start, stop in pairwise(starts)],
        )

    def _keys(self, streams: Sequence[int] | None) -> list[int]:
        """Sorted numbers that hold object, offset and row number of every row."""
        first = self._first
        chosen = range(len(first) - 1) if streams is None else streams
        table, size, start = self.table, ROW.size, HEADER.size
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
        return keys

    def _records_of(self, keys: Sequence[int], start: int, stop: int) -> Iterator[ChunkRecord]:
        for position in range(start, stop):
            row = HEADER.size + (keys[position] & 0xFFFF_FFFF) * ROW.size
            yield self._record(ROW.unpack_from(self.table, row))

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
            self.plane_records(at, planes) if planes else _EMPTY,
        )

    def plane_records(self, at: int, count: int) -> tuple[PlaneRecord, ...]:
        """Plane records from ``at`` in the plane area. struct.error where the area ends before they do."""
        position = self.planes_at + at
        made = []
        for _ in range(count):
            codec, level, reserved, block_bytes, raw, stored, blocks = PLANE.unpack_from(self.table, position)
            position += PLANE.size
            if reserved:
                raise struct.error("reserved bits are set")
            lengths: tuple[int, ...] = ()
            if blocks:
                if blocks * 4 > len(self.table) - position:
                    raise struct.error("the plane area ends inside its block lengths")
                lengths = struct.unpack_from(f"<{blocks}I", self.table, position)
                position += 4 * blocks
            made.append(PlaneRecord(codec, level, block_bytes, raw, stored, lengths))
        return tuple(made)


def _unpack(stored: bytes, manifest: Manifest) -> bytearray:
    entry = manifest.index
    if len(stored) < entry.bytes:
        raise ImageIncomplete(f"{entry.name}: {len(stored)} bytes where {entry.bytes} belong", cure=CURE)
    if len(stored) > entry.bytes:
        refuse(manifest, f"{len(stored)} bytes where {entry.bytes} belong")
    if hashlib.sha256(stored).hexdigest() != entry.sha256:
        refuse(manifest, "its SHA-256 is not the one in the manifest")
    problem = check_index_sizes(entry.bytes, entry.raw_bytes, entry.rows)
    if problem:
        refuse(manifest, f"raw_bytes {problem}")
    most = HEADER.size + entry.rows * (ROW.size + planes_bound(manifest.chunk_bytes))
    if entry.raw_bytes > most:
        refuse(manifest, f"{entry.raw_bytes} bytes unpacked, {entry.rows} rows take {most} at most")
    with memoryview(stored) as source:
        try:
            codec: Codec = DeflateCodec()
            if entry.compression == "zstd":
                facts = read_frame(source)
                if facts.content_size != entry.raw_bytes:
                    raise ValueError(
                        f"it declares {facts.content_size} bytes, the manifest {entry.raw_bytes}"
                    )
                codec = ZstdCodec(max_window=INDEX_WINDOW_MAX)
            table = bytearray(entry.raw_bytes)
            with memoryview(table) as destination:
                codec.decompress_into(source, destination)
        except ValueError as error:
            raise ImageCorrupt(f"{entry.name}: {error}", cure=CURE) from error
    return table


def _check_header(table: bytearray, manifest: Manifest) -> int:
    if len(table) < HEADER.size:
        refuse(manifest, f"{len(table)} bytes unpacked are no index")
    magic, version, row_bytes, rows, plane_bytes, streams, chunk_bytes, checksum = HEADER.unpack_from(table)
    if magic != MAGIC:
        refuse(manifest, "it does not begin with CKPTIDX1")
    if version != VERSION:
        raise UnsupportedImage(
            f"{manifest.index.name}: index version {version}, this ckptpipe knows version {VERSION}",
            cure=UPGRADE,
        )
    if crc32c(table[: HEADER.size - 4]) != checksum:
        refuse(manifest, "the CRC32C of its header is wrong")
    if any(table[40 : HEADER.size - 4]):
        refuse(manifest, "reserved bytes of its header are set")
    for what, found, wanted in (
        ("row size", row_bytes, ROW.size),
        ("rows", rows, manifest.index.rows),
        ("plane-area size", plane_bytes, len(table) - HEADER.size - manifest.index.rows * ROW.size),
        ("number of streams", streams, len(manifest.streams)),
        ("chunk size", chunk_bytes, manifest.chunk_bytes),
    ):
        if found != wanted:
            refuse(manifest, f"its header gives {found} as {what}, not {wanted}")
    return manifest.index.rows
