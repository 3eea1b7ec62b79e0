"""A compress stage whose work the source has done already: it only counts."""

from __future__ import annotations

from ckptpipe.pipeline.codecs import CodecChoice
from ckptpipe.pipeline.edge import Edge, Outlet
from ckptpipe.pipeline.stages.abc import Stage


class EncodedStage(Stage):
    """Stands where a compress stage stood, and takes chunks that were encoded before they left the GPU.

    A chunk without planes is one that the codec was tried on in vain: it is stored raw, and not tried again.
    """

    def __init__(self, name: str, choice: CodecChoice, backend: str) -> None:
        """``backend``: what encodes, for the result."""
        self.name = name
        self.choice = choice
        self.compressed = 0
        self.raw = 0
        self._backend = backend

    @property
    def backend(self) -> str:
        return self._backend if self.compressed else ""

    async def run(self, edge: Edge, outlet: Outlet) -> None:
        while (chunk := await edge.get()) is not None:
            if chunk.planes:
                self.compressed += 1
            elif not chunk.zero:
                self.raw += 1
            await outlet.emit(chunk)
            if outlet.dropped:
                edge.drop()
                return
        outlet.end()
