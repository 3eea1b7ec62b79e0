"""What the GPU did when: spans of kernels and copies that torch's profiler (CUPTI) saw, how busy they were, and where the
link stood still. For benchmarks; without torch there is no timeline, and they do without."""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

LONGEST = 10  # gaps that are told


class Span(NamedTuple):
    """Microseconds; the name of a kernel, or "Memcpy DtoH (…)" and the like."""

    start: float
    end: float
    name: str

    @property
    def is_fetch(self) -> bool:
        return "DtoH" in self.name

    @property
    def is_kernel(self) -> bool:
        return "emcpy" not in self.name and "emset" not in self.name


class Gap(NamedTuple):
    """A time without a copy to the host: microseconds, and how long each name ran in it."""

    start: float
    end: float
    within: dict[str, float]


def busy(spans: Sequence[Span]) -> float:
    """Microseconds in which at least one of them ran."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans):
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total


def longest_first(times: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(times.items(), key=lambda each: -each[1]))


def gaps(spans: Sequence[Span]) -> list[Gap]:
    """Between copies to the host, the longest first."""
    fetches = sorted(span for span in spans if span.is_fetch)
    others = [span for span in spans if not span.is_fetch]
    found, until = [], fetches[0].end if fetches else 0.0
    for fetch in fetches:
        if fetch.start > until:
            within: defaultdict[str, float] = defaultdict(float)
            for other in others:
                shared = min(other.end, fetch.start) - max(other.start, until)
                if shared > 0:
                    within[other.name] += shared
            found.append(Gap(until, fetch.start, longest_first(within)))
        until = max(until, fetch.end)
    return sorted(found, key=lambda gap: gap.start - gap.end)


def told(spans: Sequence[Span]) -> str:
    """How busy kernels and copies were, each name's share, and the longest gaps, a line each."""
    if not spans:
        return "nothing ran on the GPU"
    begin, end = min(span.start for span in spans), max(span.end for span in spans)
    fetches = [span for span in spans if span.is_fetch]
    between = gaps(spans)
    idle = sum(gap.end - gap.start for gap in between)
    first = min((span.start for span in fetches), default=end) - begin
    lines = [
        f"span {(end - begin) / 1e3:.2f} ms, DtoH busy {busy(fetches) / 1e3:.2f} ms, "
        f"kernels busy {busy([span for span in spans if span.is_kernel]) / 1e3:.2f} ms; first DtoH after {first:.0f} us; "
        f"{len(between)} gaps between DtoH copies, {idle / 1e3:.2f} ms together"
    ]
    times, counts = defaultdict[str, float](float), Counter(span.name[:60] for span in spans)
    for span in spans:
        times[span.name[:60]] += span.end - span.start
    for name, time in longest_first(times).items():
        lines.append(f"  {time / 1e3:9.3f} ms {counts[name]:6d} x {time / counts[name]:8.1f} us  {name}")
    for gap in between[:LONGEST]:
        ran = ", ".join(f"{name[:40]} {time:.0f}" for name, time in gap.within.items())
        lines.append(f"  gap of {gap.end - gap.start:.0f} us at {gap.start - begin:.0f}: {ran or 'nothing'}")
    return "\n".join(lines)


def available() -> bool:
    return importlib.util.find_spec("torch") is not None


@contextmanager
def recorded(spans: list[Span]) -> Iterator[None]:
    """Adds what the GPU does meanwhile to ``spans``, when all of it is done."""
    torch: Any = importlib.import_module("torch")
    profiler: Any = importlib.import_module("torch.profiler")
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
        yield
        torch.cuda.synchronize()
    spans.extend(
        Span(event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if str(event.device_type).endswith("CUDA")
    )
