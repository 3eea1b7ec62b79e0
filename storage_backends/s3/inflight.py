"""What the writers of one backend hold together: a budget by the leases' footprint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Inflight:
    """Counts what is held; writers wait here while it is too much and something is on its way out.

    ``held`` counts open parts too. A writer never waits when nothing is being sent: that wait would not end.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.peak = 0
        self.sending = 0  # parts
        self.writers = 0  # objects that are being written
        self._changed = asyncio.Event()

    def open_limit(self) -> int:
        """Footprint that one writer's unfinished part may keep: half of all goes to parts under way."""
        return self.limit // (2 * max(1, self.writers))

    def hold(self, nbytes: int) -> None:
        self.held += nbytes
        self.peak = max(self.peak, self.held)

    def drop(self, nbytes: int) -> None:
        self.held -= nbytes
        self._changed.set()

    def begin(self) -> None:
        self.sending += 1

    def end(self) -> None:
        self.sending -= 1
        self._changed.set()

    def wake(self) -> None:
        """Writers look again: one of them has failed."""
        self._changed.set()

    async def room(self, stop: Callable[[], bool]) -> None:
        """Suspend while more than ``limit`` is held and parts are being sent; ``stop()`` true ends it too."""
        while self.held > self.limit and self.sending and not stop():
            self._changed.clear()
            await self._changed.wait()
