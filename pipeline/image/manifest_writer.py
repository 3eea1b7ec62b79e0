"""The text of a manifest before its seal: JSON with one line a key and one line an entry of a list."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckptpipe.pipeline.image.entries import ObjectEntry, StreamEntry, TreeEntry
from ckptpipe.pipeline.image.manifest_limits import FORMAT, VERSION

if TYPE_CHECKING:
    from ckptpipe.pipeline.image.manifest import Manifest


def manifest_body(manifest: Manifest) -> bytes:
    """All keys but the seal's two, without the closing brace."""
    index = {
        "name": manifest.index.name,
        "bytes": manifest.index.bytes,
        "raw_bytes": manifest.index.raw_bytes,
        "sha256": manifest.index.sha256,
        "compression": manifest.index.compression,
        "rows": manifest.index.rows,
    }
    totals = {
        "raw_bytes": manifest.totals.raw_bytes,
        "stored_bytes": manifest.totals.stored_bytes,
        "chunks": manifest.totals.chunks,
        "zero_chunks": manifest.totals.zero_chunks,
    }
    pairs: list[tuple[str, str]] = [
        ("format", _text(FORMAT)),
        ("version", _text(VERSION)),
        ("features_required", _text([])),
        ("save_id", _text(manifest.save_id)),
        ("name", _text(manifest.name)),
        ("created", _text(manifest.created)),
        ("writer", _text({"name": manifest.writer.name, "version": manifest.writer.version})),
        ("chunk_bytes", _text(manifest.chunk_bytes)),
        ("stripes", _text(manifest.stripes)),
        ("codec", _text(dict(manifest.codec))),
        ("totals", _text(totals)),
        ("index", _text(index)),
        ("source", _text(dict(manifest.source))),
        ("process", _text(None if manifest.process is None else dict(manifest.process))),
        ("streams", _lines(map(_stream, manifest.streams))),
        ("tree", _lines(map(_tree_entry, manifest.tree))),
        ("objects", _lines(map(_object, manifest.objects))),
    ]
    return ("{\n" + ",\n".join(f' "{key}": {value}' for key, value in pairs)).encode("utf-8", "strict")


def _stream(entry: StreamEntry) -> dict[str, object]:
    made: dict[str, object] = {
        "name": entry.name,
        "bytes": entry.bytes,
        "chunks": entry.chunks,
        "kind": entry.kind,
    }
    if entry.mode is not None:
        made["mode"] = _mode(entry.mode)
    if entry.mtime_ns is not None:
        made["mtime_ns"] = entry.mtime_ns
    if entry.kind == "file":
        made["sparse"] = entry.sparse
    return made


def _tree_entry(entry: TreeEntry) -> dict[str, object]:
    made: dict[str, object] = {"path": entry.path, "kind": entry.kind}
    if entry.mode is not None:
        made["mode"] = _mode(entry.mode)
    if entry.kind == "symlink":
        made["target"] = entry.target
    if entry.mtime_ns is not None:
        made["mtime_ns"] = entry.mtime_ns
    return made


def _object(entry: ObjectEntry) -> dict[str, object]:
    return {
        "name": entry.name,
        "lane": entry.lane,
        "number": entry.number,
        "bytes": entry.bytes,
        "crc32c": f"{entry.crc32c:08x}",
    }


def _mode(mode: int) -> str:
    return f"0{mode:03o}"


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _lines(entries: Iterable[dict[str, object]]) -> str:
    lines = [f"  {_text(entry)}" for entry in entries]
    return "[\n" + ",\n".join(lines) + "\n ]" if lines else "[]"
