"""Images changed behind ckptpipe's back: one bit of their data, or an index that lies with every checksum right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ckptpipe
from ckptpipe.pipeline.image import ChunkRecord, IndexBuilder, IndexEntry, Manifest
from ckptpipe.pipeline.opening import reading
from tests.faults.crafted import flip


def rows(image: Path) -> list[ChunkRecord]:
    async def main() -> list[ChunkRecord]:
        async with reading(str(image), None, ckptpipe.Settings()) as (reader, _):
            return list(reader.index.rows())

    return asyncio.run(main())


def where(image: Path, row: ChunkRecord) -> str:
    """The chunk as messages name it."""
    manifest = Manifest.decode((image / "manifest.json").read_bytes())
    return f"stream {manifest.streams[row.stream].name} chunk {row.number} "


def coded(image: Path, planes: int = 1) -> ChunkRecord:
    """The first chunk of so many planes, the last of which is coded."""
    return next(row for row in rows(image) if len(row.planes) == planes and row.planes[-1].codec)


def flip_stored(image: Path, row: ChunkRecord, at: int) -> None:
    """One bit of a chunk's stored bytes."""
    manifest = Manifest.decode((image / "manifest.json").read_bytes())
    flip(image / manifest.objects[row.object].name, row.offset + at, 3)


def relabel(image: Path, change: Callable[[ChunkRecord], ChunkRecord]) -> None:
    """Write the index anew with other rows, and seal the manifest over it."""
    path = image / "manifest.json"
    manifest = Manifest.decode(path.read_bytes())
    index = IndexBuilder(manifest.chunk_bytes)
    for row in rows(image):
        index.add(change(row))
    encoded = index.encode([stream.chunks for stream in manifest.streams])
    (image / manifest.index.name).write_bytes(encoded.stored)
    entry = IndexEntry(
        manifest.index.name,
        len(encoded.stored),
        encoded.raw_bytes,
        encoded.sha256,
        encoded.rows,
        encoded.compression,
    )
    path.write_bytes(replace(manifest, index=entry).encode())


def other_block_lengths(row: ChunkRecord) -> ChunkRecord:
    """The last plane's blocks end elsewhere; their sum is right."""
    plane = row.planes[-1]
    first, second, *rest = plane.block_lengths
    lied = plane._replace(block_lengths=(first - 5, second + 5, *rest))
    return row._replace(planes=(*row.planes[:-1], lied))


def other_block_size(row: ChunkRecord) -> ChunkRecord:
    """The last plane's blocks are said to be longer: as many, but the first holds less than it should."""
    plane = row.planes[-1]
    lied = plane._replace(block_bytes=plane.block_bytes + 4096)
    return row._replace(planes=(*row.planes[:-1], lied))


def other_codec(row: ChunkRecord) -> ChunkRecord:
    """Deflate is called ans, and ans deflate."""
    plane = row.planes[-1]
    lied = plane._replace(codec={2: 3, 3: 2}[plane.codec], level=0)
    return row._replace(planes=(*row.planes[:-1], lied))


def other_raw_checksum(row: ChunkRecord) -> ChunkRecord:
    return row._replace(raw_crc32c=row.raw_crc32c ^ 1)


def other_stored_checksum(row: ChunkRecord) -> ChunkRecord:
    return row._replace(stored_crc32c=row.stored_crc32c ^ 1)


LIES = (other_block_lengths, other_block_size, other_codec, other_raw_checksum, other_stored_checksum)
