"""Reads a ckptpipe image whose chunks are raw or coded with deflate, with Python's standard library alone.

    python zlib_reader.py IMAGE_DIRECTORY TARGET_DIRECTORY

Written from FORMAT.md as somebody would who has an image, zlib and nothing else: no ckptpipe, no zstandard. It reads
what it is given and checks what keeps it from reading nonsense; `second_reader` refuses everything that FORMAT.md does.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def crc32c_table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [value >> 1 ^ (0x82F63B78 if value & 1 else 0) for value in table]
    return table


TABLE = crc32c_table()


def crc32c(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ TABLE[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


def inflate(stored: bytes, size: int) -> bytes:
    """One raw RFC 1951 stream that gives exactly ``size`` bytes, and nothing behind it."""
    decoder = zlib.decompressobj(-15)
    raw = decoder.decompress(stored, size + 1)
    if len(raw) != size or not decoder.eof or decoder.unused_data:
        raise ValueError(f"a deflate stream of {len(stored)} bytes does not give {size}")
    return raw


def read_manifest(image: Path) -> dict[str, Any]:
    data = (image / "manifest.json").read_bytes()
    before, tail = data[:-82], data[-82:]
    if tail != b',\n "sha256": "' + hashlib.sha256(before).hexdigest().encode() + b'"\n}\n':
        raise ValueError("the manifest is torn")
    manifest = json.loads(data)
    if manifest["length"] != len(data) or (manifest["format"], manifest["version"]) != ("ckptpipe-image", 1):
        raise ValueError("not an image of version 1")
    if manifest["features_required"]:
        raise ValueError(f"features {manifest['features_required']}")
    return dict(manifest)


def read_index(image: Path, manifest: dict[str, Any]) -> bytes:
    entry = manifest["index"]
    stored = (image / entry["name"]).read_bytes()
    if hashlib.sha256(stored).hexdigest() != entry["sha256"]:
        raise ValueError("the index is not the manifest's")
    if entry["compression"] != "deflate":
        raise ValueError(
            f"the index is packed with {entry['compression']}: some chunks are coded with it too"
        )
    table = inflate(stored, entry["raw_bytes"])
    if table[:8] != b"CKPTIDX1" or crc32c(table[:60]) != int.from_bytes(table[60:64], "little"):
        raise ValueError("no index")
    return table


def planes_of(table: bytes, at: int, count: int) -> Iterator[tuple[int, int, int, int, tuple[int, ...]]]:
    """(codec, block size, raw, stored, block lengths) of each plane."""
    for _ in range(count):
        codec, _, _, block, raw, stored, blocks = struct.unpack_from("<BbHIIII", table, at)
        lengths = struct.unpack_from(f"<{blocks}I", table, at + 20)
        at += 20 + 4 * blocks
        yield codec, block, raw, stored, lengths


def decode(table: bytes, planes_at: int, count: int, stored: bytes, raw_bytes: int) -> bytes:
    """A coded chunk: its planes one behind the other, merged by position."""
    raw = bytearray(raw_bytes)
    at = 0
    for plane, (codec, block, size, stored_size, lengths) in enumerate(planes_of(table, planes_at, count)):
        part = stored[at : at + stored_size]
        at += stored_size
        if codec == 2:
            coded, part, start = part, b"", 0
            for length in lengths:
                part += inflate(coded[start : start + length], min(block, size - len(part)))
                start += length
        elif codec != 0:
            raise ValueError(f"codec {codec} is not for zlib")
        raw[plane::count] = part
    return bytes(raw)


def read_image(image: Path) -> Iterator[tuple[str, int, bytes]]:
    """(stream, offset, bytes) of every chunk, each checked against both its checksums."""
    manifest = read_manifest(image)
    table = read_index(image, manifest)
    rows = struct.unpack_from("<Q", table, 16)[0]
    for number in range(rows):
        row = struct.unpack_from("<IHBBQIHHQIIIIQQ", table, 64 + 64 * number)
        stream, flags, transform, planes, chunk, data, _, _, offset, stored_bytes, raw_bytes = row[:11]
        stored_crc, raw_crc, planes_at = row[11:14]
        if flags & ~1 or transform > 2:
            raise ValueError(f"row {number} is of a later version")
        if flags:
            raw = bytes(raw_bytes)
        else:
            with (image / manifest["objects"][data]["name"]).open("rb") as file:
                file.seek(offset)
                stored = file.read(stored_bytes)
            if crc32c(stored) != stored_crc:
                raise ValueError(f"the stored bytes of row {number} are damaged")
            raw = decode(table, 64 + 64 * rows + planes_at, planes, stored, raw_bytes) if planes else stored
        if len(raw) != raw_bytes or crc32c(raw) != raw_crc:
            raise ValueError(f"the bytes of row {number} are not what was saved")
        yield manifest["streams"][stream]["name"], chunk * manifest["chunk_bytes"], raw


def main(image: str, target: str) -> None:
    for name, offset, raw in read_image(Path(image)):
        path = Path(target, *(part for part in name.split("/") if part not in ("", ".", "..")))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if path.exists() else "wb") as file:
            file.seek(offset)
            file.write(raw)


if __name__ == "__main__":
    main(*sys.argv[1:])
