"""A second reader of ckptpipe images, written from FORMAT.md alone: nothing of ckptpipe is imported.

It is what FORMAT.md promises to be enough for, and what the tests compare the first reader and the writer
with. Standard library and `zstandard` only; slow (CRC32C by table), and it reads whole images into memory.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zstandard

TAIL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n\}\n', re.DOTALL)
LENGTH = re.compile(rb',\n "length": ([1-9][0-9]*)\Z')
SAVE_ID = r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{12}"
HEADER = "<8sIIQQII20sI"
ROW = "<IHBBQIHHQIIIIQQ"
PLANE = "<BbHIIII"
BLOCK_MAX = {1: 64 << 20, 2: 4 << 20, 3: 1 << 20, 4: 64 << 10, 5: 4 << 20, 6: 4 << 20, 7: 4 << 20}


class Refused(Exception):
    """The image is damaged, hostile or of a version that this reader does not know."""


def require(condition: object, what: str) -> None:
    if not condition:
        raise Refused(what)


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value = (value >> 8) ^ _TABLE[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


def check_seal(data: bytes) -> None:
    require(len(data) <= 64 << 20, "manifest too large")
    tail = TAIL.fullmatch(data[-82:])
    require(tail, "manifest torn")
    assert tail is not None
    before = data[:-82]
    require(hashlib.sha256(before).hexdigest().encode() == tail[1], "manifest hash")
    length = LENGTH.search(before[-64:])
    require(length and int(length[1]) == len(data), "manifest length")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    require(len(dict(pairs)) == len(pairs), "repeated key")
    return dict(pairs)


def whole(value: Any, low: int, high: int) -> int:
    require(type(value) is int and low <= value <= high, f"number {value!r}")
    return int(value)


def parse_manifest(data: bytes) -> dict[str, Any]:
    check_seal(data)
    manifest = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    require(manifest["format"] == "ckptpipe-image" and manifest["version"] == 1, "format or version")
    require(manifest["features_required"] == [], "features")
    require(re.fullmatch(SAVE_ID, manifest["save_id"]), "save id")
    step = whole(manifest["chunk_bytes"], 4096, 64 << 20)
    require(step % 4096 == 0, "chunk_bytes")
    whole(manifest["stripes"], 1, 1024)
    seen: set[str] = set()
    leaves: set[bytes] = set()
    for stream in manifest["streams"]:
        size = whole(stream["bytes"], 0, 2**63 - 1)
        require(stream["chunks"] == (size + step - 1) // step, "chunks of a stream")
        leaves.add(check_name(stream["name"], stream["kind"]))
        require(stream["name"] not in seen, "stream twice")
        seen.add(stream["name"])
    directories = set()
    for entry in manifest["tree"]:
        path = b"files/" + check_path(entry["path"])
        require(path not in leaves and path not in directories, "path twice")
        if entry["kind"] == "symlink":
            leaves.add(path)
            require(0 < len(unescape(entry["target"])) <= 4095, "target")
        else:
            require(entry["kind"] == "directory", "kind of tree entry")
            directories.add(path)
    for path in leaves | directories:
        for end in (at for at, byte in enumerate(path) if byte == 0x2F):
            require(path[:end] not in leaves, "path below a file or link")
    for entry in manifest["objects"]:
        match = re.fullmatch(rf"data-{SAVE_ID}-(0|[1-9][0-9]*)-(0|[1-9][0-9]*)", entry["name"])
        require(match and (entry["lane"], entry["number"]) == (int(match[1]), int(match[2])), "object name")
        require(whole(entry["bytes"], 0, 2**56) % 4096 == 0, "object size")
    names = [entry["name"] for entry in manifest["objects"]]
    require(len(set(names)) == len(names), "object twice")
    totals = manifest["totals"]
    require(totals["raw_bytes"] == sum(stream["bytes"] for stream in manifest["streams"]), "raw_bytes")
    require(totals["chunks"] == sum(stream["chunks"] for stream in manifest["streams"]), "chunks")
    require(totals["stored_bytes"] == sum(entry["bytes"] for entry in manifest["objects"]), "stored_bytes")
    return dict(manifest)


def escape(raw: bytes) -> str:
    text = raw.decode("utf-8", "surrogateescape")
    made = ""
    for character in text:
        point = ord(character)
        if character == "%" or point < 0x20 or 0x7F <= point <= 0x9F or point in (0x2028, 0x2029):
            made += "".join(f"%{byte:02X}" for byte in character.encode())
        elif 0xDC80 <= point <= 0xDCFF:
            made += f"%{point - 0xDC00:02X}"
        else:
            made += character
    return made


def unescape(name: str) -> bytes:
    raw = re.sub(rb"%([0-9A-F]{2})", lambda match: bytes([int(match[1], 16)]), name.encode("utf-8"))
    require(escape(raw) == name, f"spelling of {name!a}")
    require(b"\0" not in raw, "NUL")
    return raw


def check_path(name: str) -> bytes:
    require(0 < len(name.encode("utf-8")) <= 4096, "length of a name")
    raw = unescape(name)
    for component in raw.split(b"/"):
        require(component not in (b"", b".", b"..") and len(component) <= 255, f"component {component!r}")
    return raw


def check_name(name: str, kind: str) -> bytes:
    raw = check_path(name)
    forms = {
        "file": r"files/.+",
        "buffer": r"host/.+",
        "stdin": r"host/.+",
        "gpu": r"device/.+|proc/(0|[1-9][0-9]{0,5})/gpu/[A-Za-z0-9-]{1,64}",
        "driver": r"proc/(0|[1-9][0-9]{0,5})/driver/(0|[1-9][0-9]{0,5})",
    }
    require(kind in forms and re.fullmatch(forms[kind], name, re.DOTALL | re.ASCII), f"{kind} {name!a}")
    return raw


def zstd_frame(data: bytes, raw_size: int, window: int) -> bytes:
    """Decode exactly one frame of a known size."""
    try:
        facts = zstandard.get_frame_parameters(data)
        require(facts.content_size == raw_size, "content size of a frame")
        require(facts.dict_id == 0 and facts.window_size <= window, "dictionary or window of a frame")
        decoder = zstandard.ZstdDecompressor(max_window_size=window).decompressobj()
        raw = decoder.decompress(data)
    except zstandard.ZstdError as error:
        raise Refused(f"zstd: {error}") from error
    require(decoder.eof and not decoder.unused_data and len(raw) == raw_size, "frame cut short or followed")
    return raw


def deflate_stream(data: bytes, raw_size: int) -> bytes:
    """Decode exactly one raw RFC 1951 stream of a known size."""
    decoder = zlib.decompressobj(-15)
    try:
        raw = decoder.decompress(data, raw_size + 1)
    except zlib.error as error:
        raise Refused(f"deflate: {error}") from error
    require(decoder.eof and not decoder.unused_data and len(raw) == raw_size, "stream cut short or followed")
    return raw


def parse_index(
    stored: bytes, manifest: dict[str, Any], crc: Callable[[bytes], int] = crc32c
) -> list[dict[str, Any]]:
    entry = manifest["index"]
    require(entry["name"] == f"index-{manifest['save_id']}", "index name")
    require(entry["compression"] in ("zstd", "deflate"), "index compression")
    require(len(stored) == entry["bytes"], "index size")
    require(hashlib.sha256(stored).hexdigest() == entry["sha256"], "index hash")
    raw_bytes = whole(entry["raw_bytes"], 64, min(512 << 20, 256 * entry["bytes"] + (1 << 20)))
    if entry["compression"] == "zstd":
        table = zstd_frame(stored, raw_bytes, 8 << 20)
    else:
        table = deflate_stream(stored, raw_bytes)
    magic, version, row_size, count, plane_size, streams, step, zeros, header_crc = struct.unpack(
        HEADER, table[:64]
    )
    require(magic == b"CKPTIDX1" and version == 1 and row_size == 64, "index header")
    require(crc(table[:60]) == header_crc and zeros == bytes(20), "index header checksum")
    require(64 + 64 * count + plane_size == len(table), "index length")
    require(count == entry["rows"] == manifest["totals"]["chunks"], "index rows")
    require(streams == len(manifest["streams"]) and step == manifest["chunk_bytes"], "index streams")
    area = table[64 + 64 * count :]
    rows = []
    zero_crcs: dict[int, int] = {}
    at = 0
    expected = ((s, c) for s, stream in enumerate(manifest["streams"]) for c in range(stream["chunks"]))
    for number, place in enumerate(expected):
        (stream, flags, transform, planes, chunk, obj, lane, zero1, offset, stored_size, raw, stored_crc) = (
            fields := struct.unpack_from(ROW, table, 64 + 64 * number)
        )[:12]
        raw_crc, plane_offset, zero2 = fields[12:]
        require((stream, chunk) == place, "order of rows")
        require(raw == min(step, manifest["streams"][stream]["bytes"] - chunk * step), "raw length")
        require(zero1 == zero2 == 0 and flags in (0, 1), "reserved fields or flags")
        require(transform in (0, 1, 2), "transform")
        row: dict[str, Any] = {"stream": stream, "chunk": chunk, "raw": raw, "raw_crc": raw_crc, "planes": []}
        row |= {"zero": flags == 1, "transform": transform, "stored_crc": stored_crc}
        row |= {"object": obj, "offset": offset, "stored": stored_size}
        if flags == 1:
            require(not any((transform, planes, obj, lane, offset, stored_size, stored_crc)), "zero row")
            require(plane_offset == 0, "zero row")
            if raw not in zero_crcs:
                zero_crcs[raw] = crc(bytes(raw))
            require(raw_crc == zero_crcs[raw], "checksum of a zero row")
        else:
            require(obj < len(manifest["objects"]), "object")
            where = manifest["objects"][obj]
            require(lane == where["lane"] and offset % 4096 == 0, "lane or offset")
            require(0 < stored_size <= raw, "stored length")
            require(offset + (stored_size + 4095) // 4096 * 4096 <= where["bytes"], "end of object")
            if planes == 0:
                require(stored_size == raw and raw_crc == stored_crc, "raw row")
                require(transform == 0 and plane_offset == 0, "raw row")
            else:
                require(plane_offset == at and planes == (1, 2, 4)[transform], "plane records")
                for _ in range(planes):
                    require(at + 20 <= plane_size, "plane area")
                    codec, level, zero, block, plane_raw, plane_stored, blocks = struct.unpack_from(
                        PLANE, area, at
                    )
                    at += 20
                    require(zero == 0 and at + 4 * blocks <= plane_size, "plane record")
                    lengths = struct.unpack_from(f"<{blocks}I", area, at)
                    at += 4 * blocks
                    if codec == 0:
                        require(level == block == blocks == 0 and plane_raw == plane_stored, "raw plane")
                    else:
                        require(0 < min(plane_raw, 4096) <= block <= plane_raw, "block size")
                        require(blocks == (plane_raw + block - 1) // block, "number of blocks")
                        require(0 not in lengths and sum(lengths) == plane_stored, "block lengths")
                        require(plane_stored <= plane_raw, "a plane that grew")
                        require(codec in BLOCK_MAX and block <= BLOCK_MAX[codec], "codec, or size of a block")
                    position = len(row["planes"])
                    require(plane_raw == (raw - position + planes - 1) // planes, "length of a plane")
                    row["planes"].append((codec, block, plane_raw, plane_stored, lengths))
                require(sum(plane[2] for plane in row["planes"]) == raw, "raw length of planes")
                require(sum(plane[3] for plane in row["planes"]) == stored_size, "stored length of planes")
        rows.append(row)
    require(at == plane_size and len(rows) == count, "end of the plane area")
    require(sum(row["zero"] for row in rows) == manifest["totals"]["zero_chunks"], "zero chunks")
    taken: dict[int, int] = {}
    for row in sorted(
        (row for row in rows if not row["zero"]), key=lambda row: (row["object"], row["offset"])
    ):
        require(row["offset"] >= taken.get(row["object"], 0), "overlap")
        taken[row["object"]] = row["offset"] + (row["stored"] + 4095) // 4096 * 4096
    return rows


def decode_chunk(row: dict[str, Any], stored: bytes) -> bytes:
    if not row["planes"]:
        return stored
    width = len(row["planes"])
    raw = bytearray(row["raw"])
    at = 0
    for position, (codec, block, plane_raw, _, lengths) in enumerate(row["planes"]):
        if codec == 0:
            plane, at = stored[at : at + plane_raw], at + plane_raw
        else:
            require(codec in (1, 2), f"codec {codec} needs a GPU")
            plane = b""
            for length in lengths:
                size = min(block, plane_raw - len(plane))
                coded = stored[at : at + length]
                plane += zstd_frame(coded, size, 64 << 20) if codec == 1 else deflate_stream(coded, size)
                at += length
        raw[position::width] = plane
    return bytes(raw)


def read_image(*directories: str | Path, crc: Callable[[bytes], int] = crc32c) -> dict[str, bytes]:
    """Every stream of the image that lies in these directories (the stripes in order), checked."""
    roots = [Path(directory) for directory in directories]
    manifest = parse_manifest((roots[0] / "manifest.json").read_bytes())
    rows = parse_index((roots[0] / manifest["index"]["name"]).read_bytes(), manifest, crc)
    paths = []
    for entry in manifest["objects"]:
        path = roots[0] / entry["name"]
        if len(roots) > 1:
            path = roots[entry["lane"] % manifest["stripes"]] / entry["name"]
        require(path.stat().st_size == entry["bytes"], f"size of {entry['name']}")
        paths.append(path)
    streams = {number: bytearray(entry["bytes"]) for number, entry in enumerate(manifest["streams"])}
    for row in rows:
        if row["zero"]:
            raw = bytes(row["raw"])
        else:
            with paths[row["object"]].open("rb") as file:
                file.seek(row["offset"])
                stored = file.read(row["stored"])
            require(
                len(stored) == row["stored"] and crc(stored) == row["stored_crc"], f"stored bytes of {row}"
            )
            raw = decode_chunk(row, stored)
        require(len(raw) == row["raw"], f"raw length of {row}")
        require(row["zero"] or crc(raw) == row["raw_crc"], f"raw bytes of {row}")
        at = row["chunk"] * manifest["chunk_bytes"]
        streams[row["stream"]][at : at + len(raw)] = raw
    return {entry["name"]: bytes(streams[number]) for number, entry in enumerate(manifest["streams"])}
