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
    return Saved(driver.seconds("checkpoint"), stored, whole, result.raw_bytes, early.split(", since")[0])


def save(chosen: argparse.Namespace, opened: Opened, pool_of: PoolOf) -> Answer:
    table = Table(
        (
            *("GiB", "save", "checkpoint alone s", "with the save s", "until stored s", "whole call s"),
            *("disk alone s", "until stored / larger alone", "note"),
        ),
        ("g", "", ".3f", ".3f", ".3f", ".3f", ".2f", ".2f", ""),
    )

    async def rows(gib: float, driver: TimedDriver, pid: int, ask: Ask) -> None:
        down, _ = await launched.alone(driver, pid, ask, chosen.cycles)
        ways: list[tuple[str, bool, int]] = [
            ("null, after the checkpoint", False, 0),
            ("null, driver unknown", True, 0),
        ]
        for jobs in chosen.early_jobs:
            ways += [(f"null{f', {jobs} threads' if jobs else ''}", True, jobs)] * chosen.cycles
        made: dict[str, list[Saved]] = {}
        for name, early, jobs in ways:
            LaunchedImageSource.early, LaunchedImageSource.early_jobs = early, jobs
            made.setdefault(name, []).append(await saved(driver, pid, ask, "null:"))
        LaunchedImageSource.early, LaunchedImageSource.early_jobs = True, 0
        for name, all_of in made.items():
            each = sorted(all_of, key=lambda one: one.stored)[len(all_of) // 2]
            times = (each.checkpoint, each.stored, each.whole)
            table.add(gib, name, down, *times, None, each.stored / down, each.note)
            print(*table.rows[-1], flush=True)
        if gib > chosen.disk_most:
            return
        folder = Path(tempfile.mkdtemp(prefix="ckptpipe-launch-", dir=chosen.disk))
        try:
            each = await saved(driver, pid, ask, str(folder))
            shutil.rmtree(folder)
            folder.mkdir()
            disk = (
                each.nbytes
                / 1e9
                / max(disk_rate(folder, max(1, int(gib)), 4), disk_rate(folder, max(1, int(gib)), 16))
            )
            times = (each.checkpoint, each.stored, each.whole)
            table.add(gib, "nvme", down, *times, disk, each.stored / max(down, disk), each.note)
            print(*table.rows[-1], flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def measure() -> None:
        async with opened() as driver:
            for gib in chosen.sizes:
                with fresh_runtime(), launched.process(gib, launched.launched(pool_of(gib))) as (pid, ask):
                    launched.warm(pid)
                    await rows(gib, driver, pid, ask)

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
        ],
    )
