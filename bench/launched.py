"""Processes that a benchmark starts by `ckptpipe launch`, the driver's calls with a clock, and the bound's library."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bench.budget import Budget
from ckptpipe.pipeline.cuda.driver import CudaDriver
from ckptpipe.pipeline.launch import Handover, LaunchOptions, environment
from ckptpipe.pipeline.launch.libraries import CAPTURE, library
from ckptpipe.pipeline.launch.options import VARIABLE
from ckptpipe.pyx.control_page import ControlPage, ImageState, PoolState

GIB = 1 << 30
LOCK_SECONDS = 20.0
WARM_SECONDS = 120.0
SOURCES = Path(__file__).resolve().parent.parent / "pyx" / "preload"
KERNELS = SOURCES.parent / "kernels"
Ask = Callable[[str], str]


class TimedDriver(CudaDriver):
    """Notes when each of the driver's calls began and ended, by name."""

    spans: dict[str, tuple[float, float]]

    async def lock(self, pid: int, timeout: float) -> None:
        self.spans = {}
        with self._timed("lock"):
            await super().lock(pid, timeout)

    async def checkpoint(self, pid: int) -> None:
        with self._timed("checkpoint"):
            await super().checkpoint(pid)

    async def restore(self, pid: int, pairs: Mapping[str, str] | None = None) -> None:
        with self._timed("restore"):
            await super().restore(pid, pairs)

    async def unlock(self, pid: int) -> None:
        with self._timed("unlock"):
            await super().unlock(pid)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.spans[name] = start, time.perf_counter()

    def seconds(self, name: str) -> float:
        start, end = self.spans[name]
        return end - start

    def began(self, name: str) -> float:
        return self.spans[name][0]


@contextmanager
def process(gib: float, variables: Mapping[str, str], tensors: int = 8) -> Iterator[tuple[int, Ask]]:
    """A process of `bench.gpu_target` in an environment: its pid, and a way to ask it."""
    child = subprocess.Popen(
        [sys.executable, "-m", "bench.gpu_target", str(gib), str(tensors)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(variables),
    )
    assert child.stdin is not None and child.stdout is not None
    stdin, stdout = child.stdin, child.stdout

    def ask(line: str) -> str:
        stdin.write(line + "\n")
        stdin.flush()
        return stdout.readline().strip()

    try:
        if not stdout.readline().startswith("ready"):
            raise RuntimeError("the target did not start")
        yield child.pid, ask
    finally:
        child.kill()
        child.wait()


def launched(options: LaunchOptions, capture: Path | None = None) -> dict[str, str]:
    """The environment of a launched program; ``capture``: another build of the capture library."""
    made = environment(options, os.environ)
    made[VARIABLE] += os.environ.get("CKPTPIPE_BENCH_LAUNCH", "")  # ";key=value" for what has no option
    if capture is not None:
        made["LD_PRELOAD"] = made["LD_PRELOAD"].replace(str(library(CAPTURE)), str(capture))
    return made


def warm(pid: int) -> PoolState:
    """The state of a process's pool, once all of it is ready."""
    with Handover.connect(pid) as handover:
        pool, page = handover.attach()
        try:
            with ControlPage(page) as control:
                until = time.monotonic() + WARM_SECONDS
                while control.pool().state in ("absent", "warming") and time.monotonic() < until:
                    control.wait(control.events, 0.2)
                return control.pool()
        finally:
            os.close(page)
            if pool is not None:
                os.close(pool)


def image_of(pid: int) -> ImageState:
    """The image in a process's pool, that was mapped last."""
    with Handover.connect(pid) as handover:
        pool, page = handover.attach()
        try:
            with ControlPage(page) as control:
                return max(control.images(), key=lambda image: image.generation)
        finally:
            os.close(page)
            if pool is not None:
                os.close(pool)


async def cycle(driver: TimedDriver, pid: int, ask: Ask, *, lost: bool = False) -> tuple[float, float]:
    """Seconds of the driver's checkpoint and restore alone; the process must go on as before, unless it is ``lost``."""
    before = "" if lost else ask("sum")
    await driver.lock(pid, LOCK_SECONDS)
    await driver.checkpoint(pid)
    await driver.restore(pid)
    if lost:
        return driver.seconds("checkpoint"), driver.seconds("restore")
    await driver.unlock(pid)
    check(ask, before)
    return driver.seconds("checkpoint"), driver.seconds("restore")


def check(ask: Ask, before: str) -> None:
    if ask("sum") != before or ask("step") != "stepped":
        raise RuntimeError("the process does not compute what it did before")


async def alone(
    driver: TimedDriver, pid: int, ask: Ask, cycles: int, budget: Budget | None = None
) -> tuple[float, float]:
    """Medians of so many cycles, or of fewer where ``budget`` has no time for them."""
    times = await (budget or Budget()).cycles(cycles, lambda: cycle(driver, pid, ask))
    down, up = (statistics.median(pair[column] for pair in times) for column in range(2))
    return down, up


def free_copies(folder: Path) -> Path:
    """The capture library with copies that cost nothing: what the driver itself needs. Whatever goes through it is
    lost, so no installed library has this."""
    return _own_library(folder, "-DCKPT_BENCH_FREE=1")


def anonymous(folder: Path) -> Path:
    """The capture library with a pool that is no memfd, but anonymous memory on transparent huge pages, as the driver's
    own image could be: to compare with, since nobody can share it."""
    return _own_library(
        folder, "-Wl,--wrap=ckpt_raw_mmap", str(Path(__file__).with_name("launch_anonymous.c"))
    )


def switchable(folder: Path) -> Path:
    """The capture library with copies that can be changed while a process runs: see launch_switches.c."""
    return _own_library(folder)


def _own_library(folder: Path, *flags: str) -> Path:
    made = folder / CAPTURE
    command = ["cc", "-std=c11", "-O2", "-fPIC", "-shared", "-fno-builtin", "-fvisibility=hidden", "-pthread"]
    sources = sorted(str(each) for each in SOURCES.glob("*.c") if each.stem != "interpose")
    sources.append(str(Path(__file__).with_name("launch_switches.c")))
    command += ["-DCKPT_PROBES", f"-I{SOURCES}", f"-I{KERNELS}", *flags]
    objects = [str(folder / f"{stem}.o") for stem in ("crc32c", "crc32c_native")]
    for made_of in objects:  # with builtins: they copy words
        kernel = str(KERNELS / f"{Path(made_of).stem}.c")
        subprocess.run(["cc", "-O2", "-fPIC", "-fvisibility=hidden", "-c", "-o", made_of, kernel], check=True)
    subprocess.run([*command, "-o", str(made), *sources, *objects, "-ldl"], check=True)
    return made
