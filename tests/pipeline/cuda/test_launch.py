"""Processes that `ckptpipe launch` started: their image is sent from the pool in which the driver leaves it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptpipe
from ckptpipe.pipeline.cuda.choice import CapturePlan
from ckptpipe.pipeline.cuda.launched_pool import LaunchedPool
from ckptpipe.pipeline.sources.launched_image import LaunchedImageSource
from ckptpipe.pyx.staging import Lease, leaked, outstanding
from ckptpipe.pyx.workers import Scan, WorkerPool
from tests.pipeline.cuda.launched import SMALL, Launch, record, stored
from tests.pipeline.cuda.runs import SETTINGS, images, recover, restore, runs, save, saving
from tests.pipeline.runs import run
from tests.preload.launched import BUFFERS, FIXED, MIB, Launched
from tests.simcuda import SimWorld, Target

RESTORE = "cuCheckpointProcessRestore"


@pytest.mark.parametrize("program", ["plain", "sums"])
def test_cycles_with_changing_contents(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path, program: str
) -> None:
    it = launch(program=program)
    for cycle in range(4):
        name, leave = f"cycle-{cycle}", "checkpointed" if cycle % 2 else "running"
        expected = [it.target.buffer(k) for k in range(len(BUFFERS))]
        result = save(it.pid, workdir, name=name, capture="launch", leave=leave)
        assert result.facts.capture == "launch (simulated)"
        if leave == "checkpointed":
            assert world.process(it.pid).state == "CHECKPOINTED"
            noted = record(runtime, it)
            (image,) = it.page.images()
            assert noted["capture"] == "launch" and noted["mappings"] == [[image.address, image.nbytes]]
            assert noted["pool"] == [[image.slot, image.generation, image.offset, image.nbytes]]
            back = restore(workdir / name, it.target)
            assert back.raw_bytes == result.raw_bytes and back.facts.capture == "launch (simulated)"
        runs(world, it.target, runtime)
        data = stored(workdir, name)
        assert all(each in data for each in expected)
        assert outstanding() == 0 and leaked() == 0
    state = it.page.pool()
    assert (state.served, state.returned, state.fallbacks, state.armed) == (4, 4, 0, 0)
    manifest = run(ckptpipe.show(str(workdir / "cycle-0")))
    assert [stream["name"] for stream in manifest["streams"]] == ["proc/0/driver/0"]
    assert manifest["process"]["processes"][0]["capture"] == "launch"


def test_what_is_not_sent_early_is_neither_copied_nor_read_from_the_process(
    launch: Launch, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LaunchedImageSource, "early", False)
    it = launch()
    lent: list[int] = []
    lend = LaunchedPool.lend

    def counted(self: LaunchedPool, offset: int, nbytes: int, **options: bool) -> Lease:
        lent.append(nbytes)
        return lend(self, offset, nbytes, **options)

    monkeypatch.setattr(LaunchedPool, "lend", counted)
    for compress in ("none", "zstd:1"):
        lent.clear()
        result = save(it.pid, workdir, name=compress[:4], capture="launch", compress=compress)
        assert sum(lent) == result.raw_bytes
        (note,) = (note for note in result.facts.notes if note.startswith(f"pool of pid {it.pid}"))
        state = it.page.pool()
        assert f"pages of {state.page_bytes} bytes" in note
        assert "3 workers" in note and f"hook {state.hook}" in note
        it.target.check()
    assert stored(workdir, "none")[: 4 * MIB] == stored(workdir, "zstd")[: 4 * MIB]


def test_an_image_that_ends_within_a_block(launch: Launch, workdir: Path) -> None:
    odd = ((0, 3 * MIB + 5000), (1, MIB + 12))
    it = launch(FIXED, odd)
    expected = [it.target.buffer(k) for k in range(2)]
    save(it.pid, workdir, capture="launch", leave="checkpointed")
    data = stored(workdir)
    assert all(each in data for each in expected)
    restore(workdir / "a", it.target)
    it.target.check()


CHOICE = """
import asyncio, json, sys, ckptpipe
plans = []
result = asyncio.run(ckptpipe.save(pid=int(sys.argv[1]), to=sys.argv[2], name=sys.argv[3], on_plan=plans.append))
print(json.dumps({"capture": result.facts.capture, "why_not": plans[0].why_not}))
"""


def test_it_is_chosen_before_the_driver_image(workdir: Path) -> None:
    """With a driver that has no custom storage; in a process of its own: entry points are found once a process."""

    def choice(world: SimWorld, pid: int, name: str) -> dict[str, Any]:
        command = [sys.executable, "-c", CHOICE, str(pid), str(workdir), name]
        done = subprocess.run(command, env=world.environment(), capture_output=True, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    with SimWorld(gpus=2, driver_version=13000) as world:
        with Launched(world, connect=False) as it:
            said = choice(world, it.pid, "a")
            assert said["capture"] == "launch (simulated)"
            assert "its image goes into its pool" in said["why_not"]["driver-image"]
            it.target.check()
        with Target(world.environment(), program=str(world.library / "plain_target")) as target:
            said = choice(world, target.pid, "b")
            assert said["capture"] == "driver-image (simulated)"
            assert "offers no pool" in said["why_not"]["launch"]


def test_it_can_be_asked_for(world: SimWorld, spawn: Any, launch: Launch, workdir: Path) -> None:
    target = spawn(world)
    with pytest.raises(ckptpipe.CaptureUnavailable, match=r"launch does not work.*offers no pool"):
        save(target, workdir, capture="launch")
    assert world.process(target.pid).state == "RUNNING"
    it = launch()
    with pytest.raises(ckptpipe.CaptureUnavailable, match=r"driver-image does not work.*into its pool"):
        save(it.pid, workdir, capture="driver-image")
    plans: list[CapturePlan] = []
    for capture in ("launch", "custom-storage", "launch"):
        result = save(it.pid, workdir, capture=capture, overwrite=True, on_plan=plans.append)
        assert result.facts.capture == f"{capture} (simulated)" == f"{plans[-1].capture} (simulated)"
        it.target.check()
    assert images(workdir)


def test_a_pool_that_is_too_small(world: SimWorld, launch: Launch, workdir: Path, runtime: Path) -> None:
    it = launch(SMALL, ((0, 8 * MIB),))
    result = save(it.pid, workdir, capture="launch", leave="checkpointed")
    assert result.facts.capture == "driver-image (simulated)"
    text = it.page.pool().fallback_text
    assert text and any("memory of its own" in note and text in note for note in result.facts.notes)
    noted = record(runtime, it)
    assert noted["capture"] == "driver-image" and noted["pool"] == [] and len(noted["mappings"]) == 1
    restore(workdir / "a", it.target)
    runs(world, it.target, runtime)


def test_of_two_one_has_a_pool_that_is_too_small(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path
) -> None:
    both = [launch(SMALL, ((0, 8 * MIB),)), launch()]
    pids = [it.pid for it in both]
    options: dict[str, Any] = {"to": workdir, "name": "a", "capture": "launch", "settings": SETTINGS}
    result = run(ckptpipe.save(processes=pids, leave="checkpointed", **options))
    assert result.facts.capture == "launch (simulated)" and result.streams == 2
    assert [record(runtime, it)["capture"] for it in both] == ["driver-image", "launch"]
    run(ckptpipe.restore(str(workdir / "a"), processes=pids, settings=SETTINGS))
    for it in both:
        runs(world, it.target, runtime)


def test_a_pool_that_changed_is_not_restored_from(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path
) -> None:
    it = launch()
    save(it.pid, workdir, capture="launch", leave="checkpointed")
    (image,) = it.page.images()
    at = image.offset + 5 * MIB
    was = os.pread(it.attach_pool(), 1, at)
    os.pwrite(it.attach_pool(), bytes([was[0] ^ 1]), at)
    with pytest.raises(ckptpipe.ImageCorrupt, match=r"is not what .* chunk"):
        restore(workdir / "a", it.target)
    assert world.calls(RESTORE) == 0 and world.process(it.pid).state == "CHECKPOINTED"
    os.pwrite(it.attach_pool(), was, at)
    restore(workdir / "a", it.target)
    runs(world, it.target, runtime)


def third_scan(monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
    """Call ``then`` before the third chunk of a pool is scanned."""
    opened, count = LaunchedImageSource.open, 0

    class Pool:
        def __init__(self, pool: WorkerPool) -> None:
            self._pool = pool

        def __getattr__(self, name: str) -> object:
            return getattr(self._pool, name)

        def scan(self, lease: Lease, nbytes: int) -> asyncio.Future[Scan]:
            nonlocal count
            count += 1
            if count == 3:
                then()
            return self._pool.scan(lease, nbytes)

    async def open_with(self: LaunchedImageSource, context: Any) -> None:
        await opened(self, context)
        context.workers = Pool(context.workers)

    monkeypatch.setattr(LaunchedImageSource, "open", open_with)


def test_a_target_that_dies_while_its_pool_is_read(
    launch: Launch, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = launch()

    def kill() -> None:
        os.kill(it.pid, 9)
        it.target.wait()

    third_scan(monkeypatch, kill)
    with pytest.raises(ckptpipe.TargetGone, match=rf"pid {it.pid} .*ended in the middle"):
        save(it.pid, workdir, capture="launch")
    assert images(workdir) == [] and outstanding() == 0


def test_a_save_that_is_cancelled(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = launch()

    async def main() -> None:
        task = asyncio.create_task(saving(it.pid, workdir, capture="launch"))
        third_scan(monkeypatch, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    runs(world, it.target, runtime)
    assert images(workdir) == [] and outstanding() == 0 and leaked() == 0
    monkeypatch.undo()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime.parent))
    assert recover(it.target).actions == []


@pytest.mark.parametrize("call", ["cuCheckpointProcessLock", "cuCheckpointProcessCheckpoint"])
def test_a_driver_that_fails(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path, call: str
) -> None:
    it = launch()
    world.fault(call, target=it.pid, error="CUDA_ERROR_UNKNOWN")
    with pytest.raises(ckptpipe.CkptpipeError, match=r"UNKNOWN"):
        save(it.pid, workdir, capture="launch")
    runs(world, it.target, runtime)
    it.until(lambda pool: not pool.armed)
    save(it.pid, workdir, capture="launch")
    runs(world, it.target, runtime)
