"""gc: what crashed and overwritten saves left at an image's URL is taken away, and why what stays does."""

from __future__ import annotations

from ckptpipe.pipeline.image.layout import MANIFEST_NAME, lease_name
from ckptpipe.pipeline.image.leftovers import (
    UNREADABLE,
    SaveObjects,
    Torn,
    by_save,
    in_order,
    is_loose,
    is_probe,
    look,
    saves_at,
    stripe_alone,
)
from ckptpipe.pipeline.image.manifest import MANIFEST_LIMIT
from ckptpipe.pipeline.image.protection import lease_of, live_lease, local_clock, store_clock
from ckptpipe.pipeline.result import DRY_RUN, GcItem
from ckptpipe.storage_backends.abc import Backend
from ckptpipe.storage_backends.errors import ObjectNotFound

STRIPE_ALONE = (
    "a stripe of an image whose first directory is not in the URL: name all of them, or, where that one is gone "
    "for good, remove it with --orphan-stripes"
)


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
    saves = by_save(objects, uploads)
    loose = [SaveObjects("", [], [upload]) for upload in uploads if is_loose(upload.name)]
    loose += [SaveObjects("", [info], []) for info in objects if is_probe(info)]
    current = await look(backend)
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
    clock = await store_clock(backend) if asks else local_clock()

    reasons: dict[str, str] = {}
    for save_id in saves:
        reasons[save_id] = (
            "the manifest cannot be read"
            if current is UNREADABLE
            else await live_lease(backend, save_id, clock)
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
    stands = await look(backend, again=True)
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


async def _take(
    backend: Backend, save: SaveObjects, *, dry_run: bool, now: float, reason: str
) -> list[GcItem]:
    items = []
    lease = lease_name(save.save_id) if save.save_id else ""
    for info in in_order(save):
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
