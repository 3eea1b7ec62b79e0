"""The driver's image of a process, in the process's own memory, as a source: found in its mappings, read out of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ckptpipe.pipeline.chunk import Chunk, released_on_error
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda.choice import shown
from ckptpipe.pipeline.cuda.driver import CudaDriver
from ckptpipe.pipeline.cuda.image_mappings import find_image
from ckptpipe.pipeline.cuda.process_facts import process_facts
from ckptpipe.pipeline.cuda.session import DRIVER_IMAGE, ProcessSession
from ckptpipe.pipeline.cuda.target import Mapping
from ckptpipe.pipeline.cuda.usage import process_bytes
from ckptpipe.pipeline.edge import Outlet
from ckptpipe.pipeline.parallel import in_parallel
from ckptpipe.pipeline.sources.abc import Source, Stream, clear_padding, fillers
from ckptpipe.pyx.staging import Lease
from ckptpipe.pyx.workers import Scan


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a driver's image. ``offset``: in the process's pool, -1 where it lies in memory of its own."""

    session: ProcessSession
    address: int
    nbytes: int
    offset: int = -1


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
        self._pieces: list[Piece] = []  # of each stream
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
            pieces = await self._checkpoint(session)
            for number, piece in enumerate(pieces):
                self.streams.append(Stream(f"proc/{session.k}/driver/{number}", "driver", piece.nbytes))
            self._pieces += pieces
        self.total_bytes = sum(piece.nbytes for piece in self._pieces)
        await self._read(outlet)

    async def _checkpoint(self, session: ProcessSession) -> list[Piece]:
        """Checkpoint one process; where its image lies is noted, and told."""
        before = await asyncio.to_thread(session.target.maps)
        await session.checkpoint()
        found = await self._found(session, before, self._used.get(session.pid, 0))
        await session.note("checkpointed", mappings=tuple((each.address, each.nbytes) for each in found))
        return found

    async def _found(self, session: ProcessSession, before: Sequence[Mapping], used: int) -> list[Piece]:
        """What the driver left in the process's own memory, which must be at least half of ``used``."""
        after = await asyncio.to_thread(session.target.maps)
        most = sum(gpu.memory_bytes for gpu in session.gpus)
        pieces = find_image(before, after, str(session), session.pid, used, most)
        return [Piece(session, start, nbytes) for start, nbytes in pieces]

    async def _read(self, outlet: Outlet) -> None:
        work = self._work()

        async def fill() -> None:
            for stream, number, piece, start, nbytes in work:
                if outlet.dropped:
                    return
                await outlet.emit(await self._chunk(stream, number, piece, start, nbytes))

        await in_parallel(fillers(self._context), fill)

    async def _chunk(self, stream: int, number: int, piece: Piece, start: int, nbytes: int) -> Chunk:
        context = self._context
        with released_on_error(await context.ring.acquire()) as slot:
            scan = await context.workers.read_process(piece.session.pid, piece.address + start, slot, nbytes)
            return made(stream, number, nbytes, scan, slot)

    def _work(self) -> Iterator[tuple[int, int, Piece, int, int]]:
        step = self._context.chunk_bytes
        for stream, piece in enumerate(self._pieces):
            for number, start in enumerate(range(0, piece.nbytes, step)):
                yield stream, number, piece, start, min(step, piece.nbytes - start)

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


def made(stream: int, number: int, nbytes: int, scan: Scan, slot: Lease) -> Chunk:
    """The chunk of what lies in ``slot``, which is given back where it is zeros."""
    if scan.zero:
        slot.release()
        return Chunk(stream, number, nbytes, scan.crc32c, None)
    clear_padding(slot, nbytes)
    return Chunk(stream, number, nbytes, scan.crc32c, slot)
