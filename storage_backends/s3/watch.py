"""A deadline that moves as long as bytes do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_LOOKS = 4  # a time-out: progress is looked at by a timer, not counted at every read and write


class Watch:
    """Inside ``async with asyncio.timeout(seconds) as deadline``: puts it off while ``moved()`` changes."""

    def __init__(self, moved: Callable[[], int], deadline: asyncio.Timeout, seconds: float) -> None:
        self._moved = moved
        self._deadline = deadline
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._seen = moved()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._arm()

    def __exit__(self, *exc: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        self._timer = self._loop.call_later(self._seconds / _LOOKS, self._look)

    def _look(self) -> None:
        moved = self._moved()
        if moved != self._seen and not self._deadline.expired():
            self._seen = moved
            self._deadline.reschedule(self._loop.time() + self._seconds)
        self._arm()
