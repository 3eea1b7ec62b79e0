"""Images made by hand, or changed behind ckptpipe's back: what no save would write."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    zero_record,
)
from ckptpipe.pipeline.image.layout import data_name, index_name, padded
from ckptpipe.pipeline.image.records import PlaneRecord
from ckptpipe.pipeline.image.saveid import new_save_id
from ckptpipe.pipeline.image.seal import seal
from ckptpipe.pyx.checksum import crc32c, crc32c_zeros


@dataclass
class Piece:
    """A stream of one chunk. ``stored`` None: zeros. ``planes``: how ``stored`` is encoded."""

    name: str
    raw_bytes: int
    stored: bytes | None
    raw_crc32c: int = 0
    planes: tuple[PlaneRecord, ...] = ()
    mode: int | None = 0o644
    transform: int = 0


def raw(name: str, data: bytes) -> Piece:
    return Piece(name, len(data), data, crc32c(data))


def craft(image: Path, pieces: Sequence[Piece], tree: Sequence[TreeEntry] = (), chunk: int = 1 << 20) -> Path:
    """Write an image of these pieces, every checksum right."""
    image.mkdir(parents=True)
    save_id = new_save_id()
    index = IndexBuilder(chunk)
    data = b""
    for number, piece in enumerate(pieces):
        if piece.stored is None:
            index.add(zero_record(number, 0, piece.raw_bytes, crc32c_zeros(piece.raw_bytes)))
            continue
        index.add(
            ChunkRecord(
                number,
                0,
                piece.raw_bytes,
                piece.raw_crc32c,
                0,
                0,
                len(data),
                len(piece.stored),
                crc32c(piece.stored),
                0,
                piece.transform,
                piece.planes,
            )
        )
        data += piece.stored.ljust(padded(len(piece.stored)), b"\0")
    encoded = index.encode([1] * len(pieces))
    objects = (ObjectEntry(data_name(save_id, 0, 0), 0, 0, len(data), crc32c(data)),) if data else ()
    manifest = Manifest(
        save_id,
        "crafted",
        "2026-01-31T12:00:00Z",
        Writer("nobody", "0"),
        chunk,
        IndexEntry(
            index_name(save_id),
            len(encoded.stored),
            encoded.raw_bytes,
            encoded.sha256,
            encoded.rows,
            encoded.compression,
        ),
        objects,
        tuple(
            StreamEntry(piece.name, piece.raw_bytes, 1, "file", piece.mode, None, piece.stored is None)
            for piece in pieces
        ),
        Totals(sum(piece.raw_bytes for piece in pieces), len(data), len(pieces), encoded.zero_chunks),
        tuple(tree),
    )
    if data:
        (image / objects[0].name).write_bytes(data)
    (image / index_name(save_id)).write_bytes(encoded.stored)
    (image / "manifest.json").write_bytes(manifest.encode())
    return image


def edit_manifest(image: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the manifest's text and seal it again: the SHA-256 is right afterwards."""
    path = image / "manifest.json"
    data = path.read_bytes()
    body = data[: data.rindex(b',\n "length"')]
    changed = change(body)
    assert changed != body, "the edit found nothing"
    path.write_bytes(seal(changed))


def flip(path: Path, position: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
