"""A sink that only counts: what verify ends in, since its source has checked every chunk."""

from __future__ import annotations

from ckptpipe.pipeline.edge import Edge
from ckptpipe.pipeline.result import SinkResult
from ckptpipe.pipeline.sinks.abc import Sink
from ckptpipe.pipeline.sources.abc import Source


class NothingSink(Sink):
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

    async def commit(self) -> None:
        return

    async def settle(self) -> None:
        return

    async def abort(self) -> None:
        return

    async def aclose(self) -> None:
        return

    def result(self) -> SinkResult:
        return SinkResult(url=self.url, image_url="", policy=self.policy, ok=True)
