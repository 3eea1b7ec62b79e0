"""Saves of a launched process while the driver checkpoints it, and restores while its image arrives: parts of
`bench.gpu_launch`."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import ckptpipe
from bench import launched
from bench.budget import Budget
from bench.gpu import disk_rate, gpu_name
from bench.launched import Ask, TimedDriver
from bench.report import Answer, Table
from ckptpipe.pipeline import loop
from ckptpipe.pipeline.launch import LaunchOptions
from ckptpipe.pipeline.sources.launched_image import LaunchedImageSource

Opened = Callable[[], AbstractAsyncContextManager[TimedDriver]]
PoolOf = Callable[[float], LaunchOptions]


@dataclass(frozen=True)
class Saved:
    checkpoint: float  # the driver's call, while the save goes on beside it
    stored: float  # from that call's beginning until everything is durable
    whole: float  # the call of save, without the driver's restore
    nbytes: int
    note: str


@dataclass(frozen=True)
class Way:
    """``early``: while the driver works; ``jobs``: threads that copy meanwhile, 0: as usual; ``sums``: chunks whose checksum
    the capture library has taken are not read."""

    name: str
    early: bool = True
    jobs: int = 0
    sums: bool = True
    cycles: int = 1


NVME = "nvme"


@contextmanager
def fresh_runtime() -> Iterator[None]:
    """A runtime directory in which no driver is known."""
    before = os.environ.get("XDG_RUNTIME_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["XDG_RUNTIME_DIR"]
            else:
                os.environ["XDG_RUNTIME_DIR"] = before


async def saved(driver: TimedDriver, pid: int, ask: Ask, to: str) -> Saved:
    before = ask("sum")
    start = time.perf_counter()
    result = await ckptpipe.save(
        pid=pid, to=to, name="bench", capture="launch", overwrite=True, driver=driver
    )
    whole = time.perf_counter() - start - driver.seconds("restore")
    launched.check(ask, before)
    stored = driver.began("restore") - driver.began("checkpoint")
    words = [note for note in result.facts.notes if "while the driver worked" in note]
    early = (
        words[0].split(": ", 1)[1].replace(" were sent while the driver worked", " early")
        if words
        else "none early"
    )
    early = early.split(", since")[0]
    early += "".join(
        f"; {each.split(': ')[1].split()[0]} unread" for each in result.facts.notes if "as they lie" in each
    )
    return Saved(driver.seconds("checkpoint"), stored, whole, result.raw_bytes, early)


def save(chosen: argparse.Namespace, opened: Opened, pool_of: PoolOf) -> Answer:
    table = Table(
        (
            *("GiB", "save", "checkpoint alone s", "with the save s", "until stored s", "whole call s"),
            *("disk alone s", "until stored / larger alone", "note"),
        ),
        ("g", "", ".3f", ".3f", ".3f", ".3f", ".2f", ".2f", ""),
    )

    notes: list[str] = []

    async def to_null(driver: TimedDriver, pid: int, ask: Ask, way: Way, budget: Budget) -> Saved:
        LaunchedImageSource.early, LaunchedImageSource.early_jobs = way.early, way.jobs
        LaunchedImageSource.sums = way.sums
        try:
            made = await budget.cycles(way.cycles, lambda: saved(driver, pid, ask, "null:"))
        finally:
            LaunchedImageSource.early, LaunchedImageSource.early_jobs = True, 0
            LaunchedImageSource.sums = True
        return sorted(made, key=lambda each: each.stored)[len(made) // 2]

    async def to_disk(gib: float, driver: TimedDriver, pid: int, ask: Ask) -> tuple[Saved, float]:
        """The save, and the seconds that the disk needs for as many bytes."""
        folder = Path(tempfile.mkdtemp(prefix="ckptpipe-launch-", dir=chosen.disk))
        try:
            each = await saved(driver, pid, ask, str(folder))
            shutil.rmtree(folder)
            folder.mkdir()
            rate = max(disk_rate(folder, max(1, int(gib)), block) for block in (4, 16))
            return each, each.nbytes / 1e9 / rate
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def rows(gib: float, driver: TimedDriver, pid: int, ask: Ask, budget: Budget) -> None:
        ways = [Way("alone"), Way("null, after the checkpoint", early=False), Way("null, driver unknown")]
        ways += [
            Way(f"null, every byte read{f', {jobs} threads' if jobs else ''}", jobs=jobs, sums=False)
            for jobs in chosen.early_jobs
        ]
        ways.append(Way("null, not read", cycles=chosen.cycles))
        if gib <= chosen.disk_most:
            ways.append(Way(NVME))
        down = 0.0
        for way in budget.variants(ways, kind=lambda each: each.name == NVME, name=lambda each: each.name):
            if way.name == "alone":
                down, _ = await launched.alone(driver, pid, ask, chosen.cycles, budget)
                continue
            if way.name == NVME:
                each, disk = await to_disk(gib, driver, pid, ask)
            else:
                each, disk = await to_null(driver, pid, ask, way, budget), 0.0
            times = (each.checkpoint, each.stored, each.whole)
            table.add(gib, way.name, down, *times, disk or None, each.stored / max(down, disk), each.note)
            print(*table.rows[-1], flush=True)
        notes.extend(f"{gib:g} GiB: {note}" for note in budget.notes)

    async def measure() -> None:
        whole = Budget(chosen.seconds)
        async with opened() as driver:
            for at, gib in enumerate(chosen.sizes):
                budget = Budget(whole.left * gib / sum(chosen.sizes[at:]))
                with fresh_runtime(), launched.process(gib, launched.launched(pool_of(gib))) as (pid, ask):
                    launched.warm(pid)
                    await rows(gib, driver, pid, ask, budget)

    loop.run(measure)
    return Answer(
        "gpu_launch_save",
        "Saves of a launched process while the driver checkpoints it",
        table,
        {"sizes": chosen.sizes, "cycles": chosen.cycles},
        [
            gpu_name(),
            "until stored: from the beginning of the driver's checkpoint; whole call: without the driver's restore",
            "disk alone: dd, direct, of as many bytes, the better of 4 and 16 MiB",
            "to reach: 1.1",
            *notes,
        ],
    )
