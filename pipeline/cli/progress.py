"""Progress of a run: a bar on a terminal, a line every few seconds otherwise. Both on standard error.

The run's callback only stores the latest numbers: a thread of the display's own writes, so that a terminal
that does not take its output (Ctrl-S, a full pipe) never holds up the event loop.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckptpipe.pipeline.cli.first_signals import HEARD, Raised
from ckptpipe.pipeline.cli.text import duration
from ckptpipe.pipeline.progress import Progress
from ckptpipe.storage_backends.quantities import format_bytes, format_rate

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

LINE_SECONDS = 5.0
BAR_SECONDS = 0.125
WINDOW_SECONDS = 10.0  # over which the rate is taken


class Display:
    """Base, and the display that shows nothing."""

    latest: Progress | None = None

    def update(self, progress: Progress) -> None:
        self.latest = progress

    def say(self, text: str) -> None:
        print(f"ckptpipe: {text}", file=sys.stderr, flush=True)


class _Threaded(Display):
    interval = LINE_SECONDS

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="ckptpipe-progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        # A terminal that is stopped could keep the thread for ever; it is a daemon then.
        self._thread.join(timeout=2.0)

    def _loop(self) -> None:
        while not self._ended.wait(self.interval):
            self.refresh()

    def refresh(self) -> None:
        raise NotImplementedError


class Lines(_Threaded):
    """``save: 1.2 GiB of 4.0 GiB (30 %), 812.0 MB/s, 3.4 s left``"""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self._rate = Rate()
        self._phase = phase

    def refresh(self) -> None:
        latest = self.latest
        if latest is not None:
            self._rate.add(latest)
            print(line(latest, self._rate.per_second), file=sys.stderr, flush=True)


class Bar(_Threaded):
    """A bar with share, bytes, rate and time left."""

    interval = BAR_SECONDS

    def __init__(self, phase: str) -> None:
        super().__init__()
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._rate = Rate()
        self._phase = phase
        self._console = Console(stderr=True)
        self._bar: RichProgress = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            console=self._console,
            auto_refresh=False,
            expand=True,
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
        )
        self._task: TaskID = self._bar.add_task(phase, total=None, numbers="")

    def start(self) -> None:
        self._bar.start()
        super().start()

    def stop(self) -> None:
        super().stop()
        if not self._thread.is_alive():
            self.refresh()
            self._bar.stop()

    def refresh(self) -> None:
        latest = self.latest
        if latest is not None:
            self._rate.add(latest)
            numbers = line(latest, self._rate.per_second).partition(": ")[2]
            self._bar.update(
                self._task, completed=latest.done_bytes, total=latest.total_bytes, numbers=numbers
            )
        self._bar.refresh()

    def say(self, text: str) -> None:
        self._console.print(f"ckptpipe: {text}", markup=False, highlight=False)


class Rate:
    """Bytes a second over the last few seconds."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque([(0.0, 0)])

    def add(self, progress: Progress) -> None:
        self._points.append((progress.seconds, progress.done_bytes))
        while len(self._points) > 2 and progress.seconds - self._points[1][0] > WINDOW_SECONDS:
            self._points.popleft()

    @property
    def per_second(self) -> float:
        (start, before), (end, after) = self._points[0], self._points[-1]
        return max(0, after - before) / (end - start) if end > start else 0.0


def line(progress: Progress, rate: float) -> str:
    """One state of a run, in words."""
    done, total = progress.done_bytes, progress.total_bytes
    parts = [f"{progress.phase}: {format_bytes(done)}"]
    if total:
        parts[0] += f" of {format_bytes(total)} ({min(100, done * 100 // total)} %)"
    parts.append(format_rate(rate))
    if total and done < total:
        parts.append(f"{_time_left((total - done) / rate)} left" if rate > 0 else "time left unknown")
    return ", ".join(parts)


def _time_left(seconds: float) -> str:
    """In whole seconds: nobody reads a tenth of one in time."""
    return f"{max(1, round(seconds))} s" if seconds < 99.5 else duration(seconds)


@contextmanager
def display(phase: str, *, quiet: bool, lines: bool = True) -> Iterator[Display]:
    """A bar where standard error is a terminal, else lines (unless not ``lines``), else nothing."""
    shown: Display = Display()
    if not quiet:
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            shown = Bar(phase)
        elif lines:
            shown = Lines(phase)
    with Raised(*HEARD):
        if isinstance(shown, _Threaded):
            shown.start()
        try:
            yield shown
        finally:
            if isinstance(shown, _Threaded):
                shown.stop()
