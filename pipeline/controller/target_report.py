"""What is known of a process that can be captured: its state, who works on it, and the way back."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TargetReport:
    """``state``: RUNNING, LOCKED, … as the driver says. ``busy``: who works on it, "" where nobody does.

    ``phase``, ``capture``, ``images``: of the checkpoint that it is in, as the one who made it wrote down.
    ``holder``: pid of the process that holds the driver's operation (custom storage), 0 where there is none;
    ``holder_lives`` whether it still does. ``advice``: what can be done, "" where nothing has to be.
    """

    pid: int
    name: str
    state: str
    meaning: str
    busy: str = ""
    phase: str = ""
    capture: str = ""
    images: tuple[str, ...] = ()
    holder: int = 0
    holder_lives: bool = False
    advice: str = ""
    simulated: bool = False

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
