"""What every node of a run shares: ring, worker pool, I/O engine, codec threads; and what the run cost."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from ckptpipe.pipeline.codecs.pool import CodecPool
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.result import RunFacts
from ckptpipe.pipeline.settings import (
    CHUNK_MAX,
    CHUNK_MIN,
    DECOMPRESS_BACKENDS,
    GPU_SCRATCH_MIN,
    MIB,
    Settings,
)
from ckptpipe.pyx.io_engine import IoEngine, open_engine
from ckptpipe.pyx.memory import populate
from ckptpipe.pyx.staging import Lease, StagingRing
from ckptpipe.pyx.workers import WorkerPool
from ckptpipe.storage_backends.abc import BackendContext
from ckptpipe.storage_backends.shielded import in_thread, shielded
from ckptpipe.storage_backends.url_check import identity

DEFAULT_RING = 256 * MIB
SMALL_RING = 64 * MIB  # holds a part of the store with room to spare, and costs little to prefault
RING_MIN_SLOTS = 8


async def _touch(lease: Lease) -> None:
    await in_thread(populate, lease)


class GraphContext:
    """Made by `graph_context`. Rings are made when first asked for, so that a run has only those it uses."""

    def __init__(self, settings: Settings, io: IoEngine, workers: WorkerPool) -> None:
        self.settings = settings
        self.io = io
        self.workers = workers
        self.notes: list[str] = []
        self.gpu_scratch_bytes = 0  # what codecs took of each GPU's memory
        self._rings: list[StagingRing] = []
        self._ring: StagingRing | None = None
        self._codecs: CodecPool | None = None
        self._most = 0
        self._usual = DEFAULT_RING
        self._ring_wanted = True
        self._claimed: set[str] = set()

    @property
    def chunk_bytes(self) -> int:
        return self.settings.chunk_bytes

    def take_chunk_bytes(self, chunk_bytes: int) -> None:
        """The chunks are an image's: their size is given, and a ring that was asked for may be too small."""
        least = RING_MIN_SLOTS * chunk_bytes
        ring = self.settings.ring_bytes
        if 0 < ring < least:
            self.notes.append(f"the ring has {least} bytes, not {ring}: the image's chunks are that large")
            ring = least
        if self.settings.chunk_bytes not in (chunk_bytes, Settings().chunk_bytes):
            asked = self.settings.chunk_bytes
            self.notes.append(f"an image keeps its chunk size: {chunk_bytes} bytes here, not {asked}")
        self.settings = replace(self.settings, chunk_bytes=chunk_bytes, ring_bytes=ring)

    def expect(self, chunks: int) -> None:
        """The source has ``chunks`` chunks: the ring need not be larger than they are, nor under `SMALL_RING`."""
        self._most = max(chunks * self.chunk_bytes, SMALL_RING)

    def expect_no_ring(self) -> None:
        """Nothing goes through the staging ring: `prepare` makes none. One is made where it is asked for after all."""
        self._ring_wanted = False

    def expect_gpu_codecs(self) -> None:
        """GPUs encode: they need many chunks at a time, so that the ring may be as large as the settings allow."""
        self._usual = self.settings.max_ring_bytes

    def claim(self, image_url: str, options: Mapping[str, object] | None = None) -> bool:
        """False where another sink of this run writes the same image. ``options``: of the sink's backend, which may say
        on which service the URL is."""
        place = identity(image_url, options or {})
        if place in self._claimed:
            return False
        self._claimed.add(place)
        return True

    @property
    def ring_bytes(self) -> int:
        """The size that the staging ring has, or will have."""
        return ring_bytes(self.settings, self.chunk_bytes, self._most, self._usual)

    @property
    def ring(self) -> StagingRing:
        """The staging ring that sources fill."""
        if self._ring is None:
            self._ring = self.make_ring(self.ring_bytes // self.chunk_bytes)
        return self._ring

    async def prepare(self) -> None:
        """Make the staging ring, off the loop. Its pages come in slot by slot, on threads, beside the work."""
        if self._ring is None and self._ring_wanted:
            slots = self.ring_bytes // self.chunk_bytes
            self._ring = await in_thread(self.make_ring, slots, 0, None, True)

    @property
    def codecs(self) -> CodecPool:
        if self._codecs is None:
            self._codecs = CodecPool(codec_threads(self.settings))
        return self._codecs

    @property
    def backend_context(self) -> BackendContext:
        """What backends are lent. Half of the ring may wait in writers, the other half is being filled."""
        return BackendContext(io=self.io, workers=self.workers, inflight_bytes=self.ring_bytes // 2)

    def make_ring(
        self, slots: int, slot_bytes: int = 0, numa_node: int | None = None, on_demand: bool = False
    ) -> StagingRing:
        """One more ring (codec output, packing, a GPU on another NUMA node), closed with the run.

        ``on_demand``: a slot's pages are faulted in at its first use; else all of them now."""
        settings = self.settings
        ring = StagingRing(
            max(slots, 1),
            slot_bytes or self.chunk_bytes,
            huge_pages=settings.huge_pages,
            numa_node=settings.numa_node if numa_node is None else numa_node,
            lock=settings.lock_memory,
            toucher=_touch if on_demand else None,
        )
        self._rings.append(ring)
        return ring

    @property
    def all_rings_bytes(self) -> int:
        return sum(ring.nbytes for ring in self._rings)

    def describe(self, facts: RunFacts) -> None:
        facts.ring_bytes = self.all_rings_bytes
        facts.ring_page_bytes = self._ring.page_size if self._ring is not None else 0
        facts.gpu_scratch_bytes = self.gpu_scratch_bytes
        facts.io_engine = self.io.name
        facts.loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
        if self.io.name != self.io.requested and self.io.why:
            facts.notes.append(f"I/O engine {self.io.name}: {self.io.why}")
        facts.notes.extend(self.notes)

    async def aclose(self) -> None:
        """Everything, also what comes after a part that fails; rings that a hung device may still write to stay."""
        async with AsyncExitStack() as last_first:
            last_first.callback(self._close_rings)
            last_first.push_async_callback(self.io.aclose)
            last_first.push_async_callback(self.workers.aclose)
            if self._codecs is not None:
                last_first.push_async_callback(self._codecs.aclose)
            last_first.push_async_callback(self.io.drain)

    def _close_rings(self) -> None:
        for ring in self._rings:
            if not (self.io.inflight and ring.in_use):
                ring.close()


def check_settings(settings: Settings) -> None:
    """UsageError for sizes that cannot work."""
    chunk = settings.chunk_bytes
    if not CHUNK_MIN <= chunk <= CHUNK_MAX or chunk % CHUNK_MIN:
        raise UsageError(
            f"chunk size {chunk} is not possible",
            cure="take a multiple of 4 KiB from 4 KiB to 64 MiB (default 8MiB)",
        )
    if settings.ring_bytes and settings.ring_bytes < RING_MIN_SLOTS * chunk:
        raise UsageError(
            f"a ring of {settings.ring_bytes} bytes holds fewer than {RING_MIN_SLOTS} chunks of {chunk} bytes",
            cure=f"take a ring of at least {RING_MIN_SLOTS * chunk} bytes, or smaller chunks",
        )
    if settings.decompress_backend not in DECOMPRESS_BACKENDS:
        raise UsageError(
            f"decompress backend {settings.decompress_backend!r} is not known",
            cure=f"take one of {', '.join(DECOMPRESS_BACKENDS)}",
        )
    if settings.gpu_scratch_bytes < GPU_SCRATCH_MIN:
        raise UsageError(
            f"{settings.gpu_scratch_bytes} bytes of GPU memory are too little for codecs",
            cure=f"take at least {GPU_SCRATCH_MIN} bytes (--gpu-scratch; default 512MiB)",
        )


def ring_bytes(settings: Settings, chunk_bytes: int, most: int = 0, usual: int = DEFAULT_RING) -> int:
    """Size of the staging ring: as asked, else ``usual`` (``most`` where that is less), at least eight chunks."""
    usual = min(usual, settings.max_ring_bytes, most or usual)
    wanted = settings.ring_bytes or max(usual, RING_MIN_SLOTS * chunk_bytes)
    return wanted // chunk_bytes * chunk_bytes


def codec_threads(settings: Settings) -> int:
    return settings.codec_threads or min(len(os.sched_getaffinity(0)), 32)


@asynccontextmanager
async def graph_context(settings: Settings) -> AsyncIterator[GraphContext]:
    """Open engine and workers on the running loop; everything is closed at the end, also after an error."""
    check_settings(settings)
    io = open_engine(settings.io_engine, depth=settings.io_depth)
    try:
        threads = settings.workers or min(len(os.sched_getaffinity(0)), 16)
        context = GraphContext(settings, io, WorkerPool(threads))
    except BaseException:
        await shielded(io.aclose())
        raise
    try:
        yield context
    finally:
        await shielded(context.aclose())


class Meter:
    """Wall time, CPU time and the peak of resident memory between its making and `read`."""

    def __init__(self) -> None:
        self._resettable = _reset_peak()
        self._rss = _status("VmRSS")
        self._wall = time.perf_counter()
        self._cpu = time.process_time()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._wall

    def read(self, facts: RunFacts) -> None:
        facts.seconds = self.seconds
        facts.cpu_seconds = time.process_time() - self._cpu
        facts.peak_rss_growth = max(0, _status("VmHWM") - self._rss)
        if not self._resettable:
            facts.notes.append(
                "peak memory is that of the process's whole life: clear_refs cannot be written"
            )


def _reset_peak() -> bool:
    """Set VmHWM back to the present resident size (proc_pid_clear_refs(5), value 5)."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return False
    return True


def _status(field: str) -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0
