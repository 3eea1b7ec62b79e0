"""Reads a manifest and believes nothing in it: each field is checked before it is used."""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from ckptpipe.pipeline.errors import ImageCorrupt, UnsupportedImage
from ckptpipe.pipeline.image import layout, names, saveid
from ckptpipe.pipeline.image.entries import (
    INDEX_COMPRESSIONS,
    MODE_BITS,
    STREAM_KINDS,
    IndexEntry,
    ObjectEntry,
    StreamEntry,
    StreamKind,
    Totals,
    TreeEntry,
    TreeKind,
    Writer,
    chunk_count,
)
from ckptpipe.pipeline.image.index_limits import INDEX_RAW_MAX, check_index_sizes
from ckptpipe.pipeline.image.manifest_limits import FORMAT, FREE_FORM_MAX, MANIFEST_LIMIT, VERSION
from ckptpipe.pipeline.image.seal import check_seal
from ckptpipe.pipeline.image.strict_json import CURE, INT64_MAX, Fields, parse_object
from ckptpipe.pipeline.settings import CHUNK_MAX, CHUNK_MIN

if TYPE_CHECKING:
    from ckptpipe.pipeline.image.manifest import Manifest

WHERE = layout.MANIFEST_NAME
OBJECT_MAX = (1 << 56) - 1  # bytes
ENTRIES_MAX = 2_000_000  # of one list
_FEATURES_MAX = 64
_TEXT_MAX = 256
_CREATED = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?Z", re.ASCII)
_MODE = re.compile(r"0[0-7]{3,4}", re.ASCII)
_CODEC = re.compile(r"[a-z][a-z0-9-]{0,31}", re.ASCII)
_UPGRADE = "read it with a newer ckptpipe"


def read_manifest(data: bytes, make: type[Manifest]) -> Manifest:
    """The manifest in ``data``. ImageCorrupt for anything that is not one; UnsupportedImage for one that
    this version does not know how to read."""
    if len(data) > MANIFEST_LIMIT:
        raise ImageCorrupt(f"{WHERE}: {len(data)} bytes, {MANIFEST_LIMIT} is the most", cure=CURE)
    check_seal(data, WHERE)
    root = parse_object(data, WHERE, MANIFEST_LIMIT)
    root.expect("format", FORMAT)
    _check_version(root)
    save_id = root.text("save_id", longest=_TEXT_MAX)
    if not saveid.is_save_id(save_id):
        root.refuse("save_id", f"is {save_id!a}, which is no save id")
    name = root.text("name", longest=_TEXT_MAX)
    if not layout.is_image_name(name):
        root.refuse("name", f"is {name!a}, which is no image name")
    chunk_bytes = root.integer("chunk_bytes", CHUNK_MIN, CHUNK_MAX)
    if chunk_bytes % layout.PAGE:
        root.refuse("chunk_bytes", f"is {chunk_bytes}, not a multiple of {layout.PAGE}")
    notes: list[str] = []
    streams = _streams(root, chunk_bytes, notes)
    tree = _tree(root, notes)
    names.check_tree(
        [stream.name for stream in streams]
        + [f"files/{entry.path}" for entry in tree if entry.kind == "symlink"],
        [f"files/{entry.path}" for entry in tree if entry.kind == "directory"],
        WHERE,
    )
    objects = _objects(root)
    totals = _totals(root, streams, objects)
    return make(
        save_id=save_id,
        name=name,
        created=_created(root),
        writer=_writer(root.fields("writer")),
        chunk_bytes=chunk_bytes,
        index=_index(root.fields("index"), save_id, totals),
        objects=objects,
        streams=streams,
        totals=totals,
        tree=tree,
        stripes=root.integer("stripes", 1, layout.STRIPES_MAX),
        codec=_codec(root),
        source=root.free_form("source", longest=FREE_FORM_MAX),
        process=None if root.value("process") is None else root.free_form("process", longest=FREE_FORM_MAX),
        notes=tuple(notes),
    )


