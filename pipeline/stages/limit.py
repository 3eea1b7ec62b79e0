"""Hold a branch to a rate."""

from __future__ import annotations

import asyncio

from ckptpipe.pipeline.chunk import Chunk
from ckptpipe.pipeline.edge import Edge, Outlet
from ckptpipe.pipeline.stages.abc import Stage, pass_each


class LimitStage(Stage):
    """Passes stored bytes on at ``rate`` bytes a second or slower, by the schedule of a leaky bucket."""

    def __init__(self, name: str, rate: float) -> None:
        self.name = name
        self.rate = rate

    async def run(self, edge: Edge, outlet: Outlet) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()

        async def wait(chunk: Chunk) -> None:
            nonlocal due
            now = loop.time()
            if due > now:
                await asyncio.sleep(due - now)
            due = max(due, now) + chunk.stored_bytes / self.rate

        await pass_each(edge, outlet, wait)
        outlet.end()
