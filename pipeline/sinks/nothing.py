"""A sink that only counts: what verify ends in, since its source has checked every chunk."""

from __future__ import annotations

from ckptpipe.pipeline.edge import Edge
from ckptpipe.pipeline.sinks.abc import RestoringSink
from ckptpipe.pipeline.sources.abc import Source
from ckptpipe.storage_backends.abc import Landing


class NothingSink(RestoringSink):
    """Takes chunks and lets them go."""

    name = "nothing"
    url = "nothing"

    async def check(self, source: Source) -> None:
        return

    async def begin(self, source: Source) -> None:
        return

    async def run(self, edge: Edge) -> None:
        while (chunk := await edge.get()) is not None:
            self.done_bytes += chunk.raw_bytes
            chunk.release()

    async def landing(self, stream: int, number: int, nbytes: int) -> Landing:
        return Landing(nbytes)

    async def aclose(self) -> None:
        return
