"""What crashed and overwritten saves leave at an image's URL, and what may be taken away."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass
from functools import partial

from ckptpipe.pipeline.errors import ImageCorrupt, UnsupportedImage
from ckptpipe.pipeline.image.holder import LEASE_MAX, Holder, read_lease
from ckptpipe.pipeline.image.layout import (
    MANIFEST_NAME,
    index_name,
    lease_name,
    parse_object_name,
    stripe_name,
)
from ckptpipe.pipeline.image.manifest import MANIFEST_LIMIT, Manifest
from ckptpipe.pipeline.image.removal import Removal
from ckptpipe.pipeline.image.seal import is_torn
from ckptpipe.pipeline.result import DRY_RUN, GcItem
from ckptpipe.storage_backends.abc import WRITE_PROBE, Backend, ObjectInfo, PendingUpload
from ckptpipe.storage_backends.errors import ObjectNotFound, StorageError

LEASE_TTL = 900.0
"""Seconds after its last refresh for which a lease object protects its save (refreshed every 60), where its process
cannot be seen from here."""
CLOCK_DOUBT = 3600.0
"""Seconds more, where the store's clock could not be asked for and this machine's may be wrong."""
STRIPE_ALONE = (
    "a stripe of an image whose first directory is not in the URL: name all of them, or, where that one is gone "
    "for good, remove it with --orphan-stripes"
)
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
    return _by_save([info async for info in backend.list()], await backend.pending())


def _by_save(objects: list[ObjectInfo], uploads: list[PendingUpload]) -> dict[str, SaveObjects]:
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


def _in_order(save: SaveObjects) -> list[ObjectInfo]:
    """Objects as they are to be deleted: last what tells another gc whose the others are. The lease is gone by then
    (`_condemn`), unless a refresh that was under way has put it back."""
    last = _last(save.save_id) if save.save_id else ()
    return sorted(save.objects, key=lambda info: last.index(info.name) if info.name in last else -1)


def _last(save_id: str) -> tuple[str, str]:
    return stripe_name(save_id, 0), lease_name(save_id)


async def collect(
    backend: Backend, *, older_than: float, dry_run: bool, orphan_stripes: bool = False
) -> list[GcItem]:
    """Remove what no manifest names and no live lease protects, where it is older than ``older_than`` seconds.

    A torn manifest is an absent one, and goes before all that lies beside it; where it stays, so does that: a lease
    there is what tells it from a damaged one. Any other that cannot be read protects everything beside it: it may be
    damaged and worth repairing, or of a newer format. ``orphan_stripes``: stripes whose first directory the URL does
    not name go too; whether their image stands cannot be seen from here.

    Ages are by the store's clock, but of a dry run, which writes nothing: by this machine's.
    """
    objects, uploads = [info async for info in backend.list()], await backend.pending()
    saves = _by_save(objects, uploads)
    loose = [SaveObjects("", [], [upload]) for upload in uploads if _is_loose(upload.name)]
    loose += [SaveObjects("", [info], []) for info in objects if _is_probe(info)]
    current = await _look(backend)
    torn = [info for info in objects if info.name == MANIFEST_NAME and isinstance(current, Torn)]
    if isinstance(current, Torn) and not torn:
        current = UNREADABLE  # it was not there before
    if isinstance(current, str) and current in saves:
        here = saves[current]
        kept = [info for info in here.objects if info.name == lease_name(current)]
        saves[current] = SaveObjects(current, kept, here.uploads)  # a lease that outlived its commit
        if not (kept or here.uploads or loose or len(saves) > 1):
            return []  # as of most images
    asks = not (dry_run or current is UNREADABLE) and bool(saves or loose or torn)
    now = await _store_clock(backend) if asks else None
    clock = _Clock(time.time() if now is None else now, CLOCK_DOUBT if asks and now is None else 0.0)

    reasons: dict[str, str] = {}
    for save_id, save in saves.items():
        reasons[save_id] = (
            "the manifest cannot be read" if current is UNREADABLE else await live_lease(backend, save, clock)
        )
    running = next(filter(None, (reasons[save_id] for save_id in sorted(saves))), "")
    if isinstance(current, str) and reasons.get(current):
        # Its save may yet fail elsewhere, and put the image back that it has replaced.
        for save_id in saves:
            reasons[save_id] = (
                reasons[save_id] or f"replaced by a save that has not ended: {reasons[current]}"
            )
    for save_id, save in saves.items():
        alone = STRIPE_ALONE if stripe_alone(save) and not orphan_stripes else ""
        reasons[save_id] = reasons[save_id] or alone or _too_young(save, older_than, clock.now)

    torn_reason = running  # that save may be writing it just now
    for info in torn:
        torn_reason = torn_reason or _too_young(SaveObjects("", [info], []), older_than, clock.now)
        if isinstance(current, Torn) and not (torn_reason or dry_run):
            torn_reason = await _take_torn(backend, current, set(saves))
        if torn_reason:
            stays = f"beside a torn manifest, which stays: {torn_reason}"
            reasons = {save_id: reason or stays for save_id, reason in reasons.items()}
    if not dry_run:
        condemned = [save for save_id, save in sorted(saves.items()) if not reasons[save_id]]
        reasons |= await _condemn(backend, condemned, current)
    items = [
        _item(
            "object", f"{backend.url}/{info.name}", info.size, clock.now - info.modified, torn_reason, dry_run
        )
        for info in torn
    ]
    for save_id, save in sorted(saves.items()):
        items += await _take(backend, save, dry_run=dry_run, now=clock.now, reason=reasons[save_id])
    # Each by itself; a save that runs may be writing just these.
    for one in loose:
        reason = running or _too_young(one, older_than, clock.now)
        items += await _take(backend, one, dry_run=dry_run, now=clock.now, reason=reason)
    if not dry_run and any(item.removed for item in items):
        await backend.remove_if_empty()
    return items


@dataclass(frozen=True, slots=True)
class _Clock:
    """Unix seconds by the store's clock, and by how many it may be more."""

    now: float
    doubt: float = 0.0