def _check_version(root: Fields) -> None:
    version = root.integer("version", 0, INT64_MAX)
    if version != VERSION:
        raise UnsupportedImage(
            f"{WHERE}: format version {version}, this ckptpipe knows version {VERSION}", cure=_UPGRADE
        )
    features = root.items("features_required", most=_FEATURES_MAX)
    for feature in features:
        if type(feature) is not str:
            root.refuse("features_required", "holds something that is not a string")
    if features:
        shown = ", ".join(ascii(feature[:_TEXT_MAX]) for feature in features)
        raise UnsupportedImage(f"{WHERE}: needs {shown}, which this ckptpipe does not know", cure=_UPGRADE)


def _created(root: Fields) -> str:
    created = root.text("created", longest=_TEXT_MAX)
    if not _CREATED.fullmatch(created):
        root.refuse("created", f"is {created!a}, not a UTC time like 2026-01-31T23:59:59Z")
    try:
        datetime.strptime(created[:19], "%Y-%m-%dT%H:%M:%S")
    except ValueError:
        root.refuse("created", f"is {created!a}, a time that does not exist")
    return created


def _writer(fields: Fields) -> Writer:
    return Writer(fields.text("name", longest=_TEXT_MAX), fields.text("version", longest=_TEXT_MAX))


def _codec(root: Fields) -> dict[str, Any]:
    found = root.free_form("codec", longest=FREE_FORM_MAX)
    fields = root.fields("codec")
    name = fields.text("name", longest=_TEXT_MAX)
    if not _CODEC.fullmatch(name):
        fields.refuse("name", f"is {name!a}, which is no codec's name")
    return found


def _index(fields: Fields, save_id: str, totals: Totals) -> IndexEntry:
    fields.expect("name", layout.index_name(save_id))
    compression = next((word for word in INDEX_COMPRESSIONS if word == fields.value("compression")), None)
    if compression is None:
        raise UnsupportedImage(
            f"{fields.where}: compression {ascii(fields.value('compression'))[:100]}, "
            f"this ckptpipe knows {', '.join(INDEX_COMPRESSIONS)}",
            cure=_UPGRADE,
        )
    entry = IndexEntry(
        name=layout.index_name(save_id),
        bytes=fields.integer("bytes", 1, INDEX_RAW_MAX),
        raw_bytes=fields.integer("raw_bytes", 1, INDEX_RAW_MAX),
        sha256=fields.hexadecimal("sha256", 64),
        rows=fields.integer("rows", 0, INT64_MAX),
        compression=compression,
    )
    if entry.rows != totals.chunks:
        fields.refuse("rows", f"is {entry.rows}, the streams have {totals.chunks} chunks")
    problem = check_index_sizes(entry.bytes, entry.raw_bytes, entry.rows)
    if problem:
        fields.refuse("raw_bytes", problem)
    return entry


def _streams(root: Fields, chunk_bytes: int, notes: list[str]) -> tuple[StreamEntry, ...]:
    streams = []
    for fields in root.each("streams", most=ENTRIES_MAX):
        name = fields.text("name", longest=names.NAME_MAX_BYTES, control=True)
        try:
            names.check_stream_name(name)
        except ValueError as error:
            fields.refuse("name", f"is bad: {error}")
        nbytes = fields.integer("bytes", 0, INT64_MAX)
        chunks = fields.integer("chunks", 0, INT64_MAX)
        if chunks != chunk_count(nbytes, chunk_bytes):
            fields.refuse(
                "chunks",
                f"is {chunks}; {nbytes} bytes in chunks of {chunk_bytes} are {chunk_count(nbytes, chunk_bytes)}",
            )
        kind = _stream_kind(fields, name)
        is_file = kind == "file"
        streams.append(
            StreamEntry(
                name,
                nbytes,
                chunks,
                kind,
                _mode(fields, notes) if is_file else None,
                fields.integer("mtime_ns", -INT64_MAX, INT64_MAX)
                if is_file and fields.has("mtime_ns")
                else None,
                fields.boolean("sparse") if is_file else False,
            )
        )
    return tuple(streams)


