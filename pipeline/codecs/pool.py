"""Codec threads: compress and decompress from lease to lease, off the loop and without the GIL."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from ckptpipe.pipeline.codecs.abc import Stopped
from ckptpipe.pipeline.codecs.chunk_codec import ChunkCodec, Encoded
from ckptpipe.pipeline.codecs.encoding import Encoding

if TYPE_CHECKING:
    from ckptpipe.pipeline.image.records import ChunkRecord
    from ckptpipe.pyx.staging import Lease

THREADS_MAX = 32
T = TypeVar("T")


class CodecPool:
    """``threads`` threads (0: one a usable CPU, at most 32), each with codecs and scratch of its own, one chunk's size.

    A job holds a lease of its own on both ranges until its thread is done with them, also when the task
    that asked for it was cancelled: it stops then at its codec's next checkpoint. Jobs wait in the order they came; the ring bounds how many there are.
    Used from one loop, the one that runs when the first job is queued.
    """

    def __init__(self, threads: int = 0) -> None:
        self.threads = threads or min(len(os.sched_getaffinity(0)), THREADS_MAX)
        self.jobs = 0  # done since the start
        self.cpu_seconds = 0.0  # of the codec threads, inside codecs
        self.nice = 0  # of threads that begin from now on, over that of the process
        self._executor = ThreadPoolExecutor(
            self.threads, thread_name_prefix="ckptpipe-codec", initializer=self._begin
        )
        self._own = threading.local()
        self._inflight = 0
        self._closed = False
        self._idle: asyncio.Event | None = None

    @property
    def inflight(self) -> int:
        return self._inflight

    async def compress(
        self, encoding: Encoding, source: Lease, nbytes: int, destination: Lease, limit: int
    ) -> Encoded:
        """Encode ``source[:nbytes]`` into ``destination[:limit]``; ``stored_bytes`` 0 where that gains nothing."""

        def work(read: memoryview, write: memoryview) -> Encoded:
            return self._codec().encode(encoding, read, write)

        return await self._run(work, source, nbytes, destination, limit)

    async def decompress(self, record: ChunkRecord, source: Lease, destination: Lease) -> int:
        """Fill ``destination[:record.raw_bytes]`` from ``source[:record.stored_bytes]``, planes, transform and all;
        the CRC32C of what is there then.

        ValueError where the input is damaged. The record is one of a decoded index, so its lengths fit; its codecs
        are among `DECODABLE`.
        """

        def work(read: memoryview, write: memoryview) -> int:
            return self._codec().decode(record, read, write)

        return await self._run(work, source, record.stored_bytes, destination, record.raw_bytes)

    async def look(self, work: Callable[[ChunkCodec, memoryview], T], source: Lease, nbytes: int) -> T:
        """``work(codec, source[:nbytes])`` on a codec thread, with that thread's codec."""

        def look(read: memoryview, _: memoryview) -> T:
            return work(self._codec(), read)

        return await self._run(look, source, nbytes, source, 0)

    async def aclose(self) -> None:
        """Wait for the jobs that were queued, then end the threads. Idempotent."""
        self._closed = True
        while self._inflight:
            self._idle = asyncio.Event()
            await self._idle.wait()
        self._executor.shutdown(wait=True)  # nothing runs: the threads only have to wake up and leave

    def _begin(self) -> None:
        """A thread begins. Niceness belongs to threads on Linux (nptl(7)), and only goes up without privileges."""
        if self.nice:
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + self.nice)

    def _codec(self) -> ChunkCodec:
        """This thread's."""
        codec: ChunkCodec | None = getattr(self._own, "codec", None)
        if codec is None:
            codec = self._own.codec = ChunkCodec()
        return codec

    async def _run(
        self,
        work: Callable[[memoryview, memoryview], T],
        source: Lease,
        nbytes: int,
        destination: Lease,
        limit: int,
    ) -> T:
        if self._closed:
            raise RuntimeError("the codec pool is closed")
        if not 0 <= nbytes <= source.nbytes or not 0 <= limit <= destination.nbytes:
            raise ValueError(f"{nbytes} of {source.nbytes} bytes into {limit} of {destination.nbytes}")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        held = source.share(), destination.share()
        spent = 0.0
        unwanted = threading.Event()

        def checkpoint() -> None:
            if unwanted.is_set():
                raise Stopped

        def job() -> T:
            nonlocal spent
            start = time.thread_time()
            self._codec().checkpoint = checkpoint
            try:
                with memoryview(held[0]) as read_all, memoryview(held[1]) as write_all:
                    with read_all[:nbytes] as read, write_all[:limit] as write:
                        return work(read, write)
            finally:
                spent = time.thread_time() - start

        def settle(done: Future[T]) -> None:
            # On the loop's thread: leases wake tasks that wait for a slot.
            for lease in held:
                lease.release()
            self.jobs += 1
            self.cpu_seconds += spent
            self._inflight -= 1
            if not self._inflight and self._idle is not None:
                self._idle.set()
            if answer.done():
                return
            if done.cancelled():
                answer.cancel()
                return
            error = done.exception()
            if error is None:
                answer.set_result(done.result())
            else:
                answer.set_exception(error)

        try:
            queued = self._executor.submit(job)
        except BaseException:
            for lease in held:
                lease.release()
            raise
        self._inflight += 1
        queued.add_done_callback(lambda done: loop.call_soon_threadsafe(settle, done))
        try:
            return await answer
        except asyncio.CancelledError:
            unwanted.set()
            queued.cancel()  # succeeds only where no thread has begun: the callback runs all the same
            raise
