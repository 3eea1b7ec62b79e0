"""What does filling an evicted pool consist of? A part of `bench.gpu_launch`; needs no GPU.

Pages are made for a memfd of which all is holes, by all threads, in several ways: of memory that this machine freed a
moment ago, and of memory that lay free for a while, which a virtual machine may have given back to its host. Then the
bytes of a page-cached file are read into it, with checksums, as a restore does it. What a restore of an evicted
process needs at least is the larger of that and of the driver's restore alone.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bench.budget import Budget
from bench.huge_pages import HUGE, reserved
from bench.report import Answer, Table
from ckptpipe.pipeline import loop
from ckptpipe.pyx.pool_mapping import PoolMapping
from ckptpipe.pyx.staging import lease_range
from ckptpipe.pyx.workers import WorkerPool

GIB, SLICE, CHUNK = 1 << 30, 32 << 20, 8 << 20
WINDOW_CHUNKS = 24
POPULATE_READ, POPULATE_WRITE, COLLAPSE = 22, 23, 25  # madvise(2)
KEEP_SIZE, PUNCH_HOLE = 1, 2  # fallocate(2)
MFD_HUGETLB, MFD_HUGE_2MB = 4, 21 << 26
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


@dataclass(frozen=True)
class OpenFile:
    """A file as `WorkerPool.read_file` wants it."""

    path: str
    descriptor: int

    def fileno(self) -> int:
        return self.descriptor

    def share(self) -> Self:
        return self

    def release(self) -> None:
        return


class Pool:
    def __init__(self, nbytes: int, *, hugetlb: bool = False) -> None:
        self.nbytes = nbytes
        self.descriptor = os.memfd_create(
            "ckptpipe-bench", os.MFD_CLOEXEC | (MFD_HUGETLB | MFD_HUGE_2MB if hugetlb else 0)
        )
        os.ftruncate(self.descriptor, nbytes)
        self.mapping = PoolMapping(self.descriptor, nbytes, writable=True)

    def close(self) -> None:
        self.mapping.close()
        os.close(self.descriptor)

    def advise(self, start: int, nbytes: int, advice: int) -> None:
        if LIBC.madvise(self.mapping.address + start, nbytes, advice):
            raise OSError(ctypes.get_errno(), "madvise")

    def allocate(self, start: int, nbytes: int, mode: int = KEEP_SIZE) -> None:
        if LIBC.fallocate(self.descriptor, mode, start, nbytes):
            raise OSError(ctypes.get_errno(), "fallocate")

    def punch(self) -> None:
        self.allocate(0, self.nbytes, KEEP_SIZE | PUNCH_HOLE)

    def page_kib(self) -> int:
        """2048 where most of it is mapped by huge pages."""
        text = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
        part = text[text.index(f"{self.mapping.address:x}-") :]
        found = [
            int(line.split()[1])
            for name in ("ShmemPmdMapped:", "KernelPageSize:")
            for line in part.splitlines()[1:30]
            if line.startswith(name)
        ]
        return 2048 if found[0] * 2048 > self.nbytes or found[1] == 2048 else 4


def small(pool: Pool, start: int, nbytes: int) -> None:
    pool.advise(start, nbytes, POPULATE_WRITE)


def collapsed(pool: Pool, start: int, nbytes: int) -> None:
    for at in range(start, start + nbytes, HUGE):
        pool.advise(at, mmap.PAGESIZE, POPULATE_WRITE)
    pool.advise(start, nbytes, COLLAPSE)


def allocated(pool: Pool, start: int, nbytes: int) -> None:
    pool.allocate(start, nbytes)


WAYS: dict[str, Callable[[Pool, int, int], None]] = {
    "populated, small pages": small,
    "collapsed, huge pages": collapsed,
    "fallocate, small pages": allocated,
}


def make(pool: Pool, way: Callable[[Pool, int, int], None], threads: ThreadPoolExecutor) -> float:
    start = time.perf_counter()
    pieces = range(0, pool.nbytes, SLICE)
    for _ in threads.map(lambda at: way(pool, at, min(SLICE, pool.nbytes - at)), pieces):
        pass
    return time.perf_counter() - start


async def read(workers: WorkerPool, file: OpenFile, pool: Pool, *, huge: bool, window: int = 0) -> float:
    """Seconds to read all of ``file``, chunk by chunk, into ``pool``; over and over into ``window`` bytes of it."""
    start = time.perf_counter()
    places = iter(range(0, pool.nbytes, CHUNK))

    async def some() -> None:
        for at in places:
            nbytes = min(CHUNK, pool.nbytes - at)
            address = pool.mapping.address + (at % window if window else at)
            with lease_range(address, nbytes, pool.mapping) as lent:
                await workers.read_file(file, at, lent, nbytes, huge=huge)

    # Two tasks for the same place never overlap: there are fewer tasks than places.
    count = min(workers.threads + 2, window // CHUNK if window else 1 << 20)
    await asyncio.gather(*(some() for _ in range(count)))
    return time.perf_counter() - start


def refill(chosen: argparse.Namespace) -> Answer:
    nbytes = int(chosen.sizes[0] * GIB) // CHUNK * CHUNK or CHUNK
    table = Table(("GiB", "what", "memory", "page KiB", "s", "GB/s"), ("g", "", "", "", ".3f", ".1f"))
    count = min(len(os.sched_getaffinity(0)), 16)
    budget = Budget(chosen.seconds)

    def note(what: str, memory: str, page: int | None, seconds: float) -> None:
        table.add(chosen.sizes[0], what, memory, page, seconds, nbytes / 1e9 / seconds)
        print(*table.rows[-1], flush=True)

    def pages(threads: ThreadPoolExecutor) -> None:
        pool = Pool(nbytes)
        try:
            make(pool, small, threads)  # so that what follows finds memory that was used
            rests = {"freed now": 0.0, f"freed {chosen.rest:g} s ago": chosen.rest}
            made = [(name, memory) for memory in rests for name in WAYS]
            for name, memory in budget.variants(made, kind=lambda each: each[1], name=", ".join):
                pool.punch()
                time.sleep(rests[memory])
                seconds = make(pool, WAYS[name], threads)
                note(f"pages alone: {name}", memory, pool.page_kib(), seconds)
        finally:
            pool.close()
        with reserved(nbytes) as enough:
            if enough:
                pool = Pool(nbytes, hugetlb=True)
                try:
                    note("pages alone: hugetlb", "reserved", 2048, make(pool, small, threads))
                finally:
                    pool.close()

    async def bytes_of(file: OpenFile) -> None:
        pool = Pool(nbytes)
        try:
            async with WorkerPool(count) as workers:
                await read(workers, file, pool, huge=True)
                note(
                    "file to pages that are there",
                    "",
                    pool.page_kib(),
                    await read(workers, file, pool, huge=False),
                )
                for huge in (True, False):
                    pool.punch()
                    seconds = await read(workers, file, pool, huge=huge)
                    note("file to holes, pages made on the way", "freed now", pool.page_kib(), seconds)
                seconds = await read(workers, file, pool, huge=False, window=WINDOW_CHUNKS * CHUNK)
                note(f"file to a window of {WINDOW_CHUNKS} chunks", "", None, seconds)
        finally:
            pool.close()

    folder = Path(tempfile.mkdtemp(prefix="ckptpipe-refill-", dir=chosen.disk))
    try:
        with ThreadPoolExecutor(count) as threads:
            path = folder / "cached"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.ftruncate(descriptor, nbytes)
                block = os.urandom(1 << 20) * (SLICE >> 20)
                offsets = range(0, nbytes, SLICE)
                for _ in threads.map(lambda at: os.pwrite(descriptor, block[: nbytes - at], at), offsets):
                    pass
                loop.run(lambda: bytes_of(OpenFile(str(path), descriptor)))
            finally:
                os.close(descriptor)
            path.unlink()
            pages(threads)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Answer(
        "gpu_launch_refill",
        "What filling an evicted pool consists of",
        table,
        {"GiB": chosen.sizes[0], "threads": count},
        [f"{count} threads; files are page-cached, and every byte of them is checksummed", *budget.notes],
    )
