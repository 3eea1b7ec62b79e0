"""Restores of an evicted process while its image arrives, and after it has: a part of `bench.gpu_launch`."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import ckptpipe
from bench import launched
from bench.budget import Budget
from bench.gpu import gpu_name
from bench.gpu_launch_image import Opened, PoolOf
from bench.gpu_launch_workers import FINAL
from bench.launched import Ask, TimedDriver
from bench.report import Answer, Table
from ckptpipe.pipeline import loop
from ckptpipe.pipeline.cuda import early_start, image_window
from ckptpipe.pipeline.spec import SinkSpec

SWITCHES = "switches"  # a file
NONE = 1 << 40  # chunks of a window that no image is larger than


@dataclass(frozen=True)
class Way:
    """``chunks``: of the window; 0: the pool is filled first. ``threads`` fill it, in parts of ``part_kib``; 0: a thread
    reads as much of a chunk as there are idle ones. ``lanes``, ``awake_us``: of the driver's copies out of the window;
    0 and -1: what the library chooses. ``rest``: seconds between eviction and restore, in which a virtual machine may
    give freed memory back to its host."""

    name: str
    chunks: int = image_window.CHUNKS
    threads: int = image_window.THREADS
    part_kib: int = image_window.PART_BYTES >> 10
    yields: bool = early_start.YIELD  # the scheduler's class of the threads that fill
    lanes: int = 0
    awake_us: int = -1
    rest: float = 0.0

    def switches(self, workers: int) -> str:
        """For launch_switches.c."""
        made = {**FINAL, "workers": workers, "window-lanes": self.lanes, "window-awake-us": self.awake_us}
        return ";".join(f"{key}={value}" for key, value in made.items()) + "\n"


def ways(rest: float, workers: int) -> list[Way]:
    """The usual one first, then those that matter most. ``workers``: of the library."""
    usual = Way("early start")
    before = Way(
        "chunks by a thread each, that yields; 12 of them, all lanes",
        12,
        workers,
        0,
        yields=True,
        lanes=workers,
    )
    parked = replace(usual, awake_us=0)
    return [
        usual,
        replace(parked, name="parked"),
        before,
        replace(parked, name="parked, 4 lanes", lanes=4),
        replace(usual, name="12 chunks", chunks=12),
        replace(usual, name=f"{workers} threads fill", threads=workers),
        replace(usual, name="4 lanes", lanes=4),
        replace(usual, name="6 chunks", chunks=6),
        replace(usual, name="parts of 512 KiB", part_kib=512),
        replace(usual, name="8 threads fill", threads=8),
        replace(parked, name="parked, all lanes", lanes=workers),
        replace(usual, name="all lanes", lanes=workers),
        replace(usual, name="6 lanes", lanes=6),
        replace(usual, name="4 chunks", chunks=4),
        replace(usual, name="parts of 1 MiB", part_kib=1024),
        replace(usual, name="threads that yield", yields=True),
        replace(before, name="as before, and parked", awake_us=0),
        Way("filled first", 0),
        replace(usual, name="no window", chunks=NONE),
        replace(usual, name=f"evicted {rest:g} s ago", rest=rest),
        Way(f"filled first, evicted {rest:g} s ago", 0, rest=rest),
    ]


@contextmanager
def set_as(way: Way) -> Iterator[None]:
    before = image_window.CHUNKS, image_window.THREADS, image_window.PART_BYTES, early_start.YIELD
    image_window.CHUNKS, image_window.THREADS = way.chunks or before[0], way.threads
    image_window.PART_BYTES, early_start.YIELD = way.part_kib << 10, way.yields
    try:
        yield
    finally:
        image_window.CHUNKS, image_window.THREADS, image_window.PART_BYTES, early_start.YIELD = before


def early(chosen: argparse.Namespace, opened: Opened, pool_of: PoolOf) -> Answer:
    table = Table(
        (
            *("GiB", "restore", "restore alone s", "driver's call s", "until it runs s", "whole call s"),
            *("whole / alone", "next checkpoint's mmap s"),
        ),
        ("g", "", ".3f", ".3f", ".3f", ".3f", ".2f", ".3f"),
    )
    gib, budget = chosen.sizes[0], Budget(chosen.seconds)

    async def once(
        driver: TimedDriver, pid: int, ask: Ask, folder: Path, way: Way, workers: int
    ) -> tuple[float, ...]:
        (folder / SWITCHES).write_text(way.switches(workers), encoding="ascii")  # read at the checkpoint
        before = ask("sum")
        cached = SinkSpec(str(folder), options={"direct": "off"})
        await ckptpipe.save(
            pid=pid, to=cached, name="bench", capture="launch", evict=True, overwrite=True, driver=driver
        )
        mapped = launched.image_of(pid).map_seconds
        await asyncio.sleep(way.rest)
        start = time.perf_counter()
        with set_as(way):
            result = await ckptpipe.restore(
                str(folder / "bench"), pid=pid, early_start=bool(way.chunks), driver=driver
            )
        whole = time.perf_counter() - start
        launched.check(ask, before)
        return driver.seconds("restore"), result.facts.pause_seconds or 0.0, whole, mapped

    async def measure() -> None:
        folder = Path(tempfile.mkdtemp(prefix="ckptpipe-launch-", dir=chosen.disk))
        try:
            async with opened() as driver:
                variables = launched.launched(pool_of(gib), launched.switchable(folder))
                variables["CKPTPIPE_BENCH_SWITCHES"] = str(folder / SWITCHES)
                with launched.process(gib, variables) as (pid, ask):
                    workers = launched.warm(pid).workers
                    _, up = await launched.alone(driver, pid, ask, chosen.cycles)
                    made = ways(chosen.rest, workers)
                    for way in budget.variants(
                        made, kind=lambda each: each.rest, name=lambda each: each.name
                    ):
                        wanted = chosen.cycles if way is made[0] else 1
                        times = await budget.cycles(
                            wanted, partial(once, driver, pid, ask, folder, way, workers)
                        )
                        medians = [statistics.median(column) for column in zip(*times, strict=True)]
                        table.add(gib, way.name, up, *medians[:3], medians[2] / up, medians[3])
                        print(*table.rows[-1], flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    loop.run(measure)
    return Answer(
        "gpu_launch_early",
        "Restores of an evicted process from page-cached files, beside the driver's restore alone",
        table,
        {"GiB": gib, "cycles": chosen.cycles, "window chunks": image_window.CHUNKS},
        [
            gpu_name(),
            "medians; every chunk's checksum is compared; whole call: from opening the image until the process runs",
            "next checkpoint's mmap: of the save before it, which makes the pages that were evicted again",
            "to reach: 1.4",
            *budget.notes,
        ],
    )
