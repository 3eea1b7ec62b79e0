"""Evicting: a launched process that holds neither its GPUs nor the host memory of its image, and its way back."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptpipe
from ckptpipe.pipeline.cuda.launched_pool import LaunchedPool
from ckptpipe.pyx.staging import Lease, leaked, outstanding
from tests.pipeline.cuda.launched import SMALL, record
from tests.pipeline.cuda.runs import SETTINGS, images, recover, restore, runs, save
from tests.pipeline.runs import run
from tests.preload.launched import FIXED, MIB, Launched
from tests.simcuda import SimWorld
from tests.simcuda.driver import restore as driver_restore

RESTORE = "cuCheckpointProcessRestore"
ENDED = 74
Launch = Callable[..., Launched]


def held(it: Launched) -> int:
    """Bytes of memory that its pool has."""
    return os.fstat(it.attach_pool()).st_blocks * 512


def damage(folder: Path) -> None:
    """One bit of the largest file of an image."""
    path = max(images(folder), key=lambda each: each.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("program", ["plain", "sums"])
def test_there_and_back(world: SimWorld, launch: Launch, workdir: Path, runtime: Path, program: str) -> None:
    it = launch(program=program)
    for cycle in range(3):
        it.until(lambda pool: pool.state == "ready")
        before = held(it)
        result = save(it.pid, workdir, name=f"{cycle}", capture="launch", evict=True, compress="zstd:1")
        assert result.facts.processes[0].state == "CHECKPOINTED"
        (image,) = it.page.images()
        assert image.gate == "closed" and image.ready == 0
        assert held(it) <= before - image.nbytes, "its pages are the system's again"
        assert not any(it.read(image))
        assert [world.used(gpu) for gpu in range(2)] == [0, 0]
        noted = record(runtime, it)
        assert noted["evicted"] is True and noted["images"] == [result.sinks[0].image_url]
        assert any("evicted, " in note for note in result.facts.notes)
        assert any("left checkpointed and evicted" in note for note in result.facts.notes)
        back = restore(workdir / f"{cycle}", it.target)
        assert back.facts.capture == "launch (simulated)" and back.chunks == result.chunks
        runs(world, it.target, runtime)
        assert outstanding() == 0 and leaked() == 0
    state = it.page.pool()
    assert (state.served, state.returned, state.fallbacks) == (3, 3, 0)
    save(it.pid, workdir, name="after", capture="launch")
    runs(world, it.target, runtime)


def test_a_damaged_image_is_refused_and_the_good_copy_taken(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path
) -> None:
    it = launch()
    one, two = workdir / "one", workdir / "two"
    save(it.pid, [str(one), str(two)], capture="launch", evict=True)
    empty = held(it)
    damage(one)
    with pytest.raises(ckptpipe.CaptureFailed) as caught:
        restore(one / "a", it.target)
    text = str(caught.value)
    assert "stays CHECKPOINTED" in text and "another copy of the image" in text and str(two) in text
    assert isinstance(caught.value.__cause__, ckptpipe.ImageCorrupt) and "is whole" not in text
    assert caught.value.exit_code == 3
    assert world.calls(RESTORE) == 0 and world.process(it.pid).state == "CHECKPOINTED"
    (image,) = it.page.images()
    assert image.gate == "closed" and image.ready == 0 and held(it) == empty, "nothing of it stays"
    assert record(runtime, it)["evicted"] is True
    assert outstanding() == 0 and leaked() == 0
    restore(two / "a", it.target)
    runs(world, it.target, runtime)


def test_an_image_of_which_a_part_is_missing(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path
) -> None:
    it = launch()
    one, two = workdir / "one", workdir / "two"
    save(it.pid, [str(one), str(two)], capture="launch", evict=True)
    path = max(images(one), key=lambda each: each.stat().st_size)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ckptpipe.CkptpipeError):
        restore(one / "a", it.target)
    assert world.calls(RESTORE) == 0 and world.process(it.pid).state == "CHECKPOINTED"
    restore(two / "a", it.target)
    runs(world, it.target, runtime)


@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_recover_takes_the_first_image_that_is_whole(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path, how: str
) -> None:
    it = launch()
    one, two = workdir / "one", workdir / "two"
    save(it.pid, [str(one), str(two)], capture="launch", evict=True)
    if how == "damaged":
        damage(one)
    else:
        run(ckptpipe.delete(str(one / "a")))
    (action,) = recover(it.target).actions
    assert action.startswith("restored it from ") and str(two) in action
    runs(world, it.target, runtime)
    save(it.pid, workdir, capture="launch", evict=True)
    damage(workdir / "a")
    with pytest.raises(ckptpipe.CaptureFailed, match=r"stays CHECKPOINTED"):
        recover(it.target)
    assert world.process(it.pid).state == "CHECKPOINTED" and record(runtime, it)["evicted"] is True


def test_an_image_of_another_checkpoint(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path
) -> None:
    it = launch()
    save(it.pid, workdir, name="old", capture="launch")
    it.target.check()
    save(it.pid, workdir, capture="launch", evict=True)
    with pytest.raises(ckptpipe.CheckpointMismatch, match=r"another checkpoint"):
        restore(workdir / "old", it.target)
    assert world.calls(RESTORE) == 1 and world.process(it.pid).state == "CHECKPOINTED"
    restore(workdir / "a", it.target)
    runs(world, it.target, runtime)


def test_a_restore_that_is_cancelled_gives_back_what_had_arrived(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = launch()
    save(it.pid, workdir, capture="launch", evict=True)
    empty, lend, count = held(it), LaunchedPool.lend, 0

    async def main() -> None:
        task = asyncio.create_task(ckptpipe.restore(str(workdir / "a"), pid=it.pid, settings=SETTINGS))

        def cancels(self: LaunchedPool, offset: int, nbytes: int, **options: bool) -> Lease:
            nonlocal count
            count += 1
            if count == 3:
                task.cancel()
            return lend(self, offset, nbytes, **options)

        with monkeypatch.context() as patched:
            patched.setattr(LaunchedPool, "lend", cancels)
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert count >= 3 and held(it) == empty
    assert world.calls(RESTORE) == 0 and world.process(it.pid).state == "CHECKPOINTED"
    assert outstanding() == 0 and leaked() == 0
    restore(workdir / "a", it.target)
    runs(world, it.target, runtime)


def test_a_driver_that_cannot_restore_leaves_the_image_in_the_pool(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path
) -> None:
    it = launch()
    save(it.pid, workdir, capture="launch", evict=True)
    world.fault(RESTORE, target=it.pid, error="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(ckptpipe.CaptureFailed, match=r"OUT_OF_MEMORY.*recover --pid"):
        restore(workdir / "a", it.target)
    assert record(runtime, it)["evicted"] is False
    assert recover(it.target).actions == ["restored it from its own memory"]
    runs(world, it.target, runtime)


def test_a_target_that_is_killed_while_evicted(world: SimWorld, launch: Launch, workdir: Path) -> None:
    it = launch()
    save(it.pid, workdir, capture="launch", evict=True)
    it.target.kill()
    with pytest.raises(ckptpipe.TargetGone):
        restore(workdir / "a", it.target)
    assert outstanding() == 0


def test_a_tool_that_knows_nothing_of_it_never_gets_holes(
    world: SimWorld, launch: Launch, workdir: Path
) -> None:
    """The process is ended at its gate: better than one that goes on with zeros."""
    it = launch(errors=subprocess.DEVNULL)
    save(it.pid, workdir, capture="launch", evict=True)
    it.page.deadlines(still=60, orphaned=0.2)
    assert driver_restore(it.pid) != "SUCCESS"
    assert it.target.wait() == ENDED


def test_what_cannot_be_evicted(
    world: SimWorld, spawn: Any, launch: Launch, workdir: Path, runtime: Path
) -> None:
    target = spawn(world)
    with pytest.raises(ckptpipe.CaptureUnavailable, match=r"cannot be evicted.*ckptpipe launch"):
        save(target, workdir, capture="driver-image", evict=True)
    runs(world, target, runtime)
    it = launch()
    with pytest.raises(ckptpipe.UsageError, match=r"no required sink keeps it"):
        save(it.pid, "null:", capture="launch", evict=True)
    runs(world, it.target, runtime)
    small = launch(SMALL, ((0, 8 * MIB),))
    result = save(small.pid, workdir, capture="launch", evict=True)
    assert any("nothing was evicted" in note for note in result.facts.notes)
    assert record(runtime, small)["evicted"] is False
    restore(workdir / "a", small.target)
    runs(world, small.target, runtime)


def test_two_processes_are_evicted_together(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path
) -> None:
    both = [launch(FIXED, ((0, 3 * MIB + 5000),)), launch(FIXED, ((1, 2 * MIB),))]
    pids = [it.pid for it in both]
    run(ckptpipe.save(processes=pids, to=workdir, name="a", capture="launch", evict=True, settings=SETTINGS))
    for it in both:
        assert json.loads((runtime / "targets" / f"{it.pid}.json").read_text())["evicted"] is True
    run(ckptpipe.restore(str(workdir / "a"), processes=pids, settings=SETTINGS))
    for it in both:
        runs(world, it.target, runtime)
