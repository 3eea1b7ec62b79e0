"""What are the ways worth in which the capture library copies? Needs a GPU, PyTorch and cuda-python.

    python -m bench.gpu_launch_workers [--size 8] [--workers 8 15 16] [--cycles 2]

One process is checkpointed and restored over and over; from cycle to cycle the library copies in another way, so that
what the machine does meanwhile falls on all of them alike. The process's sums are compared after each, but for the
bound, where copies cost nothing and the bytes are lost, which comes last. About 70 s for 8 GiB on an H200.

Of each way: the driver's calls, and how long the driver was in its copies, in microseconds for each of them. What lies
between them is printed for each cycle.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import launched
from bench.gpu import gpu_name
from bench.launched import GIB, Ask, TimedDriver
from bench.report import Answer, Table
from ckptpipe.pipeline import loop
from ckptpipe.pipeline.launch import LaunchOptions, PoolSize

BEFORE: dict[str, object] = {
    "awake-us": 0,
    "demote": 0,
    "block": 16 << 10,
    "copy-out": "stream",
    "read-ahead": 0,
    "aside": 0,
}
"""Workers are parked between copies, and lines of the driver's buffers stay where they are."""
FINAL: dict[str, object] = {**BEFORE, "awake-us": 100, "demote": 1, "read-ahead": 1}
"""What the library does on its own, where there are processors enough."""


@dataclass
class Way:
    """One way to copy. ``times``: of each cycle, seconds of checkpoint and restore, then microseconds a copy into the
    image and out of it."""

    name: str
    switches: dict[str, object]
    times: list[tuple[float, ...]] = field(default_factory=list)

    def medians(self) -> tuple[float, ...]:
        return tuple(statistics.median(column) for column in zip(*self.times, strict=True))


def ways(workers: Sequence[int]) -> list[Way]:
    """One step after another is added, then one thing is changed."""
    most = max(workers)
    steps: list[tuple[str, dict[str, object]]] = [
        ("parked", BEFORE),
        ("awake", {**BEFORE, "awake-us": 100}),
        ("parked, demoted", {**BEFORE, "demote": 1}),
        ("parked, demoted, ahead", {**FINAL, "awake-us": 0}),
        ("awake, demoted", {**FINAL, "read-ahead": 0}),
        ("awake, demoted, ahead: final", FINAL),
        ("final, aside", {**FINAL, "aside": 1}),
        ("final, clflushopt", {**FINAL, "demote": 2}),
        ("final, out of the image plain", {**FINAL, "copy-out": "plain"}),
        *((f"final, blocks of {kib} KiB", {**FINAL, "block": kib << 10}) for kib in (4, 64)),
    ]
    return [
        *(Way(name, {**switches, "workers": most}) for name, switches in steps),
        *(Way(f"final, {count} threads", {**FINAL, "workers": count}) for count in workers if count != most),
        *(
            Way(f"final, aside, {count} threads", {**FINAL, "aside": 1, "workers": count})
            for count in workers
            if count != most
        ),
    ]


def write(path: Path, switches: dict[str, object]) -> None:
    path.write_text(";".join(f"{key}={value}" for key, value in switches.items()) + "\n", encoding="ascii")


def spent(path: Path) -> tuple[float, float]:
    """Microseconds a copy into the image and out of it."""
    into, out = (
        [int(word) for word in line.split()]
        for line in Path(f"{path}.out").read_text(encoding="ascii").splitlines()[:2]
    )
    return into[1] / max(1, into[0]) / 1e3, out[1] / max(1, out[0]) / 1e3


def compare(gib: float, workers: Sequence[int], cycles: int, only: Sequence[str], shipped: bool) -> Answer:
    table = Table(
        ("way", "checkpoint s", "restore s", "together s", "of the bound", "in us", "out us"),
        ("", ".3f", ".3f", ".3f", ".2f", ".1f", ".1f"),
    )
    chosen = [way for way in ways(workers) if not only or any(word in way.name for word in only)]
    bound = Way("the bound: copies cost nothing", {**FINAL, "workers": max(workers), "free": 1})
    notes = [gpu_name(), "medians, of cycles in turn; in, out: of each of the driver's copies"]

    async def once(way: Way, driver: TimedDriver, pid: int, ask: Ask, path: Path) -> None:
        write(path, way.switches)
        lost = way is bound
        down, up = await launched.cycle(driver, pid, ask, lost=lost)
        way.times.append((down, up, *spent(path)))
        print(way.name, *(f"{number:.3f}" for number in way.times[-1]), flush=True)
        print(*Path(f"{path}.out").read_text(encoding="ascii").splitlines()[2:], sep="\n", flush=True)

    async def measure() -> None:
        driver = await TimedDriver.open()
        assert isinstance(driver, TimedDriver)
        async with driver:
            if shipped:
                with launched.process(gib, os.environ) as (pid, ask):
                    times = await launched.alone(driver, pid, ask, 1)
                    table.add("the driver as it ships", *times, sum(times), None, None, None)
                    print(*table.rows[-1], flush=True)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "switches"
                options = LaunchOptions(
                    pool=PoolSize(nbytes=int((gib * 1.15 + 1.5) * GIB) >> 21 << 21), workers=max(workers)
                )
                variables = launched.launched(options, launched.switchable(Path(folder)))
                variables["CKPTPIPE_BENCH_SWITCHES"] = str(path)
                write(path, chosen[0].switches)
                with launched.process(gib, variables) as (pid, ask):
                    state = launched.warm(pid)
                    notes.append(
                        f"{state.page_bytes >> 10} KiB pages, {state.stores}, {state.workers} threads made"
                    )
                    for _ in range(cycles):
                        for way in chosen:
                            await once(way, driver, pid, ask, path)
                    await once(bound, driver, pid, ask, path)

    loop.run(measure)
    least = sum(bound.medians()[:2])
    for way in [*chosen, bound]:
        down, up, into, out = way.medians()
        table.add(way.name, down, up, down + up, least / (down + up), into, out)
    return Answer(
        "gpu_launch_ways",
        "The driver's checkpoint and restore through `ckptpipe launch`, by the way of copying",
        table,
        {"GiB": gib, "cycles": cycles, "workers": list(workers)},
        notes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=float, default=8.0, help="GiB")
    parser.add_argument("--workers", nargs="+", type=int, default=[8, 12, 15, 16])
    parser.add_argument("--cycles", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[], help="ways whose names have one of these")
    parser.add_argument("--shipped", action="store_true", help="the driver as it ships, too")
    given = parser.parse_args()
    compare(given.size, given.workers, given.cycles, given.only, given.shipped).publish()


if __name__ == "__main__":
    main()
