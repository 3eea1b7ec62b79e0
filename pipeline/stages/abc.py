"""What a stage is: takes chunks from one edge, passes them on through an outlet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ckptpipe.pipeline.edge import Edge, Outlet


class Stage(ABC):
    """Runs until its edge ends, then ends its outlet. A chunk it holds when it fails is released."""

    name: str

    def decisions(self, names: Sequence[str]) -> list[dict[str, object]]:
        """What a stage that chooses encodings chose for each stream, with its numbers; ``names`` are the streams'."""
        return []

    @abstractmethod
    async def run(self, edge: Edge, outlet: Outlet) -> None: ...
