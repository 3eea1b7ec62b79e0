"""Seconds for a part of a benchmark: what does not fit is not begun, so that nothing is cut in the middle.

    budget = Budget(120)
    for variant in budget.variants(made):
        times = await budget.cycles(3, lambda: measured(variant))

Cycles are saved first, so that every variant gets one; then the last variants are left out. `notes` says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")


class Budget:
    """Of ``seconds`` from now on. What a variant costs is learnt from those before it."""

    def __init__(self, seconds: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._until = clock() + seconds
        self._cost: dict[
            object, float
        ] = {}  # seconds per unit of weight of a variant with one cycle, by kind
        self._after: list[tuple[object, float]] = []  # kinds and weights of the variants to come
        self._extra = 0.0  # seconds of further cycles
        self._saved = 0
        self._left_out: list[str] = []

    def variants(
        self,
        made: Sequence[T],
        *,
        weight: Callable[[T], float] = lambda _: 1.0,
        kind: Callable[[T], object] = lambda _: "",
        name: Callable[[T], str] = str,
    ) -> Iterator[T]:
        """Those of ``made`` for which there is time; the first one always. ``weight``: what its seconds grow with;
        ``kind``: variants that cost alike."""
        for at, variant in enumerate(made):
            self._after = [(kind(each), weight(each)) for each in made[at + 1 :]]
            if at and self._expected(kind(variant), weight(variant)) > self.left:
                self._left_out.append(name(variant))
                continue
            began, self._extra = self._clock(), 0.0
            yield variant
            spent = (self._clock() - began - self._extra) / weight(variant)
            self._cost[kind(variant)] = max(self._cost.get(kind(variant), 0.0), spent)
        self._after = []

    async def cycles(self, count: int, once: Callable[[], Awaitable[U]]) -> list[U]:
        """What ``once`` gives ``count`` times, or at least once, where more would take what variants to come need for
        a cycle each."""
        made: list[U] = []
        seconds = 0.0
        while len(made) < count and (not made or self._more(seconds)):
            began = self._clock()
            made.append(await once())
            seconds = self._clock() - began
            self._extra += seconds if len(made) > 1 else 0.0
        return made

    def _more(self, seconds: float) -> bool:
        fits = self.left >= seconds + sum(self._expected(*each) for each in self._after)
        self._saved += not fits
        return fits

    @property
    def left(self) -> float:
        return self._until - self._clock()

    @property
    def notes(self) -> list[str]:
        found = []
        if self._saved:
            found.append(f"fewer cycles of {self._saved} variants, to keep within {self.seconds:g} s")
        if self._left_out:
            found.append(f"left out, to keep within {self.seconds:g} s: {', '.join(self._left_out)}")
        return found

    def _expected(self, kind: object, weight: float) -> float:
        return weight * self._cost.get(kind, max(self._cost.values(), default=0.0))
