"""Progress of a run, as told to whoever shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """``phase``: save | restore | verify | copy. ``total_bytes`` None where the source has no known size."""

    phase: str
    done_bytes: int  # raw bytes that are through the graph (durable on every sink that goes on)
    total_bytes: int | None
    seconds: float


ProgressCallback = Callable[[Progress], None]
"""Called on the loop's thread, at most ten times a second, and once at the end. Must not block."""
