"""What a committed save removes: the image that it replaced; or itself, where another save replaced it at once."""

from __future__ import annotations

from ckptpipe.pipeline.errors import ImageCorrupt, UnsupportedImage
from ckptpipe.pipeline.image.layout import MANIFEST_NAME
from ckptpipe.pipeline.image.lease import LiveLease
from ckptpipe.pipeline.image.leftovers import left_by_others, remove_save, save_id_of
from ckptpipe.pipeline.image.manifest import MANIFEST_LIMIT, digest_of
from ckptpipe.pipeline.image.protection import lease_of
from ckptpipe.pipeline.image.removal import Removal
from ckptpipe.storage_backends.abc import Backend
from ckptpipe.storage_backends.errors import ObjectNotFound


async def settle(
    backend: Backend, lease: LiveLease, save_id: str, digest: str, *, overwrites: bool, replaced: str
) -> str:
    """Give the lease back, then remove what no manifest names any more; what there is to say of it, or "".

    ``digest``: of the save's manifest; ``replaced``: save id of the image that it replaced, "" where it knows of none.
    Saves that overwrite one image at once may not know of each other: each looks what stands, then puts its own
    manifest, and all but the last have been replaced by one that knows only of the image before them. Such a one must
    not remove what it replaced, which its successor may still put back when it fails elsewhere. It says in its lease
    what it leaves, and then looks for the successor's lease; the successor gives that back and then looks for what was
    left. One sees the other.
    """
    removal = Removal()
    stands = await _stands(backend, save_id, digest)
    if stands in (save_id, replaced, ""):  # a store may show for a while what was there before
        await removal.step(lease.give_back())
        removable = {replaced}
    else:
        await removal.step(lease.leave(replaced))
        successor = await lease_of(backend, stands)
        ended = successor is None or successor.life == "ended"
        if not ended or await _stands(backend, save_id, digest) != stands:
            removal.end()
            return (
                f"{backend.url} was overwritten at once by another save, which removes what this one stored; "
                f"should it fail to, do: ckptpipe gc {backend.url}"
            )
        removable = {replaced, save_id}
    if overwrites:
        removable |= await left_by_others(backend, save_id)
    for each in sorted(removable - {""}):
        await removal.step(remove_save(backend, each))
    removal.end()
    return ""


async def _stands(backend: Backend, save_id: str, digest: str) -> str:
    """The save id of the manifest that is there, "" where that cannot be told."""
    try:
        stored = await backend.read_bytes(MANIFEST_NAME, limit=MANIFEST_LIMIT)
        return save_id if digest_of(stored) == digest else save_id_of(stored)
    except (ObjectNotFound, ImageCorrupt, UnsupportedImage):
        return ""
