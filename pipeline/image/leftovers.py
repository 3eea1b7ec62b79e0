"""What lies at an image's URL beside what its manifest names: objects and uploads of other saves."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from ckptpipe.pipeline.errors import ImageCorrupt, UnsupportedImage
from ckptpipe.pipeline.image.layout import (
    MANIFEST_NAME,
    index_name,
    lease_name,
    parse_object_name,
    stripe_name,
)
from ckptpipe.pipeline.image.manifest import MANIFEST_LIMIT, Manifest
from ckptpipe.pipeline.image.protection import lease_of, live_lease
from ckptpipe.pipeline.image.removal import Removal
from ckptpipe.pipeline.image.seal import is_torn
from ckptpipe.storage_backends.abc import WRITE_PROBE, Backend, ObjectInfo, PendingUpload
from ckptpipe.storage_backends.errors import ObjectNotFound

_TEMPORARY = re.compile(r"-[0-9a-f]{16}\Z")  # what a local store puts behind the name of a temporary file
_LOOSE = re.compile(rf"(?:{re.escape(MANIFEST_NAME)}|{WRITE_PROBE})(?:-[0-9a-f]{{16}}){{0,2}}")


@dataclass(slots=True)
class SaveObjects:
    """All that lies at an image's URL under one save id."""

    save_id: str
    objects: list[ObjectInfo]
    uploads: list[PendingUpload]


async def saves_at(backend: Backend) -> dict[str, SaveObjects]:
    """Every save id found in object names and pending uploads; other people's objects are not looked at."""
    return by_save([info async for info in backend.list()], await backend.pending())


def by_save(objects: list[ObjectInfo], uploads: list[PendingUpload]) -> dict[str, SaveObjects]:
    found: dict[str, SaveObjects] = {}

    def of(save_id: str) -> SaveObjects:
        return found.setdefault(save_id, SaveObjects(save_id, [], []))

    for info in objects:
        if save_id := _save_id(info.name):
            of(save_id).objects.append(info)
    for upload in uploads:
        if save_id := _save_id_of_upload(upload):
            of(save_id).uploads.append(upload)
    return found


def _save_id(name: str) -> str:
    """Of an object's name, "" where none stands in it."""
    parsed = parse_object_name(name)
    return parsed.save_id if parsed is not None else ""


def _save_id_of_upload(upload: PendingUpload) -> str:
    return _save_id(_TEMPORARY.sub("", upload.name))


async def remove_save(backend: Backend, save_id: str) -> int:
    """Delete every object and upload of one save that no manifest names, also no torn one; the lease object last. Returns
    how many went.

    Goes on past what fails, to raise it when everything has been tried.
    """
    removal, save = Removal(), SaveObjects(save_id, [], [])

    async def objects() -> None:
        save.objects = [info async for info in backend.list() if _save_id(info.name) == save_id]

    async def uploads() -> None:
        save.uploads = [upload for upload in await backend.pending() if _save_id_of_upload(upload) == save_id]

    listed = await removal.step(objects())
    await removal.step(uploads())
    *first, last = _last(save_id)
    names = [info.name for info in save.objects] if listed else [index_name(save_id), *first, last]
    removed = await removal.steps(
        [partial(backend.delete, name) for name in names if name not in (*first, last)]
        + [partial(backend.discard, upload) for upload in save.uploads]
    )
    for name in (*first, last):
        if name in names and await removal.step(backend.delete(name)):
            removed += 1
    removal.end()
    return removed


def stripe_alone(save: SaveObjects) -> bool:
    """Whether manifest and lease of a striped image lie in a directory that the URL does not name.

    They lie with stripe 0, whose marker is written before any other's and deleted after them.
    """
    names = {info.name for info in save.objects}
    markers = [name for name in names if (parsed := parse_object_name(name)) and parsed.kind == "stripe"]
    return bool(markers) and stripe_name(save.save_id, 0) not in names


def in_order(save: SaveObjects) -> list[ObjectInfo]:
    """Objects as they are to be deleted: last what tells another gc whose the others are. The lease is gone by then
    (`collection.collect`), unless a refresh that was under way has put it back."""
    last = _last(save.save_id) if save.save_id else ()
    return sorted(save.objects, key=lambda info: last.index(info.name) if info.name in last else -1)


def _last(save_id: str) -> tuple[str, str]:
    return stripe_name(save_id, 0), lease_name(save_id)


def is_loose(name: str) -> bool:
    """A temporary file, upload or probe of ours that no save id stands in. Any other is somebody else's."""
    return _LOOSE.fullmatch(name) is not None


def is_probe(info: ObjectInfo) -> bool:
    return info.name.startswith(f"{WRITE_PROBE}-") and is_loose(info.name) and not info.size


UNREADABLE = object()


@dataclass(frozen=True, slots=True)
class Torn:
    """A manifest of a save that was killed while it wrote it in place: its bytes."""

    stored: bytes


async def look(backend: Backend, *, again: bool = False) -> object:
    """At the manifest: the save id of the image that stands, None where none does, a `Torn`, or UNREADABLE. ``again``: one
    that is torn is being written, for it was not there before."""
    try:
        stored = await backend.read_bytes(MANIFEST_NAME, limit=MANIFEST_LIMIT)
    except ObjectNotFound:
        return None
    try:
        if is_torn(stored):
            return Torn(stored) if not again and await never_finished(backend) else UNREADABLE
        return save_id_of(stored)
    except (ImageCorrupt, UnsupportedImage):
        return UNREADABLE


async def never_finished(backend: Backend) -> bool:
    """Whether a torn manifest is one whose save was killed: its lease object goes only when the manifest
    stands. Objects without one beside them were an image, whose manifest was damaged afterwards."""
    found = [parse_object_name(info.name) async for info in backend.list()]
    kinds = {parsed.kind for parsed in found if parsed is not None}
    return "lease" in kinds or kinds <= {"manifest"}


def save_id_of(manifest: bytes) -> str:
    """The save id of a stored manifest; raises as `Manifest.decode` does."""
    return Manifest.decode(manifest).save_id


async def left_by_others(backend: Backend, save_id: str) -> set[str]:
    """Save ids of what lies here for us to remove: saves that have left it, by their leases' word, and what they had
    replaced; neither ``save_id`` nor what stands or is protected."""
    saves, found = await saves_at(backend), set[str]()
    for other in saves:
        lease = await lease_of(backend, other)
        if lease is not None and lease.left:
            found |= {other, lease.replaced}
    stands = await look(backend)
    if stands is UNREADABLE or isinstance(stands, Torn):
        return set()
    found -= {save_id, stands, ""}
    return {each for each in found if each in saves and not await live_lease(backend, each)}
