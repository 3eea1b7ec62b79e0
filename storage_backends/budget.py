"""A budget of bytes in flight, shared by all writers of a backend."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class _Waiter:
    nbytes: int
    owner: object
    granted: asyncio.Future[None]


class ByteBudget:
    """First come, first served. A request larger than the whole budget passes alone.

    Cancel-safe: a cancelled waiter gives its place up, and bytes granted in the same moment go back.
    """

    def __init__(self, limit: int) -> None:
        if limit <= 0:
            raise ValueError(f"a budget of {limit} bytes lets nothing pass")
        self.limit = limit
        self.held = 0
        self.peak = 0  # most bytes ever held together
        self._waiters: deque[_Waiter] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def _fits(self, nbytes: int) -> bool:
        return self.held == 0 or self.held + nbytes <= self.limit

    def _take(self, nbytes: int) -> None:
        self.held += nbytes
        self.peak = max(self.peak, self.held)

    async def acquire(self, nbytes: int, owner: object = None) -> None:
        """Hold ``nbytes`` more; suspends until they fit and all earlier requests have passed."""
        if not self._waiters and self._fits(nbytes):
            self._take(nbytes)
            return
        waiter = _Waiter(nbytes, owner, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            await waiter.granted
        except BaseException:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._grant()
            elif not waiter.granted.cancelled() and waiter.granted.exception() is None:
                self.release(nbytes)
            raise

    def release(self, nbytes: int) -> None:
        if nbytes > self.held:
            raise RuntimeError(f"{nbytes} bytes given back to a budget of which {self.held} are held")
        self.held -= nbytes
        self._grant()

    def evict(self, owner: object, error: BaseException) -> None:
        """Fail what ``owner`` still waits for: its writer is being aborted."""
        for waiter in [item for item in self._waiters if item.owner is owner]:
            self._waiters.remove(waiter)
            if not waiter.granted.done():
                waiter.granted.set_exception(error)
        self._grant()

    def _grant(self) -> None:
        while self._waiters and (self._waiters[0].granted.done() or self._fits(self._waiters[0].nbytes)):
            waiter = self._waiters.popleft()
            if not waiter.granted.done():
                self._take(waiter.nbytes)
                waiter.granted.set_result(None)
