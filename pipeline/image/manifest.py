"""The manifest: what an image holds. Written last, it is what makes the image be there."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckptpipe.pipeline.errors import ImageCorrupt, UnsupportedImage, UsageError
from ckptpipe.pipeline.image.entries import (
    IndexEntry,
    ObjectEntry,
    StreamEntry,
    Totals,
    TreeEntry,
    Writer,
)
from ckptpipe.pipeline.image.layout import MANIFEST_NAME
from ckptpipe.pipeline.image.manifest_limits import FORMAT, MANIFEST_LIMIT, VERSION
from ckptpipe.pipeline.image.manifest_reader import read_manifest
from ckptpipe.pipeline.image.manifest_writer import manifest_body
from ckptpipe.pipeline.image.seal import seal
from ckptpipe.pyx.errors import CkptpipeError

__all__ = [
    "FORMAT",
    "MANIFEST_LIMIT",
    "MANIFEST_NAME",
    "VERSION",
    "Manifest",
    "digest_of",
    "manifest_if_whole",
]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest's content. ``created``: RFC 3339, UTC. ``notes``: what a reader saw and let pass.

    ``codec``, ``source`` and ``process`` are free-form facts (JSON values; ``codec`` has a ``name``).
    """

    save_id: str
    name: str
    created: str
    writer: Writer
    chunk_bytes: int
    index: IndexEntry
    objects: tuple[ObjectEntry, ...]
    streams: tuple[StreamEntry, ...]
    totals: Totals
    tree: tuple[TreeEntry, ...] = ()
    stripes: int = 1
    codec: Mapping[str, Any] = field(default_factory=lambda: {"name": "none"})
    source: Mapping[str, Any] = field(default_factory=dict)
    process: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    def encode(self) -> bytes:
        """The bytes of manifest.json.

        They are read back before they are given out, so that no save ends with an image that nobody can
        open: ValueError where a reader would refuse them (a defect of the caller). UsageError where there
        are too many entries for one manifest.
        """
        try:
            data = seal(manifest_body(self))
        except (TypeError, ValueError) as error:
            raise ValueError(f"this manifest cannot be stored as JSON in UTF-8: {error}") from error
        if len(data) > MANIFEST_LIMIT:
            raise UsageError(
                f"the manifest of {len(self.streams)} streams and {len(self.tree)} other entries would have "
                f"{len(data)} bytes, {MANIFEST_LIMIT} is the most",
                cure="save fewer files in one image, or pack small files into archives first",
            )
        try:
            again = Manifest.decode(data)
        except CkptpipeError as error:
            raise ValueError(f"this manifest could not be read back: {error}") from error
        # Free-form facts are what JSON makes of them: a tuple comes back as a list.
        if replace(again, codec=self.codec, source=self.source, process=self.process) != self:
            raise ValueError("this manifest reads back as another one")
        return data

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """The manifest in ``data``. ImageCorrupt for anything that is not one, whole; UnsupportedImage for
        one that this version does not know how to read."""
        return read_manifest(data, cls)


def digest_of(manifest_bytes: bytes) -> str:
    """The name of an image by content: ``sha256:`` and the SHA-256 of the whole manifest.json."""
    return f"sha256:{hashlib.sha256(manifest_bytes).hexdigest()}"


def manifest_if_whole(data: bytes) -> Manifest | None:
    """The manifest in ``data``, None where it is torn, damaged, or of a format not known here."""
    try:
        return Manifest.decode(data)
    except (ImageCorrupt, UnsupportedImage):
        return None
