"""Opens a stored image: manifest, index and objects are checked before a byte of it is believed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptpipe.pipeline.errors import DigestMismatch, ImageIncomplete, ImageNotFound, UsageError
from ckptpipe.pipeline.image.index import Index
from ckptpipe.pipeline.image.layout import (
    MANIFEST_NAME,
    STRIPE_MARKER_MAX,
    check_stripe_marker,
    padded,
    stripe_name,
)
from ckptpipe.pipeline.image.manifest import MANIFEST_LIMIT, Manifest, digest_of
from ckptpipe.pipeline.image.records import ChunkRecord
from ckptpipe.storage_backends.abc import Backend
from ckptpipe.storage_backends.errors import ObjectNotFound


@dataclass(slots=True)
class Extent:
    """A run of stored chunks that lie one behind the other in one object: one read."""

    object: int
    offset: int
    nbytes: int
    rows: list[ChunkRecord]

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class ImageReader:
    """Made by `open_image`."""

    def __init__(self, backend: Backend, manifest: Manifest, index: Index, digest: str) -> None:
        self.backend = backend
        self.manifest = manifest
        self.index = index
        self.digest = digest

    @property
    def url(self) -> str:
        return self.backend.url

    def object_name(self, position: int) -> str:
        return self.manifest.objects[position].name

    def select(self, streams: Sequence[str] | None) -> list[int]:
        """Positions of the named streams, of all where ``streams`` is None."""
        if streams is None:
            return list(range(len(self.manifest.streams)))
        positions = {stream.name: position for position, stream in enumerate(self.manifest.streams)}
        chosen = []
        for name in streams:
            position = positions.get(name, positions.get(f"files/{name}"))
            if position is None:
                raise UsageError(
                    f"{self.url} has no stream {name!r}",
                    cure=f"its streams are listed by: ckptpipe show {self.url}",
                )
            if position not in chosen:
                chosen.append(position)
        return chosen

    def extents(self, streams: Sequence[int], limit: int) -> Iterator[Extent | ChunkRecord]:
        """Zero chunks as they are, stored ones in runs of at most ``limit`` bytes, ordered as they lie.

        The order follows the objects, so that a disk or a store is read from front to back.
        """
        run: Extent | None = None
        for row in self.index.in_storage_order(streams):
            if row.zero:
                yield row
                continue
            size = padded(row.stored_bytes)
            if run is not None:
                if run.object == row.object and run.end == row.offset and run.nbytes + size <= limit:
                    run.nbytes += size
                    run.rows.append(row)
                    continue
                yield run
            run = Extent(row.object, row.offset, size, [row])
        if run is not None:
            yield run


async def read_manifest(backend: Backend) -> tuple[Manifest, str]:
    """The manifest at an image's URL, and its digest."""
    try:
        stored = await backend.read_bytes(MANIFEST_NAME, limit=MANIFEST_LIMIT)
    except ObjectNotFound as error:
        raise ImageNotFound(
            f"no image at {backend.url}",
            cure="list the images of a URL with: ckptpipe list URL",
        ) from error
    manifest = await asyncio.to_thread(Manifest.decode, stored)
    return manifest, digest_of(stored)


async def open_image(backend: Backend, *, expect_digest: str = "") -> ImageReader:
    """Read and check manifest and index, and that every object is there in full."""
    manifest, digest = await read_manifest(backend)
    if expect_digest and digest != _normal(expect_digest):
        raise DigestMismatch(
            f"{backend.url} has the digest {digest}, not {_normal(expect_digest)}",
            cure="this is another image, or its manifest was changed",
        )
    try:
        stored = await backend.read_bytes(manifest.index.name, limit=manifest.index.bytes)
    except ObjectNotFound as error:
        raise ImageIncomplete(f"{backend.url}: the index {manifest.index.name} is missing") from error
    index = await asyncio.to_thread(Index.decode, stored, manifest)
    await _check_objects(backend, manifest)
    return ImageReader(backend, manifest, index, digest)


async def _check_objects(backend: Backend, manifest: Manifest) -> None:
    sizes = {info.name: info.size async for info in backend.list()}
    if manifest.stripes > 1:
        missing = [
            stripe for stripe in range(manifest.stripes) if stripe_name(manifest.save_id, stripe) not in sizes
        ]
        if missing:
            numbers = ", ".join(str(stripe + 1) for stripe in missing)
            raise ImageIncomplete(
                f"{backend.url}: stripe {numbers} of {manifest.stripes} is missing",
                cure="name the directories of all stripes in the URL: nvme:/a/NAME,/b/NAME",
            )
    for stripe in range(manifest.stripes if manifest.stripes > 1 else 0):
        marker = await backend.read_bytes(stripe_name(manifest.save_id, stripe), limit=STRIPE_MARKER_MAX)
        check_stripe_marker(marker, manifest.save_id, stripe, manifest.stripes)
    for stored in manifest.objects:
        size = sizes.get(stored.name)
        if size is None:
            raise ImageIncomplete(f"{backend.url}: the data object {stored.name} is missing")
        if size != stored.bytes:
            raise ImageIncomplete(
                f"{backend.url}: the data object {stored.name} has {size} bytes, the manifest says {stored.bytes}"
            )


def _normal(digest: str) -> str:
    digest = digest.strip().lower()
    return digest if ":" in digest else f"sha256:{digest}"
