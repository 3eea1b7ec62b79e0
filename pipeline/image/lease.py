"""The live lease object of a save that runs in this process."""

from __future__ import annotations

import time
from contextlib import suppress

from ckptpipe.pipeline.image.holder import LEASE_MAX, holder_facts, is_lease_of, lease_facts
from ckptpipe.pipeline.image.layout import lease_name
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.storage_backends.abc import Backend
from ckptpipe.storage_backends.errors import ObjectNotFound

LEASE_HOLDS = 840.0
"""Seconds from the beginning of a refresh for which its save may count on it. A minute less than gc waits: a store tells
times in whole seconds, and clocks do not run alike."""


class LiveLease:
    """What tells gc, here and on other machines, that the save runs: `put` at the beginning and again every minute."""

    def __init__(self, backend: Backend, save_id: str) -> None:
        self.name = lease_name(save_id)
        self._backend = backend
        self._own = holder_facts(save_id, time.time())
        self._refreshed = boot_seconds()

    async def put(self) -> None:
        """A refresh counts from when it began, for a store may have noted any time since; and only where it has ended
        while the one before it held: else gc may have looked in between, and have begun to take the save away."""
        begun = boot_seconds()
        await self._backend.put_atomic(self.name, lease_facts(self._own))
        if self.holds():
            self._refreshed = begun

    @property
    def age(self) -> float:
        """Seconds since the last refresh that counts began, those in which the machine was suspended among them."""
        return boot_seconds() - self._refreshed

    def holds(self) -> bool:
        """Whether nobody who goes by the store's clock can have found it too old yet. Once it does not, it never does
        again."""
        return self.age <= LEASE_HOLDS

    async def stands(self) -> bool:
        """Whether it is there, and still ours."""
        try:
            stored = await self._backend.read_bytes(self.name, limit=LEASE_MAX)
        except ObjectNotFound:
            return False
        return is_lease_of(stored, self._own)

    async def give_back(self) -> None:
        """It is gone; or, where the store refuses that, says at least that it protects nothing: this process may live
        on, and gc would believe it."""
        try:
            await self._backend.delete(self.name)
        except (CkptpipeError, OSError):
            with suppress(CkptpipeError, OSError):
                await self.leave()
            raise

    async def leave(self, replaced: str = "") -> None:
        """Leave what the save stored, and the save that it had replaced, to whoever cleans up here."""
        await self._backend.put_atomic(self.name, lease_facts(self._own, left=True, replaced=replaced))


def boot_seconds() -> float:
    """By a clock that nobody sets, and that goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
