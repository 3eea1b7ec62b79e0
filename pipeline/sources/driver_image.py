"""The driver's image of a process, in the process's own memory, as a source: found in its mappings, read out of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from ckptpipe.pipeline.chunk import Chunk, released_on_error
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda.choice import shown
from ckptpipe.pipeline.cuda.driver import CudaDriver
from ckptpipe.pipeline.cuda.image_mappings import find_image
from ckptpipe.pipeline.cuda.process_facts import process_facts
from ckptpipe.pipeline.cuda.session import DRIVER_IMAGE, ProcessSession
from ckptpipe.pipeline.cuda.usage import process_bytes
from ckptpipe.pipeline.edge import Outlet
from ckptpipe.pipeline.sources.abc import Source, Stream, clear_padding, fillers, in_parallel


class DriverImageSource(Source):
    """Locks all ``sessions``, checkpoints one after another, then streams what the driver left in each.

    The processes stay CHECKPOINTED: restoring them is the capture's business.
    """

    def __init__(self, driver: CudaDriver, sessions: Sequence[ProcessSession], lock_timeout: float) -> None:
        self.kind = shown(DRIVER_IMAGE, driver.simulated)
        self.streams = []
        self.tree = []
        self.total_bytes = None
        self._driver = driver
        self._sessions = list(sessions)
        self._lock_timeout = lock_timeout
        self._pieces: list[tuple[ProcessSession, int, int]] = []  # of each stream: process, address, bytes
        self._used: dict[int, int] = {}

    async def open(self, context: GraphContext) -> None:
        self._context = context
        uuids = list(dict.fromkeys(gpu.uuid for session in self._sessions for gpu in session.gpus))
        pids = [session.pid for session in self._sessions]
        self._used = await asyncio.to_thread(process_bytes, pids, uuids)

    @property
    def need_bytes(self) -> int:
        if self.total_bytes is not None:
            return self.total_bytes
        return sum(self._used.values()) if len(self._used) == len(self._sessions) else 0

    async def run(self, outlet: Outlet) -> None:
        for session in self._sessions:
            await session.lock(self._lock_timeout)
        for session in self._sessions:
            before = await asyncio.to_thread(session.target.maps)
            await session.checkpoint()
            after = await asyncio.to_thread(session.target.maps)
            most = sum(gpu.memory_bytes for gpu in session.gpus)
            pieces = find_image(
                before, after, str(session), session.pid, self._used.get(session.pid, 0), most
            )
            await session.note("checkpointed", mappings=tuple(pieces))
            for number, (start, nbytes) in enumerate(pieces):
                self.streams.append(Stream(f"proc/{session.k}/driver/{number}", "driver", nbytes))
                self._pieces.append((session, start, nbytes))
        self.total_bytes = sum(nbytes for _, _, nbytes in self._pieces)
        await self._read(outlet)

    async def _read(self, outlet: Outlet) -> None:
        context, ring, work = self._context, self._context.ring, self._work()

        async def fill() -> None:
            for stream, number, pid, address, nbytes in work:
                if outlet.dropped:
                    return
                with released_on_error(await ring.acquire()) as slot:
                    scan = await context.workers.read_process(pid, address, slot, nbytes)
                    if scan.zero:
                        slot.release()
                        chunk = Chunk(stream, number, nbytes, scan.crc32c, None)
                    else:
                        clear_padding(slot, nbytes)
                        chunk = Chunk(stream, number, nbytes, scan.crc32c, slot)
                await outlet.emit(chunk)

        await in_parallel(fillers(context), fill)

    def _work(self) -> Iterator[tuple[int, int, int, int, int]]:
        step = self._context.chunk_bytes
        for stream, (session, start, size) in enumerate(self._pieces):
            for number, offset in enumerate(range(0, size, step)):
                yield stream, number, session.pid, start + offset, min(step, size - offset)

    def process(self) -> dict[str, Any]:
        """The driver does not say how much of the image was on which GPU."""
        unknown: dict[int, dict[str, int | None]] = {
            session.k: {gpu.uuid: None for gpu in session.gpus} for session in self._sessions
        }
        return process_facts(self._sessions, self._driver.version, unknown)

    def notes(self) -> list[str]:
        return [note for session in self._sessions for note in session.notes]

    async def aclose(self) -> None:
        return
