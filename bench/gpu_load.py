"""Which threads, copies and buffers load files into a GPU fastest, and what a start costs. Needs a GPU and cuda-python.

    python -m bench.gpu_load [grid] [start] [--gib 4] [--disk /dev/shm] [--wide]

`grid`: `CopyQueue.load` alone, by threads, buffers, bytes of a copy and of a part; the best of these from a file that
stays in the CPU's caches too (the link and the driver alone). Beside it reading alone. `start`: each step of opening and
closing a restore, cold in a new process, then once more in the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

from bench.report import OUT, Answer, Table
from ckptpipe.pyx import cuda

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CHUNK = 8 * MIB
FILES = 16
INFLIGHT = 32
CACHED = 16 * MIB  # of a file that stays in the caches

BEST = 4  # plans that also load what is in the caches

Row = tuple[str, int, int, float, float, float]


class Held:
    """A file as `CopyQueue.load` wants it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def share(self) -> Held:
        return self

    def release(self) -> None:
        return


class Target:
    """One allocation on GPU 0, and the primary context."""

    def __init__(self, nbytes: int) -> None:
        from cuda.bindings import driver

        self._driver: Any = driver
        self._ask("cuInit", 0)
        self.context = int(self._ask("cuDevicePrimaryCtxRetain", 0))
        self._ask("cuCtxPushCurrent", driver.CUcontext(self.context))
        self.address = int(self._ask("cuMemAlloc", nbytes))
        self._ask("cuCtxPopCurrent")

    def _ask(self, name: str, *arguments: object) -> Any:
        status, *answer = getattr(self._driver, name)(*arguments)
        if int(status):
            raise RuntimeError(f"{name}: {status}")
        return answer[0] if answer else None

    def close(self) -> None:
        self._ask("cuCtxPushCurrent", self._driver.CUcontext(self.context))
        self._ask("cuMemFree", self.address)
        self._ask("cuCtxPopCurrent")
        self._ask("cuDevicePrimaryCtxRelease", 0)


def chunks_of(descriptors: list[int], total: int, within: int) -> Iterator[tuple[Held, int, int]]:
    """(file, offset, where it goes): round the files, as the lanes of an image are read; ``within``: bytes of each."""
    for number in range(total // CHUNK):
        lane, step = number % len(descriptors), number // len(descriptors)
        yield Held(descriptors[lane]), step * CHUNK % within, number * CHUNK


async def load_all(
    queue: cuda.CopyQueue, descriptors: list[int], total: int, within: int, address: int
) -> float:
    """GB/s of `total` bytes with `INFLIGHT` chunks under way."""
    work = chunks_of(descriptors, total, within)

    async def feed() -> None:
        for file, offset, where in work:
            await queue.load(file, offset, CHUNK, address + where)

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(INFLIGHT):
            group.create_task(feed())
    return total / (time.perf_counter() - start) / 1e9


@asynccontextmanager
async def loading(target: Target, plan: cuda.LoadPlan) -> AsyncIterator[cuda.CopyQueue]:
    async with await cuda.CopyQueue.create(0, target.context) as queue:
        loader = await cuda.FileLoader.open(queue, target.context, plan)
        try:
            yield queue
        finally:
            await loader.aclose()


def read_all(descriptors: list[int], within: int, threads: int, piece: int) -> float:
    """GB/s of `pread` into one buffer a thread: what the page cache gives."""
    work = iter([(fd, at) for at in range(0, within, piece) for fd in descriptors])

    def read() -> None:
        buffer = bytearray(piece)
        for descriptor, offset in work:
            os.preadv(descriptor, [buffer], offset)

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(read) for _ in range(threads)]:
            done.result()
    return within * len(descriptors) / (time.perf_counter() - start) / 1e9


