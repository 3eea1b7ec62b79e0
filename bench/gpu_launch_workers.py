"""What are the ways worth in which the capture library copies? Needs a GPU, PyTorch and cuda-python.

    python -m bench.gpu_launch_workers [--size 8] [--workers 8 15 16] [--cycles 2]

One process is checkpointed and restored over and over; from cycle to cycle the library copies in another way, so that
what the machine does meanwhile falls on all of them alike. The process's sums are compared after each, but for the
bound, where copies cost nothing and the bytes are lost, which comes last. About 70 s for 8 GiB on an H200.

Of each way: the driver's calls, and how long the driver was in its copies, in microseconds for each of them; `behind`
is the part of that in which it waited for the copy before to be stored.
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

BEFORE = {"awake-us": 0, "copy-out": "stream"}
"""Workers are parked between copies, and the driver waits for each copy."""
AHEAD = {"read-ahead": 1, "fetch-level": 2, "lane-steps": 1, "aside": 1}
DEFER = {"defer": 8, "shares": 2, "store-awake-us": 60}


@dataclass
class Way:
    """One way to copy. ``times``: of each cycle, seconds of checkpoint and restore, then microseconds a copy into the
    image, out of it, and waited for stores."""

    name: str
    switches: dict[str, object]
    times: list[tuple[float, ...]] = field(default_factory=list)

    def medians(self) -> tuple[float, ...]:
        return tuple(statistics.median(column) for column in zip(*self.times, strict=True))


def ways(workers: Sequence[int]) -> list[Way]:
    """One thing changes at a time, for checkpoint and restore at once: neither has to do with the other."""
    most = max(workers)
    into = [
        ("deferred", {}),
        *((f"deferred, shares of 1/{shares}", {"shares": shares}) for shares in (1, 4)),
        *((f"deferred, {pieces} outstanding", {"defer": pieces}) for pieces in (4, 12)),
        ("deferred, parked", {"store-awake-us": 0}),
        *((f"deferred, {count} storers", {"storers": count}) for count in workers if count != most),
    ]
    out = [
        ("ahead, aside, awake 100 us", {"awake-us": 100}),
        *((f"ahead, aside, awake {awake} us", {"awake-us": awake}) for awake in (0, 50)),
        *((f"{pieces} ahead, aside", {"awake-us": 100, "read-ahead": pieces}) for pieces in (2, 4)),
        *((f"ahead to level {level}, aside", {"awake-us": 100, "fetch-level": level}) for level in (1, 3)),
        *((f"ahead, aside, {steps} steps", {"awake-us": 100, "lane-steps": steps}) for steps in (2, 4)),
        *((f"ahead, aside, {count} workers", {"awake-us": 100, "workers": count}) for count in workers),
    ]
    found = [
        Way(f"{most} workers, parked between copies", {**BEFORE, "workers": most}),
        Way("the driver's buffers looked at", {**BEFORE, "workers": most, "look-back": 1}),
    ]
    for k in range(max(len(into), len(out))):
        down, up = into[min(k, len(into) - 1)], out[min(k, len(out) - 1)]
        switches = {**BEFORE, **AHEAD, **DEFER, "workers": most, **down[1], **up[1]}
        found.append(Way(f"in: {down[0]}; out: {up[0]}", switches))
    return found


def write(path: Path, switches: dict[str, object]) -> None:
    path.write_text(";".join(f"{key}={value}" for key, value in switches.items()) + "\n", encoding="ascii")


def spent(path: Path) -> tuple[float, float, float]:
    """Microseconds a copy into the image and out of it, and of the former in waiting for stores."""
    lines = Path(f"{path}.out").read_text(encoding="ascii").split("\n")
    (into, into_ns, behind_ns), (out, out_ns, _) = (
        [int(word) for word in line.split()] for line in lines[:2]
    )
    return into_ns / max(1, into) / 1e3, out_ns / max(1, out) / 1e3, behind_ns / max(1, into) / 1e3


def compare(gib: float, workers: Sequence[int], cycles: int, only: Sequence[str], shipped: bool) -> Answer:
    table = Table(
        ("way", "checkpoint s", "restore s", "together s", "of the bound", "in us", "out us", "behind us"),
        ("", ".3f", ".3f", ".3f", ".2f", ".1f", ".1f", ".1f"),
    )
    chosen = [way for way in ways(workers) if not only or any(word in way.name for word in only)]
    bound = Way("the bound: copies cost nothing", {**BEFORE, "workers": max(workers), "free": 1})
    notes = [gpu_name(), "medians, of cycles in turn; in, out, behind: of each of the driver's copies"]

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
                    table.add("the driver as it ships", *times, sum(times), None, None, None, None)
                    print(*table.rows[-1], flush=True)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "switches"
                options = LaunchOptions(
                    pool=PoolSize(nbytes=int((gib * 1.15 + 1.5) * GIB) >> 21 << 21), workers=max(workers)
                )
                variables = launched.launched(options, launched.switchable(Path(folder)))
                variables["CKPTPIPE_LAUNCH"] += ";defer=8"  # the threads for it are made once
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
        down, up, into, out, behind = way.medians()
        table.add(way.name, down, up, down + up, least / (down + up), into, out, behind)
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
