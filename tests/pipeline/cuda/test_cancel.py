"""Cancelled at every step: back to RUNNING where the driver allows that, and nothing is left in the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.cuda import open_operations
from ckptpipe.pipeline.cuda.records import CheckpointRecord, TargetLock
from ckptpipe.storage_backends.wrappers.faulty import Faults
from tests.pipeline.cuda.runs import SETTINGS, Spawn, images, recover, runs, save, saving
from tests.pipeline.runs import break_sink, run
from tests.simcuda import SimWorld

__all__ = ["break_sink"]

Plan = Callable[[str, Faults], Faults]
CALLS = {
    "lock": ("cuCheckpointProcessLock", 1),
    "checkpoint": ("cuCheckpointProcessCheckpoint", 1),
    "restore": ("cuCheckpointProcessRestore", 1),
    "unlock": ("cuCheckpointProcessUnlock", 1),
    "complete": ("cuCheckpointOperationComplete", 1),
    "complete again": ("cuCheckpointOperationComplete", 2),
}


def cancelled_at(world: SimWorld, call: str, work: Callable[[], object], times: int = 1) -> BaseException:
    """Cancel ``work`` while the driver stands at a call; the call then goes on."""
    name, nth = CALLS[call]
    hold = world.fault(name, nth=nth, hold=True)

    async def main() -> BaseException:
        task = asyncio.ensure_future(work())  # type: ignore[arg-type]
        await asyncio.to_thread(hold.wait)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done(), "the outcome of the call is not known yet"
        hold.release()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        return caught.value

    return run(main())


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("call", ["lock", "restore", "unlock", "complete", "complete again"])
def test_a_save_by_custom_storage(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, call: str, times: int
) -> None:
    target = spawn(world)
    cancelled_at(world, call, lambda: saving(target, workdir), times)
    runs(world, target, runtime)
    assert bool(images(workdir)) == (call != "lock")


def test_a_save_by_custom_storage_when_the_memory_is_mapped(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path
) -> None:
    target = spawn(world)
    error = cancelled_at(world, "checkpoint", lambda: saving(target, workdir))
    assert any("stays CHECKPOINTING" in note and "recover --pid" in note for note in error.__notes__)
    assert isinstance(error.__cause__, ckptpipe.CaptureFailed)
    assert open_operations.pids() == [target.pid]
    assert images(workdir) == []
    assert recover(target, to=workdir, name="b").after == "RUNNING"
    runs(world, target, runtime)


def test_a_save_by_custom_storage_while_it_copies(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, break_sink: Plan
) -> None:
    target = spawn(world)
    faults = Faults()
    held = faults.hold("append", 3)
    break_sink("sink", faults)

    async def main() -> None:
        task = asyncio.ensure_future(saving(target, workdir / "sink"))
        await held.reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    assert world.process(target.pid).state == "CHECKPOINTING"
    assert images(workdir / "sink") == []
    assert recover(target, to=workdir, name="b").after == "RUNNING"
    runs(world, target, runtime)


@pytest.mark.parametrize("capture", ["custom-storage", "driver-image"])
def test_a_save_while_its_record_is_written(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch, capture: str
) -> None:
    """The file is there when the cancellation is raised, and nobody has touched the process yet."""
    target = spawn(world)
    begun, goes_on = threading.Event(), threading.Event()
    write = TargetLock.write

    def slow(self: TargetLock, record: CheckpointRecord) -> None:
        begun.set()
        assert goes_on.wait(30)
        write(self, record)

    async def main() -> None:
        task = asyncio.ensure_future(saving(target, workdir, capture=capture))
        assert await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    monkeypatch.setattr(TargetLock, "write", slow)
    run(main())
    runs(world, target, runtime)
    assert images(workdir) == []


@pytest.mark.parametrize("call", ["lock", "checkpoint", "restore", "unlock"])
def test_a_save_by_driver_image(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, call: str
) -> None:
    target = spawn(world)
    cancelled_at(world, call, lambda: saving(target, workdir, capture="driver-image"))
    runs(world, target, runtime)


@pytest.mark.parametrize("phase", ["check", "put_atomic", "append", "finish"])
def test_a_save_by_driver_image_while_it_copies(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, break_sink: Plan, phase: str
) -> None:
    target = spawn(world)
    faults = Faults()
    held = faults.hold(phase, 1)  # type: ignore[arg-type]
    break_sink("sink", faults)

    async def main() -> None:
        task = asyncio.ensure_future(saving(target, workdir / "sink", capture="driver-image"))
        await held.reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    runs(world, target, runtime)
    assert images(workdir / "sink") == []


@pytest.mark.parametrize("capture", ["custom-storage", "driver-image"])
@pytest.mark.parametrize("call", ["restore", "unlock"])
def test_a_restore_runs_to_its_end(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, call: str, capture: str
) -> None:
    target = spawn(world)
    save(target, workdir, leave="checkpointed", capture=capture)
    cancelled_at(
        world, call, lambda: ckptpipe.restore(str(workdir / "a"), pid=target.pid, settings=SETTINGS), times=2
    )
    runs(world, target, runtime)


def test_a_restore_that_is_cancelled_before_it_touches_the_target(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path
) -> None:
    target = spawn(world)
    save(target, workdir, leave="checkpointed")
    hold = world.fault("cuDevicePrimaryCtxRetain", hold=True)

    async def main() -> None:
        task = asyncio.ensure_future(ckptpipe.restore(str(workdir / "a"), pid=target.pid, settings=SETTINGS))
        await asyncio.to_thread(hold.wait)
        task.cancel()
        hold.release()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    assert world.calls("cuCheckpointProcessRestore") == 0
    assert world.process(target.pid).state == "CHECKPOINTED"
    assert recover(target).after == "RUNNING"
    runs(world, target, runtime)