def plans(wide: bool) -> list[cuda.LoadPlan]:
    usable = len(os.sched_getaffinity(0))
    threads = sorted(
        {min(count, usable) for count in ((6, 8, 9, 10, 11, 12, 13, 14, 16) if wide else (10, 12, 14))}
    )
    copies = (MIB, 2 * MIB, 4 * MIB, 8 * MIB) if wide else (4 * MIB, 8 * MIB)
    parts = (128 * KIB, 256 * KIB, 512 * KIB, MIB) if wide else (256 * KIB, 512 * KIB)
    return [cuda.LoadPlan(*each) for each in product(threads, (3, 4, 5, 6)[not wide :], copies, parts)]


async def grid(
    descriptors: list[int], within: int, chosen: Sequence[cuda.LoadPlan], repeat: int
) -> list[Row]:
    rows: list[Row] = []
    total = within * len(descriptors)
    for threads, piece in product((8, 16), (256 << 10, MIB)):
        got = max(read_all(descriptors, within, threads, piece) for _ in range(2))
        rows.append(("pread alone", threads, threads, 0, piece / KIB, got))
    target = Target(total)
    seen: dict[cuda.LoadPlan, float] = {}

    async def measure(what: str, plan: cuda.LoadPlan, files: list[int], each: int) -> float:
        async with loading(target, plan) as queue:
            got = max([await load_all(queue, files, total, each, target.address) for _ in range(repeat)])
        rows.append((what, plan.threads, plan.buffers, plan.copy_bytes / MIB, plan.part_bytes / KIB, got))
        return got

    try:
        for plan in chosen:
            seen[plan] = await measure("load", plan, descriptors, within)
        for plan in sorted(seen, key=lambda plan: -seen[plan])[:BEST]:
            await measure("load, source in cache", plan, descriptors[: CACHED // CHUNK], CHUNK)
    finally:
        target.close()
    return sorted(rows, key=lambda row: (row[0], -row[-1]))


def measure_grid(
    gib: float, parent: str, chosen: Sequence[cuda.LoadPlan] | None = None, repeat: int = 2
) -> Answer:
    table = Table(
        ("what", "threads", "buffers", "copy MiB", "part KiB", "GB/s"),
        ("", "", "", ".0f", ".0f", ".1f"),
    )
    folder = Path(tempfile.mkdtemp(prefix="ckptpipe-load-", dir=parent))
    each = max(int(gib * GIB) // FILES // CHUNK, 1) * CHUNK
    descriptors: list[int] = []
    try:
        block = os.urandom(CHUNK)
        for number in range(FILES):
            path = folder / f"f{number}"
            with open(path, "wb") as file:
                for _ in range(each // CHUNK):
                    file.write(block)
            descriptors.append(os.open(path, os.O_RDONLY))
        for row in asyncio.run(grid(descriptors, each, plans(False) if chosen is None else chosen, repeat)):
            table.add(*row)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)
    return Answer(
        "gpu_load",
        "Files into device memory: threads, copies, buffers",
        table,
        {"gib": each * FILES / GIB, "files": FILES, "chunk MiB": CHUNK // MIB, "repeat": repeat},
    )


def best_of(answer: Answer, each: int = 12) -> Answer:
    """The answer with the best rows of each kind; they are sorted."""
    kept: dict[str, int] = {}
    rows = []
    for row in answer.table.rows:
        kept[row[0]] = kept.get(row[0], 0) + 1
        if kept[row[0]] <= each:
            rows.append(row)
    answer.table.rows = rows
    return answer


# -- what a start costs --------------------------------------------------------------------------------------


class Steps:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def took(self, what: str) -> None:
        now = time.perf_counter()
        self.seconds[what] = now - self._since
        self._since = now


async def steps_of_a_start(url: str, steps: Steps) -> None:
    """Opening and closing as a restore of the image at ``url`` from local files has them, and a ring's share."""
    from ckptpipe import Settings
    from ckptpipe.pipeline.cuda.driver import CudaDriver
    from ckptpipe.pipeline.cuda.loading import loadable
    from ckptpipe.pipeline.opening import reading
    from ckptpipe.pyx.staging import StagingRing

    steps.took("loop, import")
    async with reading(url, None, Settings()) as (reader, _):
        steps.took(f"engine and workers, image of {reader.manifest.totals.chunks} chunks opened")
        await loadable(reader)
        steps.took("files looked at")
        driver = await CudaDriver.open()
        steps.took("cuda-python, cuInit")
        await driver.devices()
        steps.took("devices")
        context = await driver.retain(0)
        steps.took("primary context")
        cuda.prepare(0)
        steps.took("kernel: compiled, or from the cache")
        queue = await cuda.CopyQueue.create(0, context, elide_zeros=True)
        steps.took("queue: module, streams, events")
        loader = await cuda.FileLoader.open(queue, context)
        steps.took(
            f"loader: {loader.plan.nbytes / MIB:.0f} MiB mapped and pinned, {loader.plan.threads} threads"
        )
        await loader.aclose()
        steps.took("loader closed")
        await queue.aclose()
        steps.took("queue closed")
        ring = StagingRing(32, 8 * MIB)
        steps.took("a ring: 256 MiB prefaulted")
        pinned = await driver.run(lambda: cuda.pin(ring, context=context))
        steps.took("a ring: pinned")
        await driver.run(pinned.release)
        steps.took("a ring: unpinned")
        ring.close()
        steps.took("a ring: unmapped")
        await driver.release(0)
        steps.took("context released")
        await driver.aclose()
        steps.took("driver's threads ended")
    steps.took("engine and workers closed")


def start(url: str) -> dict[str, float]:
    from ckptpipe.pipeline import loop

    steps = Steps()
    loop.run(lambda: steps_of_a_start(url, steps))
    steps.took("loop closed")
    return steps.seconds


def print_starts(parent: str = "/dev/shm") -> None:
    """In a new process: the first is cold; the others keep a context alive, as a caller's own does."""
    from cuda.bindings import driver

    import ckptpipe

    with tempfile.TemporaryDirectory(prefix="ckptpipe-start-", dir=parent) as folder:
        ckptpipe.save_blocking(
            {"x": os.urandom(64 * MIB)}, to=folder, name="a", settings=ckptpipe.Settings(chunk_bytes=64 << 10)
        )
        cold = start(f"{folder}/a")
        status, _ = driver.cuDevicePrimaryCtxRetain(0)
        if int(status):
            raise RuntimeError(str(status))
        warm = [start(f"{folder}/a") for _ in range(4)]
    print(json.dumps({"cold": cold, "warm": min(warm, key=lambda steps: sum(steps.values()))}))


def measure_start() -> Answer:
    table = Table(
        ("step", "cold ms", "cold again ms", "warm ms"),
        ("", ".1f", ".1f", ".1f"),
    )
    seen: list[dict[str, dict[str, float]]] = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", "from bench.gpu_load import print_starts; print_starts()"],
            check=True,
            capture_output=True,
            text=True,
        )
        seen.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = seen
    for step, seconds in first["cold"].items():
        again, warm = (found.get(step, 0.0) for found in (second["cold"], second["warm"]))
        table.add(step, seconds * 1e3, again * 1e3, warm * 1e3)
    return Answer("gpu_start", "What a start on a GPU costs, step by step", table, {})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", help="grid, start; both where neither is named")
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--disk", default="/dev/shm", help="where the files lie")
    parser.add_argument("--wide", action="store_true", help="many more combinations")
    arguments = parser.parse_args()
    if not arguments.what or "start" in arguments.what:
        measure_start().publish()
    if not arguments.what or "grid" in arguments.what:
        answer = measure_grid(arguments.gib, arguments.disk, plans(arguments.wide))
        OUT.mkdir(exist_ok=True)
        (OUT / "gpu_load_all.json").write_text(json.dumps(answer.as_json()) + "\n", encoding="utf-8")
        best_of(answer).publish()


if __name__ == "__main__":
    main()
