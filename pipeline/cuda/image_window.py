"""Feeding a restore through a small part of its pool: a chunk takes the place of one that the driver has read.

The driver reads an image from front to back, once. So it needs no more memory than what is read ahead for it: pages
that were evicted are not made again, and what was just written is still in the CPU's cache when the driver's copy
comes for it. Should it ever go back, the image is read again from there (pyx/preload/control.h has the order).
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

from ckptpipe.pipeline.cuda.launched_pool import LaunchedPool, PooledImage
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.pyx.workers import WorkerPool

CHUNKS = 8  # at a time: the fewer, the less of what is read is out of the caches when the driver's copy comes for it
PART_BYTES = (
    256 << 10
)  # of a chunk that a thread reads at a time; it stays in the core's cache until its checksum is taken
THREADS = 0  # that fill; 0: three of four CPUs, since the driver's copies want some
LOOK = 0.0005  # seconds between looks at how far the driver is


class LeftBehind(CkptpipeError):
    """The driver went back to a chunk whose place was taken: ``number``. Never leaves a restore."""

    def __init__(self, window: ImageWindow, number: int) -> None:
        super().__init__(f"the driver went back to chunk {number} of its image")
        self.window = window
        self.number = number


@dataclass(frozen=True, slots=True)
class Fillers:
    """Threads that bring chunks to their places while a driver reads. ``part_bytes``: they read each chunk of a window
    together, in parts of so much, the next one in order first. ``yields``: they run where no other thread wants a CPU."""

    workers: WorkerPool
    part_bytes: int = 0
    yields: bool = False


def threads_for(cpus: int) -> int:
    """How many fill a window where so many CPUs may be used."""
    return THREADS or max(1, cpus * 3 // 4)


def open_fillers(*, yields: bool) -> Fillers:
    """Of windows. Made inside the running loop; their workers are the caller's to close."""
    threads = threads_for(len(os.sched_getaffinity(0)))
    return Fillers(WorkerPool(threads, idle=yields), PART_BYTES, yields)


class ImageWindow:
    """``chunks`` chunks of ``chunk_bytes`` at the place of ``image``, which is larger. See `room`."""

    def __init__(self, pool: LaunchedPool, image: PooledImage, chunks: int, chunk_bytes: int) -> None:
        self.pool = pool
        self.image = image
        self.nbytes = chunks * chunk_bytes
        self._chunks = chunks
        self._chunk_bytes = chunk_bytes
        self.unwanted = False  # the driver refused the image: nothing of it goes into the window any more
        self._turn = asyncio.Lock()
        self._first = 0  # the lowest chunk that is kept

    async def room(self, number: int) -> None:
        """Wait until chunk ``number`` may be written: the driver has read what is in its place. Asked for one chunk
        after the other, before any of them is fetched, so that what the driver waits for never waits for room.

        LeftBehind where the driver has gone back.
        """
        first = number - self._chunks + 1
        if first <= self._first:
            return
        async with self._turn:  # first come, first served: only one looks
            while first > self._first and not self.unwanted:
                if self.pool.advance(self.image, first * self._chunk_bytes):
                    self._first = first
                    return
                self.look()
                await asyncio.sleep(LOOK)

    def look(self) -> None:
        """LeftBehind where the driver has gone back, and waits."""
        if (start := self.pool.behind(self.image)) is not None:
            raise LeftBehind(self, start // self._chunk_bytes)

    def rewind(self, number: int) -> None:
        """Go on with chunk ``number``. Nothing may be writing into the window."""
        self._first = number
        self.pool.rewind(self.image, number * self._chunk_bytes)
