"""The stored image: names, manifest and chunk index (FORMAT.md). Bytes in, bytes out; no storage here."""

from __future__ import annotations

from ckptpipe.pipeline.image.entries import (
    IndexEntry,
    ObjectEntry,
    StreamEntry,
    Totals,
    TreeEntry,
    Writer,
    chunk_count,
)
from ckptpipe.pipeline.image.index import CodecStatistics, Index
from ckptpipe.pipeline.image.index_builder import EncodedIndex, IndexBuilder
from ckptpipe.pipeline.image.manifest import MANIFEST_LIMIT, MANIFEST_NAME, Manifest, digest_of
from ckptpipe.pipeline.image.records import ChunkFlags, ChunkRecord, PlaneRecord, whole_plane, zero_record

__all__ = [
    "MANIFEST_LIMIT",
    "MANIFEST_NAME",
    "ChunkFlags",
    "ChunkRecord",
    "CodecStatistics",
    "EncodedIndex",
    "Index",
    "IndexBuilder",
    "IndexEntry",
    "Manifest",
    "ObjectEntry",
    "PlaneRecord",
    "StreamEntry",
    "Totals",
    "TreeEntry",
    "Writer",
    "chunk_count",
    "digest_of",
    "whole_plane",
    "zero_record",
]
