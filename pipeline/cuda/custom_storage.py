"""Custom storage: the driver maps a process's GPU memory into this process, and we copy it out, or back in."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda.choice import shown
from ckptpipe.pipeline.cuda.driver import CudaDriver, Gpu
from ckptpipe.pipeline.cuda.links import Links
from ckptpipe.pipeline.cuda.process_facts import process_facts
from ckptpipe.pipeline.cuda.session import CUSTOM, ProcessSession
from ckptpipe.pipeline.cuda.usage import process_bytes
from ckptpipe.pipeline.sources.device import DeviceMemory, DeviceRange


class CustomStorage(DeviceMemory):
    """The GPU memory of ``sessions``. `begin` locks all, then prepares one after another.

    Where the operations are open already (a save that is sent to another place), `begin` only says where the
    memory lies. Operations stay open at the end: completing them is the capture's business.
    """

    comes_back = True

    def __init__(
        self, driver: CudaDriver, sessions: Sequence[ProcessSession], links: Links, lock_timeout: float
    ) -> None:
        self.kind = shown(CUSTOM, driver.simulated)
        self.links = links
        self.sessions = list(sessions)
        self._driver = driver
        self._lock_timeout = lock_timeout

    async def open(self, context: GraphContext) -> list[DeviceRange] | None:
        if all(session.operation is not None for session in self.sessions):
            for session in self.sessions:
                await session.find_memory()
            await self.links.open(
                context, _distinct(each.gpu for session in self.sessions for each in session.memory)
            )
            return self.ranges()
        gpus = _distinct(gpu for session in self.sessions for gpu in session.gpus)
        for session in self.sessions:
            await session.retain(session.gpus)
        self.need_bytes = await self._estimate(gpus)
        await self.links.open(context, gpus)
        return None

    async def _estimate(self, gpus: Sequence[Gpu]) -> int:
        """Bytes that the sinks must have room for: a sink that fills up leaves the target CHECKPOINTING, so
        where the driver does not say what a process holds, everything in use on its GPUs is counted."""
        pids = [session.pid for session in self.sessions]
        known = await asyncio.to_thread(process_bytes, pids, [gpu.uuid for gpu in gpus])
        if set(known) == set(pids):
            return sum(known.values())
        self.counted = "everything in use on the GPUs of the process, since the driver does not say here what it holds alone"
        used = 0
        for gpu in gpus:
            context = await self._driver.retain(gpu.ordinal)
            try:
                free, total = await self._driver.memory(context)
            finally:
                await self._driver.release(gpu.ordinal)
            used += total - free
        return used

    async def begin(self) -> list[DeviceRange]:
        if all(session.operation is not None for session in self.sessions):
            return self.ranges()
        for session in self.sessions:
            await session.lock(self._lock_timeout)
        for session in self.sessions:
            await session.checkpoint_custom()
        return self.ranges()

    def ranges(self) -> list[DeviceRange]:
        """Where each stream lies now; addresses are those of the operations that are open."""
        return ranges_of(self.sessions)

    def process(self) -> dict[str, Any]:
        bytes_of = {
            session.k: {each.gpu.uuid: each.nbytes for each in session.memory} for session in self.sessions
        }
        return process_facts(self.sessions, self._driver.version, bytes_of)

    def notes(self) -> list[str]:
        return [*super().notes(), *(note for session in self.sessions for note in session.notes)]


def ranges_of(sessions: Sequence[ProcessSession]) -> list[DeviceRange]:
    return [
        DeviceRange(
            f"proc/{session.k}/gpu/{each.gpu.uuid}", "gpu", each.gpu.ordinal, each.address, each.nbytes
        )
        for session in sessions
        for each in session.memory
    ]


def _distinct(gpus: Any) -> list[Gpu]:
    return list({gpu.ordinal: gpu for gpu in gpus}.values())
