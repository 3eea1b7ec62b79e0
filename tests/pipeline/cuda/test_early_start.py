"""Restoring an evicted process while its image still arrives."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckptpipe
from ckptpipe.pipeline.cuda import image_window
from ckptpipe.pipeline.cuda.early_start import Arrivals
from ckptpipe.pipeline.cuda.image_window import CHUNKS, ImageWindow
from ckptpipe.pipeline.cuda.launched_pool import LaunchedPool, PooledImage
from ckptpipe.pipeline.sinks.pool import PoolRange
from ckptpipe.pipeline.sources.image import ImageSource
from ckptpipe.pyx.staging import Lease, leaked, outstanding
from ckptpipe.pyx.workers import live_pools
from tests.pipeline.cuda.launched import record
from tests.pipeline.cuda.runs import SETTINGS, images, recover, restore, runs, save
from tests.pipeline.cuda.test_evict import held
from tests.pipeline.runs import run
from tests.preload.launched import FIXED, MIB, Launched
from tests.simcuda import SimWorld

RESTORE = "cuCheckpointProcessRestore"
ENDED = 74
WINDOW = CHUNKS * SETTINGS.chunk_bytes  # less than the image
LARGE = replace(
    SETTINGS, chunk_bytes=MIB, ring_bytes=8 * MIB
)  # of these chunks a window holds all of the image
Launch = Callable[..., Launched]


def evict(it: Launched, to: Path, **options: Any) -> None:
    save(it.pid, to, capture="launch", evict=True, **options)


def before_the_last_chunk(monkeypatch: pytest.MonkeyPatch, chunks: int, then: Callable[[], object]) -> None:
    """Call ``then`` when all chunks but one of those that are no zeros have room in the pool."""
    lend, count = LaunchedPool.lend, 0

    def counted(self: LaunchedPool, offset: int, nbytes: int, **options: bool) -> Lease:
        nonlocal count
        count += options.get("writable", False)
        if count == chunks:
            count += 1
            then()
        return lend(self, offset, nbytes, **options)

    monkeypatch.setattr(LaunchedPool, "lend", counted)


def test_the_driver_reads_before_everything_is_there(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = launch()
    result = save(it.pid, workdir, capture="launch", evict=True)
    seen: list[str] = []

    def look() -> None:
        it.until(lambda _: it.page.images()[0].phase == "reading")
        (image,) = it.page.images()
        assert image.gate == "closed" and image.ready < image.nbytes and image.read <= image.ready
        seen.append(image.phase)

    before_the_last_chunk(monkeypatch, result.chunks - result.zero_chunks, look)
    back = restore(workdir / "a", it.target, early_start=True)
    assert seen == ["reading"] and back.chunks == result.chunks
    runs(world, it.target, runtime)
    assert outstanding() == 0 and leaked() == 0
    assert (it.page.pool().feeders, it.page.pool().gate_waiters) == (0, 0)


def test_cycles(world: SimWorld, launch: Launch, workdir: Path, runtime: Path) -> None:
    it = launch(program="sums")
    for cycle in range(3):
        evict(it, workdir, name=f"{cycle}", compress="zstd:1" if cycle == 1 else "none")
        restore(workdir / f"{cycle}", it.target, early_start=True)
        runs(world, it.target, runtime)
    save(it.pid, workdir, capture="launch", leave="checkpointed")
    restore(workdir / "a", it.target, early_start=True)  # nothing to wait for: as ever
    runs(world, it.target, runtime)


def test_two_processes(world: SimWorld, launch: Launch, workdir: Path, runtime: Path) -> None:
    both = [launch(FIXED, ((0, 3 * MIB + 5000),)), launch(FIXED, ((1, 2 * MIB),))]
    pids = [it.pid for it in both]
    options: dict[str, Any] = {"processes": pids, "settings": SETTINGS}
    run(ckptpipe.save(to=workdir, name="a", capture="launch", evict=True, **options))
    run(ckptpipe.restore(str(workdir / "a"), early_start=True, **options))
    for it in both:
        runs(world, it.target, runtime)


def test_bytes_that_stay_bad_end_the_process(launch: Launch, workdir: Path) -> None:
    it = launch(errors=subprocess.DEVNULL)
    evict(it, workdir)
    path = max(images(workdir), key=lambda each: each.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ckptpipe.TargetGone) as caught:
        restore(workdir / "a", it.target, early_start=True)
    assert isinstance(caught.value.__cause__, ckptpipe.ImageCorrupt)
    assert it.target.wait() == ENDED
    assert it.page.pool().ended and "chunk" in it.page.pool().failure
    assert outstanding() == 0 and leaked() == 0


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("threads", [1, 5])
def test_a_bad_part_in_the_middle_of_a_chunk_is_read_again(
    world: SimWorld,
    launch: Launch,
    workdir: Path,
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
) -> None:
    """The driver has begun by then, and does not get it before."""
    it = launch()
    result = save(it.pid, workdir, capture="launch", evict=True)
    monkeypatch.setattr(image_window, "PART_BYTES", SETTINGS.chunk_bytes // 8)
    monkeypatch.setattr(image_window, "THREADS", threads)
    path = max(images(workdir), key=lambda each: each.stat().st_size)
    good = path.read_bytes()
    bad = bytearray(good)
    bad[len(good) // 2 // SETTINGS.chunk_bytes * SETTINGS.chunk_bytes + SETTINGS.chunk_bytes * 5 // 8] ^= 1
    path.write_bytes(bad)
    refused: list[int] = []
    refuse = ImageSource.refuse

    def repaired(self: ImageSource, stream: int, number: int, found: int) -> ckptpipe.ImageCorrupt:
        refused.append(number)
        path.write_bytes(good)
        return refuse(self, stream, number, found)

    monkeypatch.setattr(ImageSource, "refuse", repaired)
    back = restore(workdir / "a", it.target, early_start=True)
    assert len(refused) == 1 and back.chunks == result.chunks
    runs(world, it.target, runtime)
    assert outstanding() == 0 and leaked() == 0 and live_pools() == 0


def test_a_file_that_is_cut_off_while_the_driver_reads(
    launch: Launch, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = launch(errors=subprocess.DEVNULL)
    evict(it, workdir)
    monkeypatch.setattr(image_window, "PART_BYTES", SETTINGS.chunk_bytes // 8)
    path = max(images(workdir), key=lambda each: each.stat().st_size)
    before_the_last_chunk(monkeypatch, 5, lambda: os.truncate(path, path.stat().st_size // 2 + 12345))
    files = open_files()
    with pytest.raises(ckptpipe.TargetGone) as caught:
        restore(workdir / "a", it.target, early_start=True)
    assert isinstance(caught.value.__cause__, ckptpipe.ImageIncomplete)
    assert it.target.wait() == ENDED
    assert outstanding() == 0 and leaked() == 0 and live_pools() == 0 and open_files() == files


def test_nothing_is_asked_of_the_driver_before_something_has_come(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path
) -> None:
    it = launch()
    one, two = workdir / "one", workdir / "two"
    save(it.pid, [str(one), str(two)], capture="launch", evict=True)
    path = max(images(one), key=lambda each: each.stat().st_size)
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    with pytest.raises(ckptpipe.CaptureFailed, match=r"stays CHECKPOINTED.*another copy"):
        restore(one / "a", it.target, early_start=True)
    assert world.calls(RESTORE) == 0 and record(runtime, it)["evicted"] is True
    restore(two / "a", it.target, early_start=True)
    runs(world, it.target, runtime)


def test_a_driver_that_cannot_restore_leaves_the_image_in_the_pool(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path
) -> None:
    it = launch()
    evict(it, workdir, settings=LARGE)
    world.fault(RESTORE, target=it.pid, error="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(ckptpipe.CaptureFailed, match=r"OUT_OF_MEMORY.*recover --pid"):
        restore(workdir / "a", it.target, early_start=True, settings=LARGE)
    assert record(runtime, it)["evicted"] is False
    recover(it.target)
    runs(world, it.target, runtime)


def test_a_driver_that_cannot_restore_from_a_window_leaves_the_image_where_it_is_stored(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path
) -> None:
    it = launch()
    evict(it, workdir)
    empty = held(it)
    world.fault(RESTORE, target=it.pid, error="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(ckptpipe.CaptureFailed, match=r"OUT_OF_MEMORY.*restore it.*restore URL --pid"):
        restore(workdir / "a", it.target, early_start=True)
    assert record(runtime, it)["evicted"] is True and held(it) == empty
    recover(it.target)
    runs(world, it.target, runtime)
    assert outstanding() == 0 and leaked() == 0


def test_a_window_is_all_the_memory_that_it_takes(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = launch()
    it.until(lambda pool: pool.state == "ready")
    full = held(it)
    result = save(it.pid, workdir, capture="launch", evict=True)
    empty = held(it)
    assert empty + result.raw_bytes == full
    taken: list[int] = []
    before_the_last_chunk(monkeypatch, result.chunks - result.zero_chunks, lambda: taken.append(held(it)))
    restore(workdir / "a", it.target, early_start=True)
    assert [each - empty for each in taken] == [WINDOW]
    runs(world, it.target, runtime)
    it.until(lambda pool: pool.state == "ready")
    assert held(it) == full, "made ready for the next checkpoint while the program runs"


def test_a_driver_that_goes_back(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None was seen to; then the image is read again from there. Here it is the window that leaps ahead, once."""
    it = launch()
    result = save(it.pid, workdir, capture="launch", evict=True)
    window: list[ImageWindow] = []
    look, rewind, release = ImageWindow.look, ImageWindow.rewind, LaunchedPool.release
    came_back: list[int] = []

    def leap(self: ImageWindow) -> None:
        if not window and it.page.images()[0].gate_waits:  # it waits for its first piece
            window.append(self)
            self.pool.rewind(self.image, 4 * MIB)
        look(self)

    def noted(self: ImageWindow, number: int) -> None:
        came_back.append(number)
        rewind(self, number)

    def held_back(self: LaunchedPool, image: PooledImage, ready: int) -> None:
        if came_back:
            release(self, image, ready)

    monkeypatch.setattr(ImageWindow, "look", leap)
    monkeypatch.setattr(ImageWindow, "rewind", noted)
    monkeypatch.setattr(LaunchedPool, "release", held_back)
    back = restore(workdir / "a", it.target, early_start=True)
    assert came_back == [0] and back.chunks == result.chunks
    runs(world, it.target, runtime)


