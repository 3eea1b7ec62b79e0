"""What protects a save's objects from gc: its live lease, by the store's clock."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from ckptpipe.pipeline.image.holder import LEASE_MAX, Holder, read_lease
from ckptpipe.pipeline.image.layout import lease_name
from ckptpipe.storage_backends.abc import WRITE_PROBE, Backend
from ckptpipe.storage_backends.errors import ObjectNotFound, StorageError

LEASE_TTL = 900.0
"""Seconds after its last refresh for which a lease object protects its save (refreshed every 60), where its process
cannot be seen from here."""
CLOCK_DOUBT = 3600.0
"""Seconds more, where the store's clock could not be asked for and this machine's may be wrong."""


@dataclass(frozen=True, slots=True)
class StoreClock:
    """Unix seconds by the store's clock, and by how many it may be more."""

    now: float
    doubt: float = 0.0


def local_clock() -> StoreClock:
    """This machine's, taken for the store's."""
    return StoreClock(time.time())


async def store_clock(backend: Backend) -> StoreClock:
    """By an object that is put for that and deleted. This machine's, with doubt, where the store does not take it (it is
    full, we may only delete): gc has work to do all the same."""
    name = f"{WRITE_PROBE}-{secrets.token_hex(8)}"
    try:
        await backend.put_atomic(name, b"")
        try:
            return StoreClock((await backend.stat(name)).modified)
        finally:
            await backend.delete(name)
    except (StorageError, OSError):
        return StoreClock(time.time(), CLOCK_DOUBT)


async def live_lease(backend: Backend, save_id: str, clock: StoreClock | None = None) -> str:
    """Why the save may still be running, "" where it is not. ``clock``: the store's; None: this machine's.

    A process that is seen to live protects its save whatever the clocks say, one that has ended protects nothing. Of
    any other the age of the last refresh counts: by the store's time of writing or, where something has set that
    back, by the holder's own word.
    """
    holder, clock = await lease_of(backend, save_id), clock or local_clock()
    if holder is None or holder.life == "ended":
        return ""
    if holder.life == "alive":
        return f"live lease{holder.words}, which is alive"
    try:
        modified = (await backend.stat(lease_name(save_id))).modified
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
