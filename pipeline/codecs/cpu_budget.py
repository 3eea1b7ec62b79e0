"""How much of what passes may be coded before codecs take CPU time from the copies and writes beside them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

WINDOW_SECONDS = 0.1
WEIGHT = 0.5
"""Of the last window in the running averages."""
FEW_CPUS = 16
"""With more, copies and writes leave enough for codecs, and looking at all of them takes its time."""
USUAL_COST = 0.3e-9
"""CPU seconds a raw byte for copying, checksumming and writing, before it is measured."""


class CpuBudget:
    """Measures, over tenths of a second, what a raw byte costs without codecs, and what CPU time there is.

    ``codec_seconds``: what codecs have taken so far. The other arguments are clocks: wall, this process's CPU time, idle
    time of all its CPUs together (None where that is not known).
    """

    def __init__(
        self,
        cpus: int,
        codec_seconds: Callable[[], float],
        *,
        wall: Callable[[], float] = time.perf_counter,
        process: Callable[[], float] = time.process_time,
        idle: Callable[[], float | None] | None = None,
    ) -> None:
        self.cpus = cpus
        self.cost = USUAL_COST
        self.available = float(cpus)
        self._codec, self._wall, self._process = codec_seconds, wall, process
        self._idle = idle or idle_seconds
        self._pace = 0.0  # raw bytes a second that pass, 0 before it is known
        self.begin()

    def begin(self) -> None:
        """Only what happens from now on counts."""
        self._marks = self._read()
        self._raw = 0

    @property
    def plenty(self) -> bool:
        """Whether there are so many CPUs that codecs are in nobody's way."""
        return self.cpus > FEW_CPUS

    def _read(self) -> tuple[float, float, float, float | None]:
        return self._wall(), self._process(), self._codec(), self._idle()

    def passed(self, raw_bytes: int) -> None:
        """So many more raw bytes have gone by."""
        self._raw += raw_bytes
        if self.plenty or self._wall() - self._marks[0] < WINDOW_SECONDS:
            return
        now = self._read()
        wall, process, codec = (now[i] - self._marks[i] for i in range(3))  # type: ignore[operator]
        used = process / wall
        idle = self.cpus - used
        if now[3] is not None and self._marks[3] is not None:
            idle = (now[3] - self._marks[3]) / wall
        # Others are taken to leave us half of the CPUs, also where they use more of them while we do not.
        available = max(min(used + max(idle, 0.0), self.cpus), self.cpus / 2)
        self.available += WEIGHT * (available - self.available)
        self._pace += WEIGHT * (self._raw / wall - self._pace)
        if self._raw:
            self.cost += WEIGHT * (max(process - codec, 0.0) / self._raw - self.cost)
        self._marks, self._raw = now, 0

    def share(self, seconds: float, ratio: float, sink_rate: float) -> float:
        """The share of raw bytes that may be coded: then codecs, copies and a sink that is full use all CPUs there are.

        ``seconds``: CPU time of a codec a raw byte. With a share x the sink lets sink_rate / (1 - x (1 - 1/ratio)) raw
        bytes a second pass, the CPUs available / (cost + x seconds); they meet here. 0 where the sink's own work takes
        all CPUs already: coding would only slow it down.
        """
        if self.plenty:
            return 1.0
        # A sink of which too much is expected does not get more than passes, whatever that costs.
        pace = min(sink_rate, self._pace) if self._pace else sink_rate
        left = self.available - pace * self.cost
        full = sink_rate * seconds + self.available * (1 - 1 / ratio)
        return min(1.0, max(0.0, left / full)) if full > 0 else 1.0


def idle_seconds() -> float | None:
    """Seconds for which the CPUs that this process may use have been idle, together (proc_stat(5)); None where that
    cannot be known."""
    wanted = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    try:
        with open("/proc/stat", encoding="ascii", errors="replace") as file:
            for line in file:
                if not line.startswith("cpu"):
                    break
                name, *fields = line.split()
                if name in wanted:
                    ticks += int(fields[3]) + int(fields[4])
    except (OSError, ValueError, IndexError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK")