def _stream_kind(fields: Fields, name: str) -> StreamKind:
    kind = fields.text("kind", longest=_TEXT_MAX)
    if kind not in STREAM_KINDS:
        raise UnsupportedImage(
            f"{fields.where}: kind {kind!a}, this ckptpipe knows {', '.join(STREAM_KINDS)}", cure=_UPGRADE
        )
    fitting = {
        "files": ("file",),
        "host": ("buffer", "stdin"),
        "device": ("gpu",),
        "proc": ("gpu",) if "/gpu/" in name else ("driver",),
    }[name.partition("/")[0]]
    if kind not in fitting:
        fields.refuse("kind", f"is {kind!a}, a stream called {name[:200]!a} is {' or '.join(fitting)}")
    return kind


def _tree(root: Fields, notes: list[str]) -> tuple[TreeEntry, ...]:
    tree = []
    for fields in root.each("tree", most=ENTRIES_MAX):
        path = fields.text("path", longest=names.NAME_MAX_BYTES, control=True)
        kind = fields.text("kind", longest=_TEXT_MAX)
        try:
            names.check_path(path)
        except ValueError as error:
            fields.refuse("path", f"is bad: {error}")
        if kind not in ("directory", "symlink"):
            raise UnsupportedImage(
                f"{fields.where}: kind {kind!a}, this ckptpipe knows directory, symlink", cure=_UPGRADE
            )
        target = ""
        if kind == "symlink":
            target = fields.text("target", longest=3 * names.TARGET_MAX_BYTES, control=True)
            try:
                names.check_target(target)
            except ValueError as error:
                fields.refuse("target", f"is bad: {error}")
        tree.append(
            TreeEntry(
                path,
                cast(TreeKind, kind),
                _mode(fields, notes) if kind == "directory" else None,
                target,
                fields.integer("mtime_ns", -INT64_MAX, INT64_MAX) if fields.has("mtime_ns") else None,
            )
        )
    return tuple(tree)


def _mode(fields: Fields, notes: list[str]) -> int:
    text = fields.text("mode", longest=_TEXT_MAX)
    if not _MODE.fullmatch(text):
        fields.refuse("mode", f'is {text!a}, not an octal string like "0644"')
    mode = int(text, 8)
    if mode & ~MODE_BITS:
        if len(notes) < 10:
            notes.append(f"{fields.where}: set-id and sticky bits of mode {text} are left out")
        elif len(notes) == 10:
            notes.append("set-id and sticky bits of more entries are left out")
    return mode & MODE_BITS


def _objects(root: Fields) -> tuple[ObjectEntry, ...]:
    objects = []
    seen: set[str] = set()
    for fields in root.each("objects", most=ENTRIES_MAX):
        name = fields.text("name", longest=_TEXT_MAX)
        parsed = layout.parse_object_name(name)
        if parsed is None or parsed.kind != "data":
            fields.refuse("name", f"is {name!a}, which is no data object's name")
        if name in seen:
            fields.refuse("name", f"is {name!a}, which appears twice")
        seen.add(name)
        lane = fields.integer("lane", 0, layout.LANE_MAX)
        number = fields.integer("number", 0, layout.NUMBER_MAX)
        if (lane, number) != (parsed.lane, parsed.number):
            fields.refuse("lane", f"and number are {lane} and {number} in object {name}")
        nbytes = fields.integer("bytes", 0, OBJECT_MAX)
        if nbytes % layout.PAGE:
            fields.refuse("bytes", f"is {nbytes}, not a multiple of {layout.PAGE}")
        objects.append(ObjectEntry(name, lane, number, nbytes, int(fields.hexadecimal("crc32c", 8), 16)))
    return tuple(objects)


def _totals(root: Fields, streams: tuple[StreamEntry, ...], objects: tuple[ObjectEntry, ...]) -> Totals:
    fields = root.fields("totals")

    def summed(key: str, wanted: int, what: str) -> int:
        found = fields.integer(key, 0, INT64_MAX)
        if found != wanted:
            fields.refuse(key, f"is {found}, the {what} {wanted}")
        return found

    chunks = summed("chunks", sum(stream.chunks for stream in streams), "streams together have")
    return Totals(
        summed("raw_bytes", sum(stream.bytes for stream in streams), "streams together have"),
        summed("stored_bytes", sum(entry.bytes for entry in objects), "objects together have"),
        chunks,
        fields.integer("zero_chunks", 0, chunks),
    )
