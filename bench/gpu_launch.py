"""What does `ckptpipe launch` make of the driver's own checkpoint? Needs a GPU, PyTorch and cuda-python.

    python -m bench.gpu_launch [--only speed workers pages save early refill] [--sizes 8 32]

A PyTorch process is checkpointed and restored; its sums are compared every time. Parts, and about how long each
takes on an H200 with a disk of 2 GB/s:

    speed    the driver as it ships, launch, and launch with copies that cost nothing (the bound)   8+32 GiB: 180 s
    workers  by number of copying threads, at the first size                                        8 GiB: 90 s
    pages    by kind of the pool's pages, at the first size (hugetlb where pages can be reserved)   8 GiB: 60 s
    save     saves while the driver works, to null and to a disk, beside the checkpoint alone       8+32 GiB: 150 s
    early    restores of an evicted process from page-cached files, beside the restore alone        8 GiB: 60 s
    refill   what filling an evicted pool consists of: its pages, the files' bytes, both             8 GiB: 45 s

Each part prints its table when it is done, and writes JSON of its own. Seconds of "alone" are medians of the
driver's calls by themselves in the same process.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from bench import gpu_launch_early, gpu_launch_image, gpu_launch_refill, launched
from bench.gpu import gpu_name
from bench.launched import GIB, TimedDriver
from bench.report import Answer, Table
from ckptpipe.pipeline import loop
from ckptpipe.pipeline.launch import LaunchOptions, PoolSize

HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
Part = Callable[[argparse.Namespace], Answer]


def pool_of(gib: float, **options: Any) -> LaunchOptions:
    return LaunchOptions(pool=PoolSize(nbytes=int((gib * 1.15 + 1.5) * GIB) >> 21 << 21), **options)


@asynccontextmanager
async def opened() -> AsyncIterator[TimedDriver]:
    driver = await TimedDriver.open()
    assert isinstance(driver, TimedDriver)
    async with driver:
        yield driver


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

    async def measure() -> None:
        async with opened() as driver:
            for gib in chosen.sizes:
                with launched.process(gib, os.environ) as (pid, ask):
                    shipped = await launched.alone(driver, pid, ask, 1 if gib > 16 else 2)
                with launched.process(gib, launched.launched(pool_of(gib))) as (pid, ask):
                    page = launched.warm(pid).page_bytes >> 10
                    ours = await launched.alone(driver, pid, ask, chosen.cycles)
                with tempfile.TemporaryDirectory() as folder:
                    free = launched.free_copies(Path(folder))
                    with launched.process(gib, launched.launched(pool_of(gib), free)) as (pid, ask):
                        launched.warm(pid)
                        bound = await launched.cycle(driver, pid, ask, lost=True)
                for name, pages, times in (
                    ("the driver as it ships", None, shipped),
                    ("launch", page, ours),
                    ("launch, copies cost nothing: the bound", page, bound),
                ):
                    faster, share = sum(shipped) / sum(times), sum(bound) / sum(times)
                    table.add(gib, name, pages, *times, sum(times), faster, share)
                    print(*table.rows[-1], flush=True)

    loop.run(measure)
    return Answer(
        "gpu_launch",
        "The driver's checkpoint and restore, as it ships and through `ckptpipe launch`",
        table,
        {"sizes": chosen.sizes, "cycles": chosen.cycles},
        [gpu_name(), "medians of the driver's calls; to reach: at least 8 times faster together"],
    )


def variants(
    chosen: argparse.Namespace, name: str, question: str, made: Sequence[tuple[str, dict[str, Any]]]
) -> Answer:
    table = Table(
        ("started", "workers", "pages", "page KiB", "checkpoint s", "restore s", "together s", "note"),
        ("", "", "", "", ".2f", ".2f", ".2f", ""),
    )
    gib = chosen.sizes[0]

    async def measure() -> None:
        async with opened() as driver:
            with launched.process(gib, os.environ) as (pid, ask):
                times = await launched.alone(driver, pid, ask, 1)
                table.add("the driver as it ships", None, None, None, *times, sum(times), "")
            for label, options in made:
                with (
                    reserved(gib, options.get("pages") == "hugetlb"),
                    launched.process(gib, launched.launched(pool_of(gib, **options))) as (pid, ask),
                ):
                    state = launched.warm(pid)
                    times = await launched.alone(driver, pid, ask, chosen.cycles)
                    note = state.text or launched.warm(pid).fallback_text or f"{state.hook}, {state.stores}"
                    row = (label, state.workers, state.pages, state.page_bytes >> 10)
                    table.add(*row, *times, sum(times), note)
                    print(*table.rows[-1], flush=True)

    loop.run(measure)
    return Answer(name, question, table, {"GiB": gib, "cycles": chosen.cycles}, [gpu_name(), "medians"])


@contextmanager
def reserved(gib: float, wanted: bool) -> Any:
    """Huge pages for a hugetlb pool, given back at the end; where they cannot be had, the pool says so."""
    before = HUGE_PAGES.read_text() if wanted else ""
    try:
        if wanted:
            pages = int(before) + (pool_of(gib).pool.nbytes >> 21) + 16
            try:
                HUGE_PAGES.write_text(str(pages))
            except OSError as error:
                print(f"no hugetlb pages could be reserved: {error}")
        yield
    finally:
        if wanted and HUGE_PAGES.read_text() != before:
            HUGE_PAGES.write_text(before)


def workers(chosen: argparse.Namespace) -> Answer:
    question = "The driver's checkpoint and restore through `ckptpipe launch`, by number of workers"
    made = [(f"launch --workers {count}", {"workers": count}) for count in chosen.workers]
    return variants(chosen, "gpu_launch_workers", question, made)


def pages(chosen: argparse.Namespace) -> Answer:
    question = "The driver's checkpoint and restore through `ckptpipe launch`, by the pool's pages"
    made = [(f"launch --pages {kind}", {"pages": kind}) for kind in chosen.pages]
    return variants(chosen, "gpu_launch_pages", question, made)


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
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4, 8, 15])
    parser.add_argument("--pages", nargs="+", default=["small", "auto", "hugetlb"])
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
    for name in chosen.only:
        PARTS[name](chosen).publish()


if __name__ == "__main__":
    main()
