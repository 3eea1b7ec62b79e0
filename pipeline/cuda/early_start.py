"""Restoring an evicted process while its image still arrives: the driver waits at the gate, range by range."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda import eviction, image_window
from ckptpipe.pipeline.cuda.image_window import Fillers, ImageWindow, LeftBehind
from ckptpipe.pipeline.cuda.launched_pool import ORPHANED, PooledImage
from ckptpipe.pipeline.cuda.session import ProcessSession
from ckptpipe.pipeline.cuda.target import while_alive
from ckptpipe.pipeline.image.reader import ImageReader
from ckptpipe.pipeline.progress import ProgressCallback
from ckptpipe.pipeline.sinks.pool import PoolRange
from ckptpipe.pipeline.sources.image import Counts
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.pyx.workers import WorkerPool
from ckptpipe.storage_backends.shielded import shielded

STILL = 120.0  # seconds in which nothing more of the image comes, after which the library ends the process
YIELD = False  # on a quiet machine, threads that fill a window take no CPU from anybody
LOOK = 0.005  # seconds between looks whether the driver has gone back, once all has come


class Arrivals:
    """What of the ranges has come, verified; lets the driver have each image up to its first gap.

    ``first`` is set when something has come: before, the driver need not be asked.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self.first = asyncio.Event()
        self._chunk_bytes = chunk_bytes
        self._ahead: dict[PooledImage, set[int]] = {}
        self._next: dict[PooledImage, int] = {}
        self._unwanted: set[PooledImage] = set()

    def has(self, to: PoolRange, number: int) -> bool:
        """Whether it has come, or will not be wanted."""
        return (
            number < self._next.get(to.image, 0)
            or number in self._ahead.get(to.image, ())
            or to.image in self._unwanted
        )

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

    def rewind(self, image: PooledImage, number: int) -> None:
        """Of ``image`` only what lies before chunk ``number`` counts, and need not come again."""
        self._ahead.pop(image, None)
        self._next[image] = number

    def give_up(self, image: PooledImage) -> None:
        """The driver did not take it: nothing more of it need come."""
        self._unwanted.add(image)


async def restore_early(
    sessions: Sequence[ProcessSession],
    pairs: Mapping[int, Mapping[str, str]],
    reader: ImageReader,
    context: GraphContext,
    progress: ProgressCallback | None = None,
) -> Counts:
    """CHECKPOINTED and evicted -> RUNNING. Nothing is unlocked before every byte has arrived verified.

    Until the first bytes are there, a failure leaves the processes CHECKPOINTED and evicted, as with `refill`.
    Afterwards what does not come, or stays bad, ends them: the driver cannot be called back. An image goes through a
    window where it is its process's only one: the driver reads several in an order that is not ours to know.
    """
    ranges = await eviction.prepared(sessions, reader, context)
    most = (
        image_window.CHUNKS * context.chunk_bytes
        if all(len(session.pooled) == 1 for session in sessions)
        else 0
    )
    await eviction.empty(sessions, allocate=True, most=most)
    windows = _open_windows(ranges, context) if most else {}
    ranges = {
        name: replace(each, window=windows[name].nbytes) if name in windows else each
        for name, each in ranges.items()
    }
    through = {window.image: window for window in windows.values()}
    whole = [session for session in sessions if through.keys().isdisjoint(session.pooled)]
    for session in sessions:
        assert session.pool is not None
        session.pool.page.deadlines(still=STILL, orphaned=ORPHANED)
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
                for image in through.keys() & set(session.pooled):
                    arrivals.give_up(image)
                    through[image].unwanted = True

    async def feed() -> Counts:
        while True:
            try:
                counts = await eviction.fill(
                    sessions, ranges, reader, context, progress, arrivals, windows, fillers
                )
                await eviction.admit(whole)
                arrivals.first.set()
                while windows and not driving.done():
                    for window in windows.values():
                        window.look()
                    await asyncio.wait([driving], timeout=LOOK)
                return counts
            except LeftBehind as left:
                arrivals.rewind(left.window.image, left.number)
                left.window.rewind(left.number)

    driving = asyncio.create_task(drive(), name="ckptpipe early restore")
    filled = False
    fillers = _open_fillers(context, bool(windows))
    try:
        counts = await while_alive([session.target for session in sessions], feed())
        filled = True
    except BaseException as error:
        if arrivals.first.is_set():
            for session in sessions:
                assert session.pool is not None
                if not session.pool.state.ended:  # else it has said why
                    session.pool.fail(session.pooled, f"the restore failed: {error}")
        raise
    finally:
        if not arrivals.first.is_set():
            driving.cancel()
        await asyncio.wait([driving])
        if fillers is not None:
            await shielded(fillers.workers.aclose())
        if failed and not filled:  # the driver's answer can come before a process that was ended is dead
            await asyncio.gather(*(each.target.end() for each in sessions if each not in ready))
        if not filled and not arrivals.first.is_set():
            await shielded(eviction.empty(sessions))
    for session in ready:
        await session.unlock()
    if failed:
        await eviction.empty([each for each in sessions if each not in ready and each not in whole])
        raise failed[0]
    return counts


def quiet() -> bool:
    """Whether at most half of the CPUs have something to do: threads that yield to all others starve where they do."""
    with open("/proc/loadavg", encoding="ascii") as file:  # proc_loadavg(5)
        running = int(file.read().split()[3].partition("/")[0])
    return running <= len(os.sched_getaffinity(0)) // 2


def _open_fillers(context: GraphContext, windowed: bool) -> Fillers | None:
    """Where all goes to places of its own, threads that take no CPU from the driver's copies, on a quiet machine."""
    if windowed:
        return image_window.open_fillers(yields=YIELD and quiet())
    return Fillers(WorkerPool(context.workers.threads, idle=True), yields=True) if quiet() else None


def _open_windows(ranges: Mapping[str, PoolRange], context: GraphContext) -> dict[str, ImageWindow]:
    """Of the streams that are larger than one; behind closed gates."""
    windows: dict[str, ImageWindow] = {}
    chunks = image_window.CHUNKS
    for name, each in ranges.items():
        if each.image.nbytes > chunks * context.chunk_bytes:
            windows[name] = ImageWindow(each.pool, each.image, chunks, context.chunk_bytes)
            each.pool.open_window(each.image, windows[name].nbytes)
    return windows
