"""What does `ckptpipe launch` make of the driver's own checkpoint? Needs a GPU, PyTorch and cuda-python.

    python -m bench.gpu_launch [--only speed workers pages save early refill] [--sizes 8 32] [--seconds N]

A PyTorch process is checkpointed and restored; its sums are compared every time. Parts, and about how long each
takes on an H200 with a disk of 2 GB/s:

    speed    the driver as it ships, launch, and launch with copies that cost nothing (the bound)   8+32 GiB: 180 s
    workers  by number of copying threads, at the first size                                        8 GiB: 110 s
    pages    by kind of the pool's pages, at the first size (hugetlb where pages can be reserved)   8 GiB: 75 s
    save     saves while the driver works, to null and to a disk, beside the checkpoint alone       8+32 GiB: 150 s
    early    restores of an evicted process from page-cached files, beside the restore alone        8 GiB: 60 s
    refill   what filling an evicted pool consists of: its pages, the files' bytes, both             8 GiB: 45 s

Each part prints its table when it is done, and writes JSON of its own. Within ``--seconds`` it makes fewer cycles, then
leaves variants out, and says so: nothing is cut in the middle. Seconds of "alone" are medians of the driver's calls by
themselves in the same process.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import gpu_launch_early, gpu_launch_image, gpu_launch_refill, launched
from bench.budget import Budget
from bench.gpu import gpu_name
from bench.huge_pages import HUGE, reserved
from bench.launched import GIB, TimedDriver
from bench.report import Answer, Table
from ckptpipe.pipeline import loop
from ckptpipe.pipeline.launch import LaunchOptions, PoolSize

Part = Callable[[argparse.Namespace], Answer]


def pool_of(gib: float, **options: Any) -> LaunchOptions:
    return LaunchOptions(pool=PoolSize(nbytes=int((gib * 1.15 + 1.5) * GIB) >> 21 << 21), **options)


@asynccontextmanager
async def opened() -> AsyncIterator[TimedDriver]:
    driver = await TimedDriver.open()
    assert isinstance(driver, TimedDriver)
    async with driver:
        yield driver


SHIPPED, LAUNCH, BOUND = "the driver as it ships", "launch", "launch, copies cost nothing: the bound"


def speed(chosen: argparse.Namespace) -> Answer:
    table = Table(
        (
            "GiB",
            "started",
            "page KiB",
            "checkpoint s",
            "restore s",
            "together s",
            "times faster",
            "of the bound",
        ),
        ("g", "", "", ".2f", ".2f", ".2f", ".1f", ".2f"),
    )
    budget = Budget(chosen.seconds)
    steps = [(gib, started) for gib in chosen.sizes for started in (SHIPPED, LAUNCH, BOUND)]
    found: dict[tuple[float, str], tuple[float, float]] = {}
    pages: dict[tuple[float, str], int | None] = {}

    async def step(driver: TimedDriver, gib: float, started: str, folder: Path) -> tuple[float, float]:
        if started == SHIPPED:
            with launched.process(gib, os.environ) as (pid, ask):
                return await launched.alone(driver, pid, ask, 1 if gib > 16 else 2, budget)
        library = launched.free_copies(folder) if started == BOUND else None
        with launched.process(gib, launched.launched(pool_of(gib), library)) as (pid, ask):
            pages[gib, started] = launched.warm(pid).page_bytes >> 10
            if started == BOUND:
                return await launched.cycle(driver, pid, ask, lost=True)
            return await launched.alone(driver, pid, ask, chosen.cycles, budget)

    async def measure() -> None:
        async with opened() as driver:
            for gib, started in budget.variants(
                steps,
                weight=lambda each: each[0],
                kind=lambda each: each[1],
                name=lambda each: f"{each[1]} at {each[0]:g} GiB",
            ):
                with tempfile.TemporaryDirectory() as folder:
                    times = found[gib, started] = await step(driver, gib, started, Path(folder))
                print(gib, started, *(f"{each:.3f}" for each in times), flush=True)

    loop.run(measure)
    for gib, started in found:
        times, shipped, bound = (found.get((gib, each)) for each in (started, SHIPPED, BOUND))
        assert times is not None
        whole = sum(times)
        faster, share = shipped and sum(shipped) / whole, bound and sum(bound) / whole
        table.add(gib, started, pages.get((gib, started)), *times, whole, faster, share)
    return Answer(
        "gpu_launch",
        "The driver's checkpoint and restore, as it ships and through `ckptpipe launch`",
        table,
        {"sizes": chosen.sizes, "cycles": chosen.cycles},
        [
            gpu_name(),
            "medians of the driver's calls; to reach: at least 8 times faster together",
            *budget.notes,
        ],
    )


@dataclass(frozen=True)
class Variant:
    """One way to launch. ``anonymous``: with a pool that is no memfd."""

    label: str
    options: Mapping[str, Any] = field(default_factory=dict)
    anonymous: bool = False


def variants(chosen: argparse.Namespace, name: str, question: str, made: Sequence[Variant]) -> Answer:
    table = Table(
        (
            *("started", "workers", "pages", "page KiB", "checkpoint s", "restore s", "together s"),
            *("times faster", "note"),
        ),
        ("", "", "", "", ".2f", ".2f", ".2f", ".1f", ""),
    )
    gib, budget = chosen.sizes[0], Budget(chosen.seconds)
    shipped: list[float] = []

    async def step(driver: TimedDriver, each: Variant, folder: Path) -> None:
        if each.label == SHIPPED:
            with launched.process(gib, os.environ) as (pid, ask):
                times = await launched.alone(driver, pid, ask, 1)
            shipped.append(sum(times))
            table.add(each.label, None, None, None, *times, sum(times), 1.0, "")
            return
        options = pool_of(gib, **each.options)
        hugetlb = each.options.get("pages") == "hugetlb"
        with reserved(options.pool.nbytes + 16 * HUGE) if hugetlb else nullcontext(True) as enough:
            library = launched.anonymous(folder) if each.anonymous else None
            with launched.process(gib, launched.launched(options, library)) as (pid, ask):
                state = launched.warm(pid)
                times = await launched.alone(driver, pid, ask, chosen.cycles, budget)
                note = state.text or launched.warm(pid).fallback_text or f"{state.hook}, {state.stores}"
        note += "" if enough else "; the system reserved no huge pages"
        row = (each.label, state.workers, state.pages, state.page_bytes >> 10)
        table.add(*row, *times, sum(times), shipped[0] / sum(times), note)

    async def measure() -> None:
        async with opened() as driver:
            for each in budget.variants([Variant(SHIPPED), *made], name=lambda each: each.label):
                with tempfile.TemporaryDirectory() as folder:
                    await step(driver, each, Path(folder))
                print(*table.rows[-1], flush=True)

    loop.run(measure)
    notes = [gpu_name(), "medians", *budget.notes]
    return Answer(name, question, table, {"GiB": gib, "cycles": chosen.cycles}, notes)


def workers(chosen: argparse.Namespace) -> Answer:
    question = "The driver's checkpoint and restore through `ckptpipe launch`, by number of workers"
    made = [Variant(f"launch --workers {count}", {"workers": count}) for count in chosen.workers]
    return variants(chosen, "gpu_launch_workers", question, made)


POOLS = {
    "small": Variant("memfd, small pages", {"pages": "small"}),
    "auto": Variant("memfd, huge pages by MADV_COLLAPSE or on a fault", {"pages": "auto"}),
    "hugetlb": Variant("memfd, hugetlb", {"pages": "hugetlb"}),
    "anonymous": Variant("anonymous, transparent huge pages: cannot be shared", anonymous=True),
}


def pages(chosen: argparse.Namespace) -> Answer:
    question = "The driver's checkpoint and restore through `ckptpipe launch`, by the pool's pages"
    return variants(chosen, "gpu_launch_pages", question, [POOLS[kind] for kind in chosen.pages])


PARTS: dict[str, Part] = {
    "speed": speed,
    "workers": workers,
    "pages": pages,
    "save": lambda chosen: gpu_launch_image.save(chosen, opened, pool_of),
    "refill": gpu_launch_refill.refill,
    "early": lambda chosen: gpu_launch_early.early(chosen, opened, pool_of),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--sizes", nargs="+", type=float, default=[8.0, 32.0], help="GiB")
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="of each part: fewer cycles, then fewer variants"
    )
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4, 8, 15, 16])
    parser.add_argument("--pages", nargs="+", choices=list(POOLS), default=list(POOLS))
    parser.add_argument(
        "--early-jobs", nargs="+", type=int, default=[0], help="of save; 0: half of the workers"
    )
    parser.add_argument("--disk", default=os.environ.get("CKPTPIPE_BENCH_DIR") or tempfile.gettempdir())
    parser.add_argument(
        "--disk-most", type=float, default=8.0, help="GiB: larger processes are saved to null alone"
    )
    parser.add_argument(
        "--rest", type=float, default=5.0, help="seconds that memory lies free, of early and refill"
    )
    chosen = parser.parse_args()
    failed: list[Exception] = []
    for name in chosen.only:  # each writes its answer before the next begins
        try:
            PARTS[name](chosen).publish()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            failed.append(error)
    if failed:
        raise ExceptionGroup("parts that failed", failed)


if __name__ == "__main__":
    main()
