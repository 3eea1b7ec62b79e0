"""A compress stage whose work the source has done already: it counts, and knows what was decided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptpipe.pipeline.chunk import Chunk
from ckptpipe.pipeline.codecs import CodecChoice
from ckptpipe.pipeline.codecs.choices_made import ChoicesMade
from ckptpipe.pipeline.edge import Edge, Outlet
from ckptpipe.pipeline.stages.abc import ChoosingStage, pass_each

if TYPE_CHECKING:
    from ckptpipe.pipeline.codecs.decision import Decision
    from ckptpipe.pipeline.codecs.encoding import Encoding


MEMORY_RATE = 20e9
"""Bytes a second into host memory that is kept (tmpfs): CPUs copy them there. A GPU's codec is faster than that."""


class EncodedStage(ChoosingStage):
    """Stands where a compress stage stood, and takes chunks that were encoded before they left the GPU.

    A chunk without planes is one that the codec was tried on in vain: it is stored raw, and not tried again.
    """

    def __init__(self, name: str, choice: CodecChoice, backend: str) -> None:
        """``backend``: what encodes, for the result."""
        super().__init__(name, choice, backend)
        self._shown: dict[int, bool] = {}  # whether the decision that a stream shows compresses it
        self._made = ChoicesMade()
        self.piece_chunks = 1  # of a stream, that were decided together
        # Of an auto, by stream and first chunk of a piece.
        self._encodings: dict[tuple[int, int], Encoding] = {}

    def sink_rate(self) -> float:
        """Stored bytes a second that the sinks are thought to take; infinite where they keep nothing."""
        rates = [self._limit]
        for sink in self._sinks:
            hint = sink.rate_hint().rate
            kept = not sink.url.startswith("null:")
            rates.append(min(hint, MEMORY_RATE) if kept else hint)
        return min(rates)

    def decided(self, stream: int, chunk: int, decision: Decision) -> None:
        """Of the piece of a stream that begins with ``chunk``. A stream shows the first that compresses."""
        self._encodings[stream, chunk] = decision.encoding
        if chunk == 0 or (decision.compresses and not self._shown.get(stream)):
            self._shown[stream] = decision.compresses
            self._made.decided(stream, decision)

    def decisions(self, names: Sequence[str]) -> list[dict[str, object]]:
        return self._made.as_json(names)

    async def run(self, edge: Edge, outlet: Outlet) -> None:
        async def count(chunk: Chunk) -> None:
            if chunk.planes:
                self.compressed += 1
            elif not chunk.zero:
                self.raw += 1
            if self._encodings and not chunk.zero:
                first = chunk.number - chunk.number % self.piece_chunks
                self._made.count(chunk, self._encodings[chunk.stream, first] if chunk.planes else None)

        await pass_each(edge, outlet, count)
        outlet.end()
