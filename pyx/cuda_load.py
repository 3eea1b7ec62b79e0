"""Loads files into device memory: how many threads, with which buffers, on which CPUs (the work: cuda_queue.load)."""

from __future__ import annotations

import asyncio
import os
from array import array
from dataclasses import dataclass, replace
from pathlib import Path

from ckptpipe.pyx.cuda_memory import Pinned, pin
from ckptpipe.pyx.cuda_queue import CopyQueue
from ckptpipe.pyx.memory import Mapping

THREADS = 12  # of one GPU at most: enough for the link where each copies 5 GB/s out of the page cache
COPY_BYTES = 8 << 20  # the link takes copies of 8 MiB at 98 % of its rate, of 1 MiB at 90 %
BUFFERS = 5  # one is fetched, one waits for that, the others are filled
PART_BYTES = 256 << 10
BUFFERS_MAX = 64  # where chunks are short
PREFAULT_THREADS = 8
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """``threads`` that fill ``buffers`` together, ``part_bytes`` each at a time; one copy of the GPU fetches up to
    ``copy_bytes`` from one of them. All buffers together are to stay in the CPU's caches."""

    threads: int = 0  # 0: as `threads_for` the usable CPUs of the GPU's NUMA node
    buffers: int = BUFFERS
    copy_bytes: int = COPY_BYTES  # a multiple of 4096, as is part_bytes
    part_bytes: int = PART_BYTES

    @property
    def nbytes(self) -> int:
        return self.buffers * self.copy_bytes

    def of_chunks(self, chunk_bytes: int) -> LoadPlan:
        """The same for operations of at most ``chunk_bytes``: as much memory, in buffers that are no longer."""
        copy_bytes = min(-(-chunk_bytes // _PAGE) * _PAGE, self.copy_bytes)
        buffers = max(self.buffers, min(self.nbytes // copy_bytes, BUFFERS_MAX))
        return replace(
            self, buffers=buffers, copy_bytes=copy_bytes, part_bytes=min(self.part_bytes, copy_bytes)
        )


class FileLoader:
    """The threads and pinned buffers with which one queue loads files. Made by `open`; `aclose` before the queue's."""

    def __init__(self, queue: CopyQueue, plan: LoadPlan, memory: Mapping, pinned: Pinned) -> None:
        self.queue = queue
        self.plan = plan
        self._memory: Mapping | None = memory
        self._pinned = pinned

    @classmethod
    async def open(
        cls, queue: CopyQueue, context: int, plan: LoadPlan | None = None, *, numa_node: int | None = None
    ) -> FileLoader:
        """``numa_node``: the GPU's, None where the machine has one. CudaError, MappingError, CkptpipeError."""
        opening = asyncio.ensure_future(
            asyncio.to_thread(cls._open, queue, context, plan or LoadPlan(), numa_node)
        )
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            made = await _settled(opening)
            if made is not None:
                await made.aclose()
            raise

    @classmethod
    def _open(cls, queue: CopyQueue, context: int, plan: LoadPlan, numa_node: int | None) -> FileLoader:
        for nbytes in (plan.copy_bytes, plan.part_bytes):
            if nbytes < _PAGE or nbytes % _PAGE:
                raise ValueError(f"copies and parts are multiples of {_PAGE} bytes, not {nbytes}")
        cpus = sorted(cpus_of(numa_node))
        plan = replace(plan, threads=plan.threads or threads_for(len(cpus)))
        memory = Mapping(
            plan.nbytes, numa_node=numa_node, prefault_threads=min(plan.threads, PREFAULT_THREADS)
        )
        try:
            pinned = pin(memory, context=context)
            try:
                queue.start_loads(
                    pinned.address,
                    threads=plan.threads,
                    buffers=plan.buffers,
                    copy_bytes=plan.copy_bytes,
                    part_bytes=plan.part_bytes,
                    cpus=array("i", cpus if numa_node is not None else []),
                )
            except BaseException:
                pinned.release()
                raise
        except BaseException:
            memory.close()
            raise
        return cls(queue, plan, memory, pinned)

    async def aclose(self) -> None:
        """Wait for what is under way, end the threads, give the memory back. Idempotent; finishes when cancelled."""
        if self._memory is None:
            return
        memory, self._memory = self._memory, None
        closing = asyncio.ensure_future(asyncio.to_thread(self._close, memory))
        cancelled: BaseException | None = None
        while not closing.done():
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError as error:
                cancelled = error
        closing.result()
        if cancelled is not None:
            raise cancelled

    def _close(self, memory: Mapping) -> None:
        try:
            self.queue.stop_loads()
        finally:
            try:
                self._pinned.release()
            finally:
                memory.close()


async def _settled(opening: asyncio.Future[FileLoader]) -> FileLoader | None:
    """What comes of it, however often the caller is cancelled meanwhile."""
    while not opening.done():
        try:
            await asyncio.wait([opening])
        except asyncio.CancelledError:
            continue
    return None if opening.cancelled() or opening.exception() else opening.result()


def threads_for(cpus: int) -> int:
    """Of one GPU that has ``cpus`` to itself. The queue's threads and the event loop need some: with a thread on each
    of 16, loading took a fifth longer than with 12."""
    return max(1, min(cpus * 3 // 4, THREADS))


def cpus_of(numa_node: int | None) -> set[int]:
    """The CPUs of a NUMA node that this process may use; all that it may use where none of them is."""
    usable = os.sched_getaffinity(0)
    if numa_node is None:
        return usable
    try:
        text = Path(f"/sys/devices/system/node/node{numa_node}/cpulist").read_text(encoding="ascii").strip()
    except OSError:
        return usable
    there: set[int] = set()
    for piece in filter(None, text.split(",")):
        first, _, last = piece.partition("-")
        there.update(range(int(first), int(last or first) + 1))
    return there & usable or usable
