"""What does `ckptpipe launch` make of the driver's own checkpoint? Needs a GPU, PyTorch and cuda-python.

    python -m bench.gpu_launch [--sizes 8 32] [--cycles 3]

A PyTorch process of each size is checkpointed and restored by the driver: started plainly, and by `launch` with a
warm pool, by number of workers and kind of page. Seconds are the driver's calls; sums are compared every time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bench.gpu import Ask, gpu_name, target
from bench.report import Answer, Table
from ckptpipe.pipeline.launch.handover import Handover
from ckptpipe.pyx.control_page import ControlPage, PoolState

GIB = 1 << 30
LAUNCH = (sys.executable, "-c", "from ckptpipe.pipeline.cli import main; main()", "launch")
LOCK_MS = 20_000
WARM_SECONDS = 120.0


@dataclass(frozen=True)
class Variant:
    label: str
    options: tuple[str, ...] | None  # of launch; None: started plainly


def variants(gib: float, workers: Sequence[int], pages: Sequence[str]) -> list[Variant]:
    pool = ("--pool", f"{int(gib * 1.25 + 2)}GiB")
    made = [Variant("the driver as it ships", None)]
    made += [Variant(f"launch, {count} workers", (*pool, "--workers", str(count))) for count in workers]
    made += [Variant(f"launch, {kind} pages", (*pool, "--pages", kind)) for kind in pages]
    return made


def call(answer: tuple[Any, ...]) -> None:
    if int(answer[0]) != 0:
        raise RuntimeError(f"the driver answered {answer[0]}")


def pool_state(pid: int, *, warm: bool) -> PoolState:
    """The state of a launched process's pool; ``warm``: once all of it is ready."""
    with Handover.connect(pid) as handover:
        pool, page = handover.attach()
        try:
            with ControlPage(page) as control:
                until = time.monotonic() + WARM_SECONDS
                while warm and control.pool().state == "warming" and time.monotonic() < until:
                    control.wait(control.events, 0.2)
                return control.pool()
        finally:
            os.close(page)
            if pool is not None:
                os.close(pool)


def cycle(pid: int, ask: Ask) -> tuple[float, float]:
    """Seconds of the driver's checkpoint and restore; the process computes the same sums before and after."""
    from cuda.bindings import driver

    before = ask("sum")
    arguments = driver.CUcheckpointLockArgs()
    arguments.timeoutMs = LOCK_MS
    call(driver.cuCheckpointProcessLock(pid, arguments))
    start = time.perf_counter()
    call(driver.cuCheckpointProcessCheckpoint(pid, None))
    middle = time.perf_counter()
    call(driver.cuCheckpointProcessRestore(pid, None))
    end = time.perf_counter()
    call(driver.cuCheckpointProcessUnlock(pid, None))
    if ask("sum") != before or ask("step") != "stepped":
        raise RuntimeError("the process does not compute what it did before")
    return middle - start, end - middle


def measure(sizes: Sequence[float], workers: Sequence[int], pages: Sequence[str], cycles: int) -> Answer:
    from cuda.bindings import driver

    call(driver.cuInit(0))
    table = Table(
        ("GiB", "started", "page KiB", "checkpoint s", "restore s", "together s", "times faster", "note"),
        ("g", "", "", ".2f", ".2f", ".2f", ".1f", ""),
    )
    for gib in sizes:
        stock = 0.0
        for variant in variants(
            gib, workers if gib == min(sizes) else workers[-1:], pages if gib == min(sizes) else ()
        ):
            page, note = None, ""
            prefix = () if variant.options is None else (*LAUNCH, *variant.options, "--")
            with target(gib, 8, prefix) as (pid, ask):
                if variant.options is not None:
                    pool_state(pid, warm=True)
                times = [
                    cycle(pid, ask) for _ in range(cycles if variant.options is not None else min(cycles, 2))
                ]
                if variant.options is not None:
                    with suppress(ProcessLookupError):
                        state = pool_state(pid, warm=False)
                        page = state.page_bytes // 1024
                        note = state.fallback_text or f"{state.hook}, {state.stores}"
            down, up = (statistics.median(pair[column] for pair in times) for column in range(2))
            stock = stock or down + up
            table.add(gib, variant.label, page, down, up, down + up, stock / (down + up), note)
            print(*table.rows[-1], flush=True)
    return Answer(
        "gpu_launch",
        "The driver's checkpoint and restore, as it ships and through `ckptpipe launch`",
        table,
        {"sizes": list(sizes), "cycles": cycles},
        [gpu_name(), "medians; to reach: at least 8 times faster together"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="*", type=float, default=[8.0, 32.0])
    parser.add_argument("--workers", nargs="*", type=int, default=[4, 8, 16, 15])
    parser.add_argument("--pages", nargs="*", default=["small"])
    parser.add_argument("--cycles", type=int, default=3)
    arguments = parser.parse_args()
    measure(arguments.sizes, arguments.workers, arguments.pages, arguments.cycles).publish()


if __name__ == "__main__":
    main()
