"""The live lease object of a save that runs in this process."""

from __future__ import annotations

import time
from contextlib import suppress

from ckptpipe.pipeline.image.holder import LEASE_MAX, is_lease_of, lease_facts
from ckptpipe.pipeline.image.layout import lease_name
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.storage_backends.abc import Backend
from ckptpipe.storage_backends.errors import ObjectNotFound


class LiveLease:
    """What tells gc, here and on other machines, that the save runs: `put` at the beginning and again every minute."""

    def __init__(self, backend: Backend, save_id: str) -> None:
        self.name = lease_name(save_id)
        self._backend = backend
        self._save_id = save_id
        self._started = time.time()

    async def put(self) -> None:
        await self._backend.put_atomic(self.name, lease_facts(self._save_id, self._started))

    async def stands(self) -> bool:
        """Whether it is there, and still ours."""
        try:
            stored = await self._backend.read_bytes(self.name, limit=LEASE_MAX)
        except ObjectNotFound:
            return False
        return is_lease_of(stored, self._save_id, self._started)

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
        left = lease_facts(self._save_id, self._started, left=True, replaced=replaced)
        await self._backend.put_atomic(self.name, left)
