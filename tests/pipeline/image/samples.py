"""Small images made in memory, and the means to damage them and sign them again as an attacker would."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import zstandard

from ckptpipe.pipeline.codecs import Encoding, parse_compress, parse_transform
from ckptpipe.pipeline.codecs.chunk_codec import ChunkCodec, Encoded
from ckptpipe.pipeline.image import (
    ChunkRecord,
    IndexBuilder,
    IndexEntry,
    Manifest,
    ObjectEntry,
    StreamEntry,
    Totals,
    TreeEntry,
    Writer,
    chunk_count,
    layout,
    zero_record,
)
from ckptpipe.pipeline.image.seal import seal
from ckptpipe.pyx.checksum import crc32c

SAVE_ID = "20260131T235959Z-0123456789ab"
CHUNK = 8192


@dataclass
class Sample:
    """An image: its manifest, its index object, its data objects by name."""

    manifest: Manifest
    index: bytes
    objects: dict[str, bytes]

    def store(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        for name, data in self.objects.items():
            (directory / name).write_bytes(data)
        (directory / self.manifest.index.name).write_bytes(self.index)
        (directory / "manifest.json").write_bytes(self.manifest.encode())
        return directory

    @property
    def table(self) -> bytearray:
        """The unpacked index."""
        if self.manifest.index.compression == "deflate":
            return bytearray(zlib.decompress(self.index, -15))
        return bytearray(zstandard.ZstdDecompressor().decompress(self.index))

    def with_table(self, table: bytes, *, header: bool = True) -> Sample:
        """The same image with another index, signed again (its header too, unless told)."""
        made = bytearray(table)
        if header and len(made) >= 64:
            made[60:64] = crc32c(made[:60]).to_bytes(4, "little")
        if self.manifest.index.compression == "deflate":
            return self.with_index(zlib.compress(made, wbits=-15), len(made))
        return self.with_index(zstandard.ZstdCompressor(level=3).compress(bytes(made)), len(made))

    def with_index(self, stored: bytes, raw_bytes: int) -> Sample:
        entry = replace(
            self.manifest.index,
            bytes=len(stored),
            raw_bytes=raw_bytes,
            sha256=hashlib.sha256(stored).hexdigest(),
        )
        return Sample(replace(self.manifest, index=entry), stored, self.objects)


def make_sample(
    streams: Mapping[str, bytes],
    *,
    chunk_bytes: int = CHUNK,
    compress: str = "none",
    lanes: int = 1,
    tree: tuple[TreeEntry, ...] = (),
    stripes: int = 1,
    transform: str = "none",
    block_bytes: int = 0,
) -> Sample:
    choice = parse_compress(compress)
    objects = [bytearray() for _ in range(lanes)]
    builder = IndexBuilder(chunk_bytes)
    turn = 0
    for number, data in enumerate(streams.values()):
        for chunk in range(chunk_count(len(data), chunk_bytes)):
            raw = data[chunk * chunk_bytes : (chunk + 1) * chunk_bytes]
            raw_crc = crc32c(raw)
            if not any(raw):
                builder.add(zero_record(number, chunk, len(raw), raw_crc))
                continue
            encoded_chunk, stored = squeeze(Encoding(choice, parse_transform(transform), block_bytes), raw)
            stored = stored or raw
            lane = turn % lanes
            turn += 1
            builder.add(
                ChunkRecord(
                    number,
                    chunk,
                    len(raw),
                    raw_crc,
                    lane,
                    lane,
                    len(objects[lane]),
                    len(stored),
                    crc32c(stored),
                    transform=encoded_chunk.transform,
                    planes=encoded_chunk.planes,
                )
            )
            objects[lane] += stored + bytes(-len(stored) % 4096)
    encoded = builder.encode([chunk_count(len(data), chunk_bytes) for data in streams.values()])
    entries = tuple(stream_entry(name, data, chunk_bytes) for name, data in streams.items())
    stored_objects = {layout.data_name(SAVE_ID, lane, 0): bytes(data) for lane, data in enumerate(objects)}
    manifest = Manifest(
        save_id=SAVE_ID,
        name="sample",
        created="2026-01-31T23:59:59Z",
        writer=Writer("ckptpipe", "0.1.0"),
        chunk_bytes=chunk_bytes,
        index=IndexEntry(
            layout.index_name(SAVE_ID),
            len(encoded.stored),
            encoded.raw_bytes,
            encoded.sha256,
            encoded.rows,
            encoded.compression,
        ),
        objects=tuple(
            ObjectEntry(name, lane, 0, len(data), crc32c(data))
            for lane, (name, data) in enumerate(stored_objects.items())
        ),
        streams=entries,
        totals=Totals(
            sum(entry.bytes for entry in entries),
            sum(map(len, stored_objects.values())),
            encoded.rows,
            encoded.zero_chunks,
        ),
        tree=tree,
        stripes=stripes,
        codec={"name": choice.name, "level": choice.level},
        source={"kind": "files", "seconds": 1.5},
    )
    return Sample(manifest, encoded.stored, stored_objects)


def stream_entry(name: str, data: bytes, chunk_bytes: int) -> StreamEntry:
    kind = {"files": "file", "host": "buffer"}.get(name.split("/")[0]) or name.split("/")[2]
    chunks = chunk_count(len(data), chunk_bytes)
    if kind == "file":
        return StreamEntry(name, len(data), chunks, "file", 0o640, 1_700_000_000_123_456_789, sparse=True)
    return StreamEntry(name, len(data), chunks, kind)  # type: ignore[arg-type]


def squeeze(encoding: Encoding, raw: bytes) -> tuple[Encoded, bytes]:
    """Encoded, or nothing where that gains less than 5 %."""
    room = bytearray(len(raw) * 95 // 100)
    made = ChunkCodec().encode(encoding, memoryview(raw), memoryview(room))
    return made, bytes(room[: made.stored_bytes])


def fields_of(manifest: Manifest) -> dict[str, Any]:
    """The manifest's JSON without its seal, to be changed and given to `sign`."""
    fields = json.loads(manifest.encode())
    del fields["length"], fields["sha256"]
    return dict(fields)


