"""What a stage is: takes chunks from one edge, passes them on through an outlet."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from ckptpipe.pipeline.chunk import Chunk
from ckptpipe.pipeline.codecs import CodecChoice
from ckptpipe.pipeline.edge import Edge, Outlet

if TYPE_CHECKING:
    from ckptpipe.pipeline.sinks.abc import Sink


class Stage(ABC):
    """Runs until its edge ends, then ends its outlet. A chunk it holds when it fails is released."""

    name: str

    @abstractmethod
    async def run(self, edge: Edge, outlet: Outlet) -> None: ...


async def pass_each(edge: Edge, outlet: Outlet, treat: Callable[[Chunk], Awaitable[None]]) -> None:
    """Treat each chunk of ``edge`` and pass it on, until the edge ends or nobody reads any more. A chunk that is held
    when ``treat`` fails is released."""
    while (chunk := await edge.get()) is not None:
        try:
            await treat(chunk)
        except BaseException:
            chunk.release()
            raise
        await outlet.emit(chunk)
        if outlet.dropped:
            edge.drop()
            return


class CodingStage(Stage):
    """A stage behind which chunks are encoded: what a sink says of it in manifest and result.

    ``choice``: what was asked for. ``compressed`` and ``raw``: chunks that came out so, those of zeros in neither.
    """

    def __init__(self, name: str, choice: CodecChoice, backend: str = "cpu") -> None:
        """``backend``: what encodes."""
        self.name = name
        self.choice = choice
        self.compressed = 0
        self.raw = 0
        self._backend = backend

    @property
    def backend(self) -> str:
        """What ran, "" where nothing was encoded."""
        return self._backend if self.compressed else ""

    def decisions(self, names: Sequence[str]) -> list[dict[str, object]]:
        """What a stage that chooses chose for each stream, with its numbers; ``names`` are the streams'."""
        return []


class ChoosingStage(CodingStage):
    """A stage that chooses encodings by what the sinks behind it take."""

    def __init__(self, name: str, choice: CodecChoice, backend: str = "cpu") -> None:
        super().__init__(name, choice, backend)
        self._sinks: list[Sink] = []
        self._limit = math.inf

    def feeds(self, sink: Sink, limit: float = math.inf) -> None:
        """``sink`` is behind this stage, with at most ``limit`` bytes a second between them."""
        self._sinks.append(sink)
        self._limit = min(self._limit, limit)
