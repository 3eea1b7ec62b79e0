"""What a stage is: takes chunks from one edge, passes them on through an outlet."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptpipe.pipeline.edge import Edge, Outlet

if TYPE_CHECKING:
    from ckptpipe.pipeline.sinks.abc import Sink


class Stage(ABC):
    """Runs until its edge ends, then ends its outlet. A chunk it holds when it fails is released."""

    name: str

    def decisions(self, names: Sequence[str]) -> list[dict[str, object]]:
        """What a stage that chooses encodings chose for each stream, with its numbers; ``names`` are the streams'."""
        return []

    @abstractmethod
    async def run(self, edge: Edge, outlet: Outlet) -> None: ...


class ChoosingStage(Stage):
    """A stage that chooses encodings by what the sinks behind it take."""

    def __init__(self) -> None:
        self._sinks: list[Sink] = []
        self._limit = math.inf

    def feeds(self, sink: Sink, limit: float = math.inf) -> None:
        """``sink`` is behind this stage, with at most ``limit`` bytes a second between them."""
        self._sinks.append(sink)
        self._limit = min(self._limit, limit)