def sign(fields: Mapping[str, Any]) -> bytes:
    return sign_text(json.dumps(fields, indent=1, ensure_ascii=False))


def sign_text(text: str) -> bytes:
    """Seal any JSON object's text, as somebody would who can compute SHA-256."""
    return seal(text.rstrip()[:-1].rstrip().encode("utf-8", "surrogatepass"))


def changed(manifest: Manifest, change: Callable[[dict[str, Any]], object]) -> bytes:
    fields = fields_of(manifest)
    change(fields)
    return sign(fields)


def noise(nbytes: int, seed: int) -> bytes:
    """Bytes that do not compress, the same on every run."""
    made = bytearray()
    block = seed.to_bytes(8, "little")
    while len(made) < nbytes:
        block = hashlib.sha256(block).digest()
        made += block
    return bytes(made[:nbytes])


def text(nbytes: int, seed: int) -> bytes:
    """Bytes that compress to about half."""
    return noise(nbytes, seed).hex().encode()[:nbytes]


STREAMS = {
    "files/weights.bin": noise(CHUNK * 2 + 5, 1),
    "files/dir/text": text(CHUNK * 3, 2),
    "files/dir/zeros": bytes(CHUNK * 2 + 1),
    "files/empty": b"",
    "files/ein%25 %C3name\u00e4": b"x",
    "host/buffer": text(CHUNK + 4097, 3) + bytes(CHUNK),
    "proc/0/gpu/GPU-0123": noise(100, 4),
    "proc/0/driver/1": text(9000, 5),
}
TREE = (
    TreeEntry("dir", "directory", 0o750, mtime_ns=-5),
    TreeEntry("dir/link", "symlink", target="../../etc/passwd"),
    TreeEntry("void", "directory", 0o700),
)


def sample(compress: str = "zstd:3", **options: Any) -> Sample:
    return make_sample(STREAMS, compress=compress, tree=TREE, **options)