def test_a_cancellation_comes_when_it_runs_again(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = launch()
    evict(it, workdir)

    async def main() -> None:
        whole = ckptpipe.restore(str(workdir / "a"), pid=it.pid, early_start=True, settings=SETTINGS)
        task = asyncio.create_task(whole)
        with monkeypatch.context() as patched:
            before_the_last_chunk(patched, 5, task.cancel)
            with pytest.raises(asyncio.CancelledError):
                await task

    monkeypatch.setattr(image_window, "PART_BYTES", SETTINGS.chunk_bytes // 8)
    files = open_files()
    asyncio.run(main())
    assert open_files() == files
    runs(world, it.target, runtime)
    assert outstanding() == 0 and leaked() == 0 and live_pools() == 0


def test_a_target_that_dies_meanwhile(launch: Launch, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = launch()
    evict(it, workdir)
    before_the_last_chunk(monkeypatch, 5, it.target.kill)
    with pytest.raises(ckptpipe.TargetGone):
        restore(workdir / "a", it.target, early_start=True)
    assert outstanding() == 0 and leaked() == 0


def test_only_what_has_no_gap_is_released() -> None:
    released: list[int] = []

    class Pool:
        def release(self, image: PooledImage, ready: int) -> None:
            released.append(ready)

    to = PoolRange(Pool(), PooledImage(0, 1, 0, 450))  # type: ignore[arg-type]
    arrivals = Arrivals(100)
    for number in (2, 1, 4, 1, 0, 0, 3):
        arrivals.add(to, number)
    assert released == [300, 450] and all(arrivals.has(to, number) for number in range(5))
