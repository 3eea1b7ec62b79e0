"""Restoring an evicted process while its image still arrives: the driver waits at the gate, range by range."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda import eviction
from ckptpipe.pipeline.cuda.launched_pool import ORPHANED, PooledImage
from ckptpipe.pipeline.cuda.session import ProcessSession
from ckptpipe.pipeline.cuda.target import while_alive
from ckptpipe.pipeline.image.reader import ImageReader
from ckptpipe.pipeline.progress import ProgressCallback
from ckptpipe.pipeline.sinks.pool import PoolRange
from ckptpipe.pipeline.sources.image import Counts
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.storage_backends.shielded import in_thread, shielded

STILL = 120.0  # seconds in which nothing more of the image comes, after which the library ends the process


class Arrivals:
    """What of the ranges has come, verified; lets the driver have each image up to its first gap.

    ``first`` is set when something has come: before, the driver need not be asked.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self.first = asyncio.Event()
        self._chunk_bytes = chunk_bytes
        self._ahead: dict[PooledImage, set[int]] = {}
        self._next: dict[PooledImage, int] = {}

    def has(self, to: PoolRange, number: int) -> bool:
        return number < self._next.get(to.image, 0) or number in self._ahead.get(to.image, ())

    def add(self, to: PoolRange, number: int) -> None:
        if self.has(to, number):
            return
        ahead = self._ahead.setdefault(to.image, set())
        ahead.add(number)
        following = before = self._next.get(to.image, 0)
        while following in ahead:
            ahead.remove(following)
            following += 1
        if following > before:
            self._next[to.image] = following
            ready = min(following * self._chunk_bytes, to.image.nbytes)
            to.pool.release(to.image, ready)
            self.first.set()


async def restore_early(
    sessions: Sequence[ProcessSession],
    pairs: Mapping[int, Mapping[str, str]],
    reader: ImageReader,
    context: GraphContext,
    progress: ProgressCallback | None = None,
) -> Counts:
    """CHECKPOINTED and evicted -> RUNNING. Nothing is unlocked before every byte has arrived verified.

    Until the first bytes are there, a failure leaves the processes CHECKPOINTED and evicted, as with `refill`.
    Afterwards what does not come, or stays bad, ends them: the driver cannot be called back.
    """
    ranges = await eviction.prepared(sessions, reader, context)
    await eviction.empty(sessions, allocate=True)
    for session in sessions:
        assert session.pool is not None
        session.pool.page.deadlines(still=STILL, orphaned=ORPHANED)
        await in_thread(session.pool.handover.feed)
    arrivals = Arrivals(context.chunk_bytes)
    ready: list[ProcessSession] = []
    failed: list[CkptpipeError] = []

    async def drive() -> None:
        await arrivals.first.wait()
        for session in reversed(sessions):
            try:
                await session.restore(dict(pairs.get(session.k, {})), early=True)
                ready.append(session)
            except CkptpipeError as error:
                failed.append(error)

    driving = asyncio.create_task(drive(), name="ckptpipe early restore")
    filled = False
    try:
        counts = await while_alive(
            [session.target for session in sessions],
            eviction.fill(sessions, ranges, reader, context, progress, arrivals),
        )
        filled = True
        await eviction.admit(sessions)
        arrivals.first.set()
    except BaseException as error:
        if arrivals.first.is_set() and not filled:
            for session in sessions:
                assert session.pool is not None
                session.pool.fail(session.pooled, f"the restore failed: {error}")
        raise
    finally:
        if not arrivals.first.is_set():
            driving.cancel()
        await asyncio.wait([driving])
        if not filled and not arrivals.first.is_set():
            await shielded(eviction.empty(sessions))
    for session in ready:
        await session.unlock()
    if failed:
        raise failed[0]
    return counts
