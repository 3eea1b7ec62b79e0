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
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ckptpipe
from bench import launched
from bench.budget import Budget
from bench.gpu import gpu_name
from bench.gpu_launch_image import Opened, PoolOf
from bench.launched import Ask, TimedDriver
from bench.report import Answer, Table
from ckptpipe.pipeline import loop
from ckptpipe.pipeline.cuda import early_start, image_window
from ckptpipe.pipeline.spec import SinkSpec

NONE = 1 << 40  # chunks of a window that no image is larger than


@dataclass(frozen=True)
class Way:
    """``chunks``: of the window; 0: the pool is filled first. ``rest``: seconds between eviction and restore, in which
    a virtual machine may give freed memory back to its host."""

    name: str
    chunks: int = image_window.CHUNKS
    rest: float = 0.0
    idle: bool = True  # the scheduler's class of the threads that fill


def ways(rest: float) -> list[Way]:
    """The usual one first, then those that matter most."""
    return [
        Way("early start"),
        Way("filled first", 0),
        Way("early start, no window", NONE),
        Way("early start, window of a quarter of the chunks", image_window.CHUNKS // 4),
        Way("early start, window of half as many chunks", image_window.CHUNKS // 2),
        Way("early start, window of twice as many chunks", image_window.CHUNKS * 2),
        Way("early start, threads of the usual class", idle=False),
        Way(f"early start, evicted {rest:g} s ago", rest=rest),
        Way(f"filled first, evicted {rest:g} s ago", 0, rest),
    ]


@contextmanager
def set_as(way: Way) -> Iterator[None]:
    before = image_window.CHUNKS, early_start.IDLE
    image_window.CHUNKS, early_start.IDLE = way.chunks or before[0], way.idle
    try:
        yield
    finally:
        image_window.CHUNKS, early_start.IDLE = before


def early(chosen: argparse.Namespace, opened: Opened, pool_of: PoolOf) -> Answer:
    table = Table(
        (
            *("GiB", "restore", "restore alone s", "driver's call s", "until it runs s", "whole call s"),
            *("whole / alone", "next checkpoint's mmap s"),
        ),
        ("g", "", ".3f", ".3f", ".3f", ".3f", ".2f", ".3f"),
    )
    gib, budget = chosen.sizes[0], Budget(chosen.seconds)

    async def once(driver: TimedDriver, pid: int, ask: Ask, folder: Path, way: Way) -> tuple[float, ...]:
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
                with launched.process(gib, launched.launched(pool_of(gib))) as (pid, ask):
                    launched.warm(pid)
                    _, up = await launched.alone(driver, pid, ask, chosen.cycles)
                    made = ways(chosen.rest)
                    for way in budget.variants(
                        made, kind=lambda each: each.rest, name=lambda each: each.name
                    ):
                        wanted = chosen.cycles if way is made[0] else 1
                        times = await budget.cycles(wanted, partial(once, driver, pid, ask, folder, way))
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
