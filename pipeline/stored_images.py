"""The care of stored images: list, show, delete, gc."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptpipe.pipeline.blocking import blocking
from ckptpipe.pipeline.errors import ImageCorrupt, ImageNotFound, UnsupportedImage
from ckptpipe.pipeline.image.collection import collect
from ckptpipe.pipeline.image.entries import StreamEntry
from ckptpipe.pipeline.image.layout import MANIFEST_NAME
from ckptpipe.pipeline.image.reader import check_stripes_named, open_image, read_manifest
from ckptpipe.pipeline.opening import Options, opened
from ckptpipe.pipeline.result import GcResult, ImageSummary
from ckptpipe.pipeline.settings import Settings
from ckptpipe.storage_backends.abc import Backend
from ckptpipe.storage_backends.errors import StorageError

GC_AGE = 86400.0
"""Seconds: nothing younger is removed unless told."""


async def list_images(
    url: str, *, options: Options | None = None, settings: Settings | None = None
) -> list[ImageSummary]:
    """The images directly under ``url``, sorted by name. One that cannot be opened is listed with its problem."""
    async with opened(url, options, settings) as (backend, _):
        found = []
        for name in await backend.children():
            image = backend.child(name)
            try:
                found.append(await _summary(image, name))
            except ImageNotFound:
                continue  # a directory of something else, or of a save that has not committed
        return found


async def _summary(image: Backend, name: str) -> ImageSummary:
    try:
        manifest, digest = await read_manifest(image)
    except (ImageCorrupt, UnsupportedImage, StorageError) as error:
        return ImageSummary(name, image.url, "", 0, 0, 0, "", problem=str(error))
    totals = manifest.totals
    return ImageSummary(
        name,
        image.url,
        manifest.created,
        totals.raw_bytes,
        totals.stored_bytes,
        len(manifest.streams),
        digest,
    )


async def show(
    url: str, *, options: Options | None = None, settings: Settings | None = None
) -> dict[str, Any]:
    """What the image at ``url`` holds: the manifest's facts, its digest, and how its chunks are stored."""
    async with opened(url, options, settings, image=True) as (backend, _):
        reader = await open_image(backend)
        manifest = reader.manifest
        return {
            "image_url": reader.url,
            "digest": reader.digest,
            "save_id": manifest.save_id,
            "name": manifest.name,
            "created": manifest.created,
            "writer": f"{manifest.writer.name} {manifest.writer.version}",
            "chunk_bytes": manifest.chunk_bytes,
            "codec": dict(manifest.codec),
            "stripes": manifest.stripes,
            "totals": {
                "raw_bytes": manifest.totals.raw_bytes,
                "stored_bytes": manifest.totals.stored_bytes,
                "chunks": manifest.totals.chunks,
                "zero_chunks": manifest.totals.zero_chunks,
            },
            "stored_as": {
                key: {"chunks": s.chunks, "raw_bytes": s.raw_bytes, "stored_bytes": s.stored_bytes}
                for key, s in reader.index.statistics().items()
            },
            "source": dict(manifest.source),
            "process": None if manifest.process is None else dict(manifest.process),
            "streams": [_stream(stream) for stream in manifest.streams],
            "tree": [{"path": e.path, "kind": e.kind, "target": e.target} for e in manifest.tree],
            "objects": [
                {"name": o.name, "bytes": o.bytes, "crc32c": f"{o.crc32c:08x}"} for o in manifest.objects
            ],
            "notes": list(manifest.notes),
        }


def _stream(stream: StreamEntry) -> Mapping[str, Any]:
    made: dict[str, Any] = {
        "name": stream.name,
        "bytes": stream.bytes,
        "chunks": stream.chunks,
        "kind": stream.kind,
    }
    if stream.mode is not None:
        made["mode"] = f"0{stream.mode:03o}"
    if stream.sparse:
        made["sparse"] = True
    return made


async def delete(url: str, *, options: Options | None = None, settings: Settings | None = None) -> int:
    """Delete the image at ``url``: the manifest first, so that it is absent from then on. Returns how many
    objects went. ImageNotFound where there is no image, ImageIncomplete where the URL does not name all stripes
    of one; objects that are not ckptpipe's are left alone."""
    async with opened(url, options, settings, image=True) as (backend, _):
        names = [info.name async for info in backend.list()]
        if MANIFEST_NAME not in names:
            raise ImageNotFound(
                f"no image at {backend.url}", cure="what crashed saves left is removed by: ckptpipe gc URL"
            )
        try:
            manifest, _ = await read_manifest(backend)
        except (ImageCorrupt, UnsupportedImage):
            pass  # that can be deleted too
        else:
            check_stripes_named(backend, manifest, names)
        await backend.delete(MANIFEST_NAME)
        items = await collect(backend, older_than=0, dry_run=False)  # what a save that runs now has stays
        await backend.remove_if_empty()
        return 1 + sum(item.removed for item in items)


async def gc(
    url: str,
    *,
    older_than: float = GC_AGE,
    dry_run: bool = False,
    orphan_stripes: bool = False,
    options: Options | None = None,
    settings: Settings | None = None,
) -> GcResult:
    """Remove what crashed and overwritten saves left at ``url``: an image's URL, or one that holds images.

    Kept: what a manifest names, what a live lease protects, what is younger than ``older_than`` seconds; and
    stripes of an image whose first directory ``url`` does not name, but with ``orphan_stripes``: say so only where
    that directory is gone for good, for it holds the manifest.
    """
    async with opened(url, options, settings) as (backend, _):
        items = []
        for place in (backend, *(backend.child(name) for name in await backend.children(unfinished=True))):
            items += await collect(
                place, older_than=older_than, dry_run=dry_run, orphan_stripes=orphan_stripes
            )
        unlisted = backend.report().unlisted
        return GcResult(backend.url, items, [unlisted] if unlisted else [])


list_images_blocking = blocking(list_images)
show_blocking = blocking(show)
delete_blocking = blocking(delete)
gc_blocking = blocking(gc)
