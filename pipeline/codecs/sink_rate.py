"""What a sink takes, measured while it is given chunks: bytes on their way into it, and how fast they leave."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ckptpipe.pyx.staging import Lease, lease_range

WINDOW_SECONDS = 0.25
WINDOW_BYTES = 64 << 20
"""A rate is that of the last quarter of a second, and of at least so many bytes (a store answers for parts)."""
PRIOR_BYTES = 8 << 20
"""The guess counts like so many bytes in the first window, so that one hiccup at the start says little."""


class SinkRate:
    """Stored bytes between a stage and the end of every sink behind it.

    ``rate``: bytes a second that the sinks took while they had something to take; ``guess`` until that is known.
    ``depth``: bytes that they need on their way to be as fast as they can, and no more than they take in ``latency``
    seconds. ``fixed``: the guess is to be believed, whatever is measured. Used on one loop.
    """

    def __init__(
        self,
        guess: float,
        depth: int,
        *,
        latency: float = 1.0,
        fixed: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.guess = guess
        self.depth = depth
        self.latency = latency
        self.fixed = fixed
        self.outstanding = 0
        self.delivered = 0
        self.on_change: Callable[[], None] | None = None
        self._clock = clock
        self._busy = 0.0  # seconds for which something was outstanding, up to `_since`
        self._since = 0.0
        self._marks: deque[tuple[float, int]] = deque()  # (busy seconds, delivered)
        self._rate = 0.0

    @property
    def known(self) -> bool:
        return self.fixed or self._rate > 0

    @property
    def rate(self) -> float:
        return self.guess if self.fixed else self._rate or self.guess

    @property
    def busy_seconds(self) -> float:
        """For how long the sinks have had something to take."""
        return self._busy

    @property
    def lag(self) -> float:
        """Seconds for which the sinks have enough to do without being given more."""
        return max(0.0, self.outstanding / self.rate - min(self.depth / self.rate, self.latency))

    def sent(self, lease: Lease, nbytes: int) -> Lease:
        """``lease`` as it is to be sent on: ``nbytes`` of it are outstanding until nobody holds it any more."""
        now = self._clock()
        if not self.outstanding:
            self._since = now
            if not self._marks:
                self._marks.append((self._busy, self.delivered))
        self.outstanding += nbytes

        def gone() -> None:
            lease.release()
            self._taken(nbytes)

        return lease_range(lease.address, lease.nbytes, None, on_release=gone, readonly=lease.readonly)

    def _taken(self, nbytes: int) -> None:
        now = self._clock()
        self._busy += now - self._since
        self._since = now
        self.outstanding -= nbytes
        self.delivered += nbytes
        marks = self._marks
        marks.append((self._busy, self.delivered))
        while len(marks) > 2 and self._is_enough(*marks[1]):
            marks.popleft()
        prior = 0 if marks[0][1] else PRIOR_BYTES
        seconds = self._busy - marks[0][0] + prior / self.guess
        if seconds > 0:
            self._rate = (self.delivered - marks[0][1] + prior) / seconds
        if self.on_change is not None:
            self.on_change()

    def _is_enough(self, busy: float, delivered: int) -> bool:
        """Whether the time since this mark gives a rate."""
        return self._busy - busy >= WINDOW_SECONDS and self.delivered - delivered >= WINDOW_BYTES
