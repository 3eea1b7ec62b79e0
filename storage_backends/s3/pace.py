"""How many requests may be under way: halved when the store asks to slow down, slowly restored."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType


class Pace:
    """An async semaphore whose width adapts (additive increase, multiplicative decrease). FIFO.

    Used as ``async with pace:``; `slow_down` once per throttled answer, `went_well` once per good one.
    """

    def __init__(self, width: int) -> None:
        self.most = width
        self.width = float(width)
        self.under_way = 0
        self.slowdowns = 0
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._hold_until = 0.0  # one halving a burst: what was sent before it says nothing new

    async def __aenter__(self) -> None:
        if not self._waiters and self.under_way < self._slots():
            self.under_way += 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except BaseException:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif not waiter.cancelled():
                self._leave()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def slow_down(self) -> None:
        now = asyncio.get_running_loop().time()
        self.slowdowns += 1
        if now >= self._hold_until:
            self.width = max(1.0, self.width / 2)
            self._hold_until = now + 1.0

    def went_well(self) -> None:
        if self.width < self.most:
            self.width = min(float(self.most), self.width + 1 / self.width)
            self._wake()

    def _slots(self) -> int:
        return max(1, int(self.width))

    def _leave(self) -> None:
        self.under_way -= 1
        self._wake()

    def _wake(self) -> None:
        while self._waiters and self.under_way < self._slots():
            waiter = self._waiters.popleft()
            if not waiter.done():
                self.under_way += 1
                waiter.set_result(None)
