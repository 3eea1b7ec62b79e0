"""What crashed and overwritten saves leave at an image's URL, and what may be taken away."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from ckptpipe.pipeline.errors import ImageCorrupt, UnsupportedImage
from ckptpipe.pipeline.image.holder import read_lease
from ckptpipe.pipeline.image.layout import MANIFEST_NAME, lease_name, parse_object_name, stripe_name
from ckptpipe.pipeline.image.manifest import MANIFEST_LIMIT, Manifest
from ckptpipe.pipeline.image.seal import is_torn
from ckptpipe.pipeline.result import DRY_RUN, GcItem
from ckptpipe.storage_backends.abc import WRITE_PROBE, Backend, ObjectInfo, PendingUpload
from ckptpipe.storage_backends.errors import ObjectNotFound

LEASE_TTL = 900.0
"""Seconds after its last refresh for which a lease object protects its save (refreshed every 60)."""
STRIPE_ALONE = (
    "a stripe of an image whose first directory is not in the URL: name all of them, or, where that one is gone "
    "for good, remove it with --orphan-stripes"
)
_TEMPORARY = re.compile(r"-[0-9a-f]{16}\Z")  # what a local store puts behind the name of a temporary file


@dataclass(slots=True)
class SaveObjects:
    """All that lies at an image's URL under one save id."""

    save_id: str
    objects: list[ObjectInfo]
    uploads: list[PendingUpload]


async def saves_at(backend: Backend) -> dict[str, SaveObjects]:
    """Every save id found in object names and pending uploads; other people's objects are not looked at."""
    found: dict[str, SaveObjects] = {}

    def of(save_id: str) -> SaveObjects:
        return found.setdefault(save_id, SaveObjects(save_id, [], []))

    async for info in backend.list():
        parsed = parse_object_name(info.name)
        if parsed is not None and parsed.save_id:
            of(parsed.save_id).objects.append(info)
    for upload in await backend.pending():
        parsed = parse_object_name(_TEMPORARY.sub("", upload.name))
        if parsed is not None and parsed.save_id:
            of(parsed.save_id).uploads.append(upload)
    return found


async def remove_save(backend: Backend, save_id: str) -> int:
    """Delete every object and upload of one save; the lease object last. Returns how many went."""
    save = (await saves_at(backend)).get(save_id)
    if save is None:
        return 0
    for info in _in_order(save):
        await backend.delete(info.name)
    for upload in save.uploads:
        await backend.discard(upload)
    return len(save.objects) + len(save.uploads)


def stripe_alone(save: SaveObjects) -> bool:
    """Whether manifest and lease of a striped image lie in a directory that the URL does not name.

    They lie with stripe 0, whose marker is written before any other's and deleted after them.
    """
    names = {info.name for info in save.objects}
    markers = [name for name in names if (parsed := parse_object_name(name)) and parsed.kind == "stripe"]
    return bool(markers) and stripe_name(save.save_id, 0) not in names


def _in_order(save: SaveObjects) -> list[ObjectInfo]:
    """Objects as they are to be deleted: last what tells another gc whose the others are."""
    last = (stripe_name(save.save_id, 0), lease_name(save.save_id)) if save.save_id else ()
    return sorted(save.objects, key=lambda info: last.index(info.name) if info.name in last else -1)


async def collect(
    backend: Backend, *, older_than: float, dry_run: bool, orphan_stripes: bool = False
) -> list[GcItem]:
    """Remove what no manifest names and no live lease protects, where it is older than ``older_than`` seconds.

    A torn manifest is an absent one, and goes too. Any other that cannot be read protects everything beside
    it: it may be damaged and worth repairing, or of a newer format. ``orphan_stripes``: stripes whose first
    directory the URL does not name go too; whether their image stands cannot be seen from here.
    """
    saves = await saves_at(backend)
    temporary = [upload for upload in await backend.pending() if _is_loose(upload.name)]
    current = await _save_id_of_manifest(backend)
    torn = [await backend.stat(MANIFEST_NAME)] if current is TORN else []
    items: list[GcItem] = []
    now, running = time.time(), ""
    for save_id, save in sorted(saves.items()):
        if save_id == current:
            kept = [info for info in save.objects if info.name == lease_name(save_id)]
            save = SaveObjects(save_id, kept, save.uploads)  # a lease that outlived its commit
        reason = "the manifest cannot be read" if current is UNREADABLE else await live_lease(backend, save)
        running = running or reason
        reason = reason or (STRIPE_ALONE if stripe_alone(save) and not orphan_stripes else "")
        items += await _take(backend, save, older_than=older_than, dry_run=dry_run, now=now, reason=reason)
    # Each by itself; a save that runs may be writing just these.
    loose = [SaveObjects("", [info], []) for info in torn]
    loose += [SaveObjects("", [], [upload]) for upload in temporary]
    for one in loose:
        items += await _take(backend, one, older_than=older_than, dry_run=dry_run, now=now, reason=running)
    if not dry_run and any(item.removed for item in items):
        await backend.remove_if_empty()
    return items


def _is_loose(name: str) -> bool:
    """A temporary file or upload of ours that no save id stands in. Any other is somebody else's."""
    return _TEMPORARY.sub("", name) in (MANIFEST_NAME, WRITE_PROBE)


UNREADABLE = object()
TORN = object()


async def _save_id_of_manifest(backend: Backend) -> object:
    """The save id of the image that stands, None where none does."""
    try:
        stored = await backend.read_bytes(MANIFEST_NAME, limit=MANIFEST_LIMIT)
    except ObjectNotFound:
        return None
    try:
        if is_torn(stored):
            return TORN if await never_finished(backend) else UNREADABLE
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


async def live_lease(backend: Backend, save: SaveObjects) -> str:
    """Why the save may still be running, "" where it is not."""
    name = lease_name(save.save_id)
    info = next((info for info in save.objects if info.name == name), None)
    if info is None:
        return ""
    age = time.time() - info.modified
    if age > LEASE_TTL:
        return ""
    try:
        holder, ended = read_lease(await backend.read_bytes(name, limit=1 << 16))
    except ObjectNotFound:
        return ""  # given back just now
    return "" if ended else f"live lease{holder}, refreshed {max(0, age):.0f} s ago"


async def _take(
    backend: Backend, save: SaveObjects, *, older_than: float, dry_run: bool, now: float, reason: str
) -> list[GcItem]:
    items = []
    newest = max(
        [info.modified for info in save.objects] + [upload.started for upload in save.uploads], default=0.0
    )
    if not reason and older_than > 0 and now - newest < older_than:
        reason = f"younger than {older_than:.0f} s"
    lease = lease_name(save.save_id) if save.save_id else ""
    for info in _in_order(save):
        if not reason and not dry_run:
            await backend.delete(info.name)
        kind = "lease" if info.name == lease else "object"
        items.append(
            _item(kind, f"{backend.url}/{info.name}", info.size, now - info.modified, reason, dry_run)
        )
    for upload in save.uploads:
        if not reason and not dry_run:
            await backend.discard(upload)
        where = f"{backend.url}/{upload.name}"
        items.append(_item("upload", where, 0, now - upload.started, reason, dry_run))
    return items


def _item(kind: str, where: str, size: int, age: float, reason: str, dry_run: bool) -> GcItem:
    removed = not reason and not dry_run
    return GcItem(kind, where, size, age, removed, reason or (DRY_RUN if dry_run else ""))
