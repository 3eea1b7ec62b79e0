"""The driver's image of a launched process, in the pool of its capture library, as a source: sent from where it lies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ckptpipe.pipeline.chunk import Chunk, released_on_error
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda.choice import shown
from ckptpipe.pipeline.cuda.driver import CudaDriver
from ckptpipe.pipeline.cuda.errors import TargetError
from ckptpipe.pipeline.cuda.launched_pool import LaunchedPool
from ckptpipe.pipeline.cuda.session import DRIVER_IMAGE, LAUNCH, ProcessSession
from ckptpipe.pipeline.cuda.target import Mapping
from ckptpipe.pipeline.launch import HandoverFailed
from ckptpipe.pipeline.sources.driver_image import DriverImageSource, Piece, made
from ckptpipe.storage_backends.shielded import in_thread

ALIGNMENT = 4096  # of what is stored: a chunk's padding ends there


class LaunchedImageSource(DriverImageSource):
    """Like `DriverImageSource`, for ``sessions`` that have a pool. Sinks get ranges of the pool itself.

    What the library leaves to the driver (the pool is too small, say) is read the driver image's way.
    """

    def __init__(self, driver: CudaDriver, sessions: Sequence[ProcessSession], lock_timeout: float) -> None:
        super().__init__(driver, sessions, lock_timeout)
        self.kind = shown(LAUNCH, driver.simulated)
        self._fallen_back = 0

    async def open(self, context: GraphContext) -> None:
        await super().open(context)
        for session in self._sessions:
            pool = _pool(session)
            if used := self._used.get(session.pid, 0):
                try:
                    await in_thread(pool.handover.prepare, used)
                except HandoverFailed as error:
                    session.notes.append(f"{session}: its pool was not made ready: {error.message}")
            await in_thread(pool.map)

    async def _checkpoint(self, session: ProcessSession) -> list[Piece]:
        pool = _pool(session)
        try:
            before: list[Mapping] | None = await asyncio.to_thread(session.target.maps)
        except TargetError:
            before = None  # its image can be had from the pool alone
        await in_thread(pool.handover.arm)
        was = pool.state
        await session.checkpoint()
        await in_thread(pool.handover.settle)
        await in_thread(pool.handover.disarm)
        state = pool.state
        images = pool.images(was.generation)
        found = [Piece(session, image.address, image.nbytes, image.offset) for image in images]
        session.notes.append(pool.describe())
        if not images or state.fallbacks > was.fallbacks:
            if before is None:
                raise session.target.not_permitted()
            used = self._used.get(session.pid, 0) - sum(piece.nbytes for piece in found)
            found += await self._found(session, before, max(used, 0))
            why = state.fallback_text or state.fallback_reason
            why = why if state.fallbacks > was.fallbacks else "the capture library did not see it"
            session.notes.append(f"{session}: the driver kept its image in memory of its own: {why}")
        if not images:
            self._fallen_back += 1
            if self._fallen_back == len(self._sessions):
                self.kind = shown(DRIVER_IMAGE, self._driver.simulated)
        await session.note(
            "checkpointed",
            capture=LAUNCH if images else DRIVER_IMAGE,
            mappings=tuple((piece.address, piece.nbytes) for piece in found),
            pool=tuple((image.slot, image.generation, image.offset, image.nbytes) for image in images),
        )
        return found

    async def _chunk(self, stream: int, number: int, piece: Piece, start: int, nbytes: int) -> Chunk:
        if piece.offset < 0:
            return await super()._chunk(stream, number, piece, start, nbytes)
        context = self._context
        with released_on_error(_pool(piece.session).lend(piece.offset + start, nbytes)) as lent:
            if nbytes % ALIGNMENT == 0:
                scan = await context.workers.scan(lent, nbytes)
                return made(stream, number, nbytes, scan, lent)
            # Its padding is the process's memory, not ours to clear.
            with released_on_error(await context.ring.acquire()) as slot:
                scan = await context.workers.copy(slot, lent, nbytes)
                lent.release()
                return made(stream, number, nbytes, scan, slot)

    async def aclose(self) -> None:
        """Returns when nothing reads the pools any more: the driver may restore from them then."""
        for session in self._sessions:
            if session.pool is not None:
                await session.pool.drained()


def _pool(session: ProcessSession) -> LaunchedPool:
    assert session.pool is not None, "launch was chosen for processes that have a pool"
    return session.pool