async def _store_clock(backend: Backend) -> float | None:
    """Of an object that is put for that and deleted. None where the store does not take it (it is full, we may only
    delete): gc has work to do all the same."""
    name = f"{WRITE_PROBE}-{secrets.token_hex(8)}"
    try:
        await backend.put_atomic(name, b"")
        try:
            return (await backend.stat(name)).modified
        finally:
            await backend.delete(name)
    except (StorageError, OSError):
        return None


async def _condemn(backend: Backend, saves: list[SaveObjects], before: object) -> dict[str, str]:
    """Take their leases away, then look once more; why some of them are kept after all.

    A save looks when its manifest is there, before it removes the image that was replaced, whether its lease is there
    and holds (`LiveLease.holds`); we look at the manifest when the lease is gone. By clocks that go alike, no lease holds
    that we found too old: a save that goes on has its manifest there before we look. By others, one of us sees the
    other, but where we come between the two halves of a refresh.
    """
    if not saves:
        return {}
    for save in saves:
        await backend.delete(lease_name(save.save_id))
    stands = await _look(backend, again=True)
    if stands is UNREADABLE:
        return dict.fromkeys((save.save_id for save in saves), "the manifest is being written")
    kept = {}
    for save in saves:
        if save.save_id == stands != before:
            kept[save.save_id] = "its manifest was written just now"
        elif (await lease_of(backend, save.save_id)) is not None:
            kept[save.save_id] = "its lease was refreshed just now"
    return kept


async def _take_torn(backend: Backend, torn: Torn, known: set[str]) -> str:
    """Delete the manifest that was found torn, while the leases are there that tell whoever comes after us what it is;
    why it stays, where it is not the same any more, or a save is there that is not ``known``, and may replace it."""
    try:
        if await backend.read_bytes(MANIFEST_NAME, limit=MANIFEST_LIMIT) != torn.stored:
            return "it was written just now"
    except ObjectNotFound:
        return ""
    if (await saves_at(backend)).keys() - known:
        return "a save has begun just now"
    await backend.delete(MANIFEST_NAME)
    return ""


def _is_loose(name: str) -> bool:
    """A temporary file, upload or probe of ours that no save id stands in. Any other is somebody else's."""
    return _LOOSE.fullmatch(name) is not None


def _is_probe(info: ObjectInfo) -> bool:
    return info.name.startswith(f"{WRITE_PROBE}-") and _is_loose(info.name) and not info.size


UNREADABLE = object()


@dataclass(frozen=True, slots=True)
class Torn:
    """A manifest of a save that was killed while it wrote it in place: its bytes."""

    stored: bytes


async def _look(backend: Backend, *, again: bool = False) -> object:
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


async def live_lease(backend: Backend, save: SaveObjects, clock: _Clock | None = None) -> str:
    """Why the save may still be running, "" where it is not. ``clock``: the store's; None: this machine's.

    A process that is seen to live protects its save whatever the clocks say, one that has ended protects nothing. Of
    any other the age of the last refresh counts: by the store's time of writing or, where something has set that
    back, by the holder's own word.
    """
    holder, clock = await lease_of(backend, save.save_id), clock or _Clock(time.time())
    if holder is None or holder.life == "ended":
        return ""
    if holder.life == "alive":
        return f"live lease{holder.words}, which is alive"
    try:
        modified = (await backend.stat(lease_name(save.save_id))).modified
    except ObjectNotFound:
        return ""
    if modified < holder.refreshed <= clock.now + LEASE_TTL:
        modified = holder.refreshed
    age = clock.now - modified
    if age > LEASE_TTL + clock.doubt:
        return ""
    return f"live lease{holder.words}, refreshed {max(0, age):.0f} s ago"


async def lease_of(backend: Backend, save_id: str) -> Holder | None:
    """By its name, not by a list: one that is made while the lease is refreshed may lack it."""
    try:
        return read_lease(await backend.read_bytes(lease_name(save_id), limit=LEASE_MAX))
    except ObjectNotFound:
        return None


async def left_by_others(backend: Backend, save_id: str) -> set[str]:
    """Save ids of what lies here for us to remove: saves that have left it, by their leases' word, and what they had
    replaced; neither ``save_id`` nor what stands or is protected."""
    saves, found = await saves_at(backend), set[str]()
    for other in saves:
        lease = await lease_of(backend, other)
        if lease is not None and lease.left:
            found |= {other, lease.replaced}
    stands = await _look(backend)
    if stands is UNREADABLE or isinstance(stands, Torn):
        return set()
    found -= {save_id, stands, ""}
    return {each for each in found if each in saves and not await live_lease(backend, saves[each])}


async def _take(
    backend: Backend, save: SaveObjects, *, dry_run: bool, now: float, reason: str
) -> list[GcItem]:
    items = []
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


def _too_young(save: SaveObjects, older_than: float, now: float) -> str:
    times = [info.modified for info in save.objects] + [upload.started for upload in save.uploads]
    young = older_than > 0 and now - max(times, default=0.0) < older_than
    return f"younger than {older_than:.0f} s" if young else ""


def _item(kind: str, where: str, size: int, age: float, reason: str, dry_run: bool) -> GcItem:
    removed = not reason and not dry_run
    return GcItem(kind, where, size, age, removed, reason or (DRY_RUN if dry_run else ""))
