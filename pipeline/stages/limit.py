"""Hold a branch to a rate."""

from __future__ import annotations

import asyncio

from ckptpipe.pipeline.edge import Edge, Outlet
from ckptpipe.pipeline.stages.abc import Stage


class LimitStage(Stage):
    """Passes stored bytes on at ``rate`` bytes a second or slower, by the schedule of a leaky bucket."""

    def __init__(self, name: str, rate: float) -> None:
        self.name = name
        self.rate = rate

    async def run(self, edge: Edge, outlet: Outlet) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while (chunk := await edge.get()) is not None:
            try:
                now = loop.time()
                if due > now:
                    await asyncio.sleep(due - now)
                due = max(due, now) + chunk.stored_bytes / self.rate
            except BaseException:
                chunk.release()
                raise
            await outlet.emit(chunk)
            if outlet.dropped:
                edge.drop()
                return
        outlet.end()
