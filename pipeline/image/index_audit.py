"""The check of a fresh index: every row against the manifest, the plane records, and the other rows."""

from __future__ import annotations

import struct
from array import array
from itertools import pairwise
from typing import TYPE_CHECKING, NoReturn

from ckptpipe.pipeline.codecs import CODEC_NAMES
from ckptpipe.pipeline.errors import ImageCorrupt, UnsupportedImage
from ckptpipe.pipeline.image.manifest import Manifest
from ckptpipe.pipeline.image.records import HEADER, PLANE, ROW, TRANSFORMS, ChunkFlags, check_planes
from ckptpipe.pipeline.image.strict_json import CURE
from ckptpipe.pyx.checksum import crc32c_zeros

if TYPE_CHECKING:
    from ckptpipe.pipeline.image.index import Index

UPGRADE = "read it with a newer ckptpipe"


def refuse(manifest: Manifest, problem: str) -> NoReturn:
    raise ImageCorrupt(f"{manifest.index.name}: {problem}", cure=CURE)


class Audit:
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
        table = memoryview(self.index.table)
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
        if self.planes_end != len(self.index.table) - self.index.planes_at:
            refuse(manifest, "bytes follow the last plane record")
        if zeros != manifest.totals.zero_chunks:
            refuse(manifest, f"{zeros} zero chunks, the manifest says {manifest.totals.zero_chunks}")
        self.check_extents()

    def refuse(self, stream: int, chunk: int, problem: str) -> NoReturn:
        refuse(self.manifest, f"{self.place(stream, chunk)}: {problem}")

    def place(self, stream: int, chunk: int) -> str:
        return f"stream {self.manifest.streams[stream].name!a}, chunk {chunk}"

    def unknown(self, stream: int, chunk: int, what: str) -> NoReturn:
        raise UnsupportedImage(
            f"{self.manifest.index.name}: {self.place(stream, chunk)}: {what}, which this ckptpipe does not know",
            cure=UPGRADE,
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
        if transform not in TRANSFORMS:
            self.unknown(stream, chunk, f"transform {transform}")
        if reserved or last:
            self.refuse(stream, chunk, "reserved bits of its row are set")
        if raw != raw_wanted:
            self.refuse(stream, chunk, f"{raw} raw bytes where {raw_wanted} belong")
        if flags:
            if number or lane or offset or stored or stored_crc or planes or at or transform:
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
            self.check_planes(stream, chunk, at, planes, transform, raw, stored)
        elif stored != raw or at or stored_crc != raw_crc or transform:
            self.refuse(stream, chunk, "a raw chunk whose stored side is not its raw side")

    def check_planes(
        self, stream: int, chunk: int, at: int, count: int, transform: int, raw: int, stored: int
    ) -> None:
        if at != self.planes_end:
            self.refuse(stream, chunk, f"plane records at {at}, not {self.planes_end}")
        if count != TRANSFORMS[transform]:
            self.refuse(stream, chunk, f"{count} planes where its transform makes {TRANSFORMS[transform]}")
        try:
            planes = self.index.plane_records(at, count)
        except struct.error as error:
            self.refuse(stream, chunk, f"damaged plane records: {error}")
        for plane in planes:
            if plane.codec not in CODEC_NAMES:
                self.unknown(stream, chunk, f"codec {plane.codec}")
        problem = check_planes(planes, transform, raw, stored)
        if problem:
            self.refuse(stream, chunk, problem)
        for plane in planes:
            self.planes_end += PLANE.size + 4 * len(plane.block_lengths)
            if plane.codec:
                self.index.first_chunks.setdefault(plane.codec, {}).setdefault(stream, chunk)

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
        refuse(self.manifest, f"{name}: two chunks lie at byte {offset}: {'; '.join(sharing[:3])}")
