"""Every step of a save that can fail: the target runs again, or the error says in which state it is and what to do."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pyx.cuda import CudaError
from ckptpipe.storage_backends.errors import NoSpace, StorageError
from ckptpipe.storage_backends.nvme import NvmeBackend
from ckptpipe.storage_backends.wrappers.faulty import Faults
from tests.pipeline.cuda.runs import SETTINGS, Spawn, abandon, images, recover, restore, runs, save, saving
from tests.pipeline.runs import break_sink
from tests.simcuda import BusyTarget, SimWorld

__all__ = ["break_sink"]

Plan = Callable[[str, Faults], Faults]
LOCK, CHECKPOINT, RESTORE, UNLOCK, COMPLETE = (
    "cuCheckpointProcessLock",
    "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessRestore",
    "cuCheckpointProcessUnlock",
    "cuCheckpointOperationComplete",
)
CAPTURES = ("custom-storage", "driver-image")


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_lock_that_times_out_leaves_it_running(
    world: SimWorld, workdir: Path, runtime: Path, capture: str
) -> None:
    with BusyTarget(world.environment()) as target:
        world.link(0, to_host=-1, to_device=-1)
        hold = world.fault(LOCK, error="CUDA_ERROR_NOT_READY")
        with pytest.raises(
            ckptpipe.TargetError, match=r"could not be locked within 0\.2 s.*it runs on.*--lock-timeout"
        ):
            save(target.pid, workdir, capture=capture, lock_timeout=0.2)
        assert hold.fired == 1
        assert world.process(target.pid).state == "RUNNING"
        assert images(workdir) == [] and list((runtime / "targets").iterdir()) == []
        world.link(0, to_host=0, to_device=0)


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("point", ["before", "middle", "after"])
@pytest.mark.parametrize("call", [LOCK, CHECKPOINT])
def test_an_error_of_lock_or_checkpoint(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, call: str, point: str, capture: str
) -> None:
    target = spawn(world)
    world.fault(call, point=point, error="CUDA_ERROR_UNKNOWN")
    if (call, point, capture) == (CHECKPOINT, "after", "custom-storage"):
        # It happened, and the driver gave no handle: nobody can bring this process back.
        with pytest.raises(
            ckptpipe.CaptureFailed, match=r"stays CHECKPOINTING.*gave no handle.*kill"
        ) as failure:
            save(target, workdir, capture=capture)
        assert {pid: state and state.name for pid, state in failure.value.states.items()} == {
            target.pid: "CHECKPOINTING"
        }
        assert world.process(target.pid).state == "CHECKPOINTING"
    else:
        with pytest.raises((CudaError, ckptpipe.TargetError), match=r"UNKNOWN"):
            save(target, workdir, capture=capture)
        runs(world, target, runtime)
        save(target, workdir, capture=capture)
        runs(world, target, runtime)
    assert [path.name for path in images(workdir) if path.name.startswith("lease")] == []


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("when", ["check", "begin"])
def test_a_sink_that_cannot_take_it_is_found_before_the_target_is_touched(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, break_sink: Plan, capture: str, when: str
) -> None:
    target = spawn(world)
    faults = Faults()
    faults.fail("check" if when == "check" else "put_atomic", 1, StorageError("the disk is gone"))
    break_sink("sink", faults)
    with pytest.raises(StorageError, match=r"the disk is gone"):
        save(target, workdir / "sink", capture=capture)
    assert world.calls(LOCK) == 0
    runs(world, target, runtime)


def test_a_sink_that_fails_in_the_middle_leaves_the_data_on_the_gpu_and_recover_sends_it_elsewhere(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, break_sink: Plan
) -> None:
    target = spawn(world)
    faults = Faults()
    faults.fail("append", 4, StorageError("the disk is full"))
    break_sink("bad", faults)
    used = [world.used(gpu) for gpu in range(2)]
    with pytest.raises(
        ckptpipe.CaptureFailed,
        match=rf"the disk is full\. pid {target.pid} .*stays CHECKPOINTING.*Nothing is lost.*"
        rf"ckptpipe recover --pid {target.pid} --to URL",
    ):
        save(target, workdir / "bad")
    assert world.process(target.pid).state == "CHECKPOINTING"
    assert images(workdir / "bad") == []
    assert [world.used(gpu) >= used[gpu] for gpu in range(2)] == [True, True]

    with pytest.raises(ckptpipe.TargetBusy, match=r"still open.*recover"):
        save(target, workdir / "good")
    with pytest.raises(ckptpipe.UsageError, match=r"must be saved somewhere.*--to URL"):
        recover(target)
    result = recover(target, to=workdir / "good", name="b")
    assert (result.before, result.after) == ("CHECKPOINTING", "RUNNING")
    assert result.save is not None and result.save.sinks[0].ok
    runs(world, target, runtime)
    # The image that the recovery made is whole, too.
    asyncio.run(ckptpipe.verify(str(workdir / "good" / "b")))


def test_recover_can_leave_it_checkpointed(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, break_sink: Plan
) -> None:
    target = spawn(world)
    faults = Faults()
    faults.fail("append", 2, StorageError("the disk is full"))
    break_sink("bad", faults)
    with pytest.raises(ckptpipe.CaptureFailed):
        save(target, workdir / "bad")
    with pytest.raises(ckptpipe.CaptureFailed, match=r"stays CHECKPOINTING"):
        faults.fail("append", 0, StorageError("still full"))
        recover(target, to=workdir / "bad")
    result = recover(target, to=workdir / "good", name="b", leave="checkpointed")
    assert result.after == "CHECKPOINTED"
    assert [world.used(gpu) for gpu in range(2)] == [0, 0]
    restore(workdir / "good" / "b", target)
    runs(world, target, runtime)


def test_a_sink_that_fails_does_not_harm_a_driver_image(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, break_sink: Plan
) -> None:
    target = spawn(world)
    faults = Faults()
    faults.fail("append", 4, StorageError("the disk is full"))
    break_sink("bad", faults)
    with pytest.raises(StorageError, match=r"the disk is full") as failure:
        save(target, workdir / "bad", capture="driver-image")
    assert any("RUNNING again" in note for note in failure.value.__notes__)
    runs(world, target, runtime)
    assert images(workdir / "bad") == []


@pytest.mark.parametrize("scope", ["call", "stream"])
def test_a_copy_that_fails_leaves_the_data_on_the_gpu(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, scope: str
) -> None:
    target = spawn(world)
    world.fault("cuMemcpyDtoHAsync", pid=os.getpid(), nth=3, error="CUDA_ERROR_UNKNOWN", scope=scope)
    with pytest.raises(ckptpipe.CaptureFailed, match=r"UNKNOWN.*stays CHECKPOINTING.*recover"):
        save(target, workdir)
    assert recover(target, to=workdir, name="b").after == "RUNNING"
    runs(world, target, runtime)


def test_a_completion_that_fails_is_asked_for_again_by_recover(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path
) -> None:
    target = spawn(world)
    world.fault(COMPLETE, error="CUDA_ERROR_UNKNOWN")
    with pytest.raises(
        ckptpipe.CaptureFailed,
        match=rf"stays CHECKPOINTING.*Its image is whole: nvme:{workdir}/a.*recover --pid {target.pid}$",
    ):
        save(target, workdir)
    assert world.process(target.pid).state == "CHECKPOINTING"
    result = recover(target)
    assert (result.before, result.after, result.save) == ("CHECKPOINTING", "RUNNING", None)
    runs(world, target, runtime)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_completion_that_happened_although_it_reported_an_error(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, nth: int
) -> None:
    target = spawn(world)
    world.fault(COMPLETE, nth=nth, point="after", error="CUDA_ERROR_UNKNOWN")
    result = save(target, workdir)
    assert any("operation that it completed" in note for note in result.facts.notes)
    runs(world, target, runtime)


@pytest.mark.parametrize("point", ["before", "middle"])
def test_out_of_memory_on_the_way_back_leaves_it_checkpointed_with_its_image(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, point: str
) -> None:
    target = spawn(world)
    world.fault(RESTORE, point=point, error="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(
        ckptpipe.CaptureFailed,
        match=rf"OUT_OF_MEMORY.*stays CHECKPOINTED.*ckptpipe restore nvme:{workdir}/a --pid {target.pid}",
    ):
        save(target, workdir)
    assert world.process(target.pid).state == "CHECKPOINTED"
    restore(workdir / "a", target)
    runs(world, target, runtime)


def test_recover_restores_from_the_image_that_the_record_names(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path
) -> None:
    target = spawn(world)
    world.fault(RESTORE, error="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(ckptpipe.CaptureFailed):
        save(target, workdir)
    result = recover(target)
    assert result.actions == [f"restored it from nvme:{workdir}/a"]
    runs(world, target, runtime)


def test_a_restore_that_happened_without_a_handle_is_said(
    world: SimWorld, spawn: Spawn, workdir: Path
) -> None:
    target = spawn(world)
    world.fault(RESTORE, point="after", error="CUDA_ERROR_UNKNOWN")
    with pytest.raises(ckptpipe.CaptureFailed, match=r"stays RESTORING.*kill"):
        save(target, workdir)
    with pytest.raises(ckptpipe.CaptureFailed, match=r"is RESTORING.*nobody can read or complete"):
        recover(target)
    with pytest.raises(ckptpipe.TargetError, match=r"is RESTORING, not CHECKPOINTED"):
        restore(workdir / "a", target)


@pytest.mark.parametrize("scope", ["call", "stream"])
def test_a_copy_back_that_fails_leaves_it_restoring_and_a_restore_goes_on(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, scope: str
) -> None:
    target = spawn(world)
    world.fault("cuMemcpyHtoDAsync", pid=os.getpid(), nth=3, error="CUDA_ERROR_UNKNOWN", scope=scope)
    with pytest.raises(
        ckptpipe.CaptureFailed,
        match=rf"stays RESTORING.*ckptpipe restore nvme:{workdir}/a --pid {target.pid}",
    ):
        save(target, workdir)
    assert world.process(target.pid).state == "RESTORING"
    assert world.calls(UNLOCK) == 0
    restore(workdir / "a", target)
    runs(world, target, runtime)


@pytest.mark.parametrize("capture", CAPTURES)
def test_an_unlock_that_fails_is_said_and_recover_unlocks(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, capture: str
) -> None:
    target = spawn(world)
    world.fault(UNLOCK, times=2, error="CUDA_ERROR_UNKNOWN")
    with pytest.raises(ckptpipe.CaptureFailed, match=rf"stays LOCKED.*ckptpipe recover --pid {target.pid}"):
        save(target, workdir, capture=capture)
    assert world.process(target.pid).state == "LOCKED"
    assert recover(target).actions == ["unlocked it"]
    runs(world, target, runtime)


@pytest.mark.parametrize("capture", CAPTURES)
def test_an_unlock_that_happened_although_it_reported_an_error(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, capture: str
) -> None:
    target = spawn(world)
    world.fault(UNLOCK, point="after", error="CUDA_ERROR_UNKNOWN")
    save(target, workdir, capture=capture)
    runs(world, target, runtime)


def test_out_of_memory_on_the_way_back_of_a_driver_image(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path
) -> None:
    target = spawn(world)
    world.fault(RESTORE, error="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(ckptpipe.CaptureFailed, match=r"OUT_OF_MEMORY.*stays CHECKPOINTED.*recover --pid"):
        save(target, workdir, capture="driver-image")
    assert recover(target).actions == ["restored it from its own memory"]
    runs(world, target, runtime)


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("call", [LOCK, CHECKPOINT, RESTORE])
def test_a_target_that_dies_gives_one_clear_error(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, capture: str, call: str
) -> None:
    target = spawn(world)
    world.fault(call, kill_target=True)
    with pytest.raises(ckptpipe.TargetGone, match=rf"pid {target.pid} .*ended") as failure:
        save(target, workdir, capture=capture)
    assert failure.value.pid == target.pid
    with pytest.raises(ckptpipe.TargetGone, match=r"has ended|no process"):
        save(target, workdir, capture=capture)


def test_a_target_that_dies_while_it_is_copied(world: SimWorld, spawn: Spawn, workdir: Path) -> None:
    target = spawn(world)
    world.fault("cuMemcpyDtoHAsync", pid=os.getpid(), nth=4, times=0, delay=0.05)
    world.fault(CHECKPOINT, point="after")

    async def main() -> None:
        world.link(0, to_host=-1)
        work = asyncio.ensure_future(saving(target, workdir))
        while world.process(target.pid).state != "CHECKPOINTING":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        os.kill(target.pid, 9)
        await asyncio.to_thread(target.wait)
        world.link(0, to_host=0)
        with pytest.raises(ckptpipe.TargetGone, match=r"ended in the middle"):
            await work

    asyncio.run(main())
    assert images(workdir) == []


def test_memory_that_no_sink_would_keep_is_refused_before_it_is_touched(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path
) -> None:
    target = spawn(world)
    for leave in ("running", "checkpointed"):
        with pytest.raises(ckptpipe.UsageError, match=r"would be lost"):
            save(target, "null:", leave=leave)
    spec = ckptpipe.SinkSpec(str(workdir), policy="best-effort")
    with pytest.raises(ckptpipe.UsageError, match=r"no required sink"):
        save(target, spec)
    assert world.calls(LOCK) == 0
    result = save(target, "null:", capture="driver-image")
    assert result.facts.capture == "driver-image (simulated)"
    runs(world, target, runtime)


def test_abandoned_operations_let_everything_go(
    world: SimWorld, spawn: Spawn, workdir: Path, break_sink: Plan
) -> None:
    target = spawn(world)
    faults = Faults()
    faults.fail("append", 2, StorageError("no"))
    break_sink("bad", faults)
    with pytest.raises(ckptpipe.CaptureFailed):
        save(target, workdir / "bad")
    abandon(target.pid)
    with pytest.raises(ckptpipe.CaptureFailed, match=r"is CHECKPOINTING.*nobody can read"):
        recover(target)


@pytest.mark.parametrize("call", [LOCK, CHECKPOINT])
def test_of_several_the_second_that_fails_harms_the_first_as_little_as_can_be(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, call: str
) -> None:
    one, two = spawn(world, seed=1), spawn(world, seed=2)
    world.fault(call, target=two.pid, error="CUDA_ERROR_UNKNOWN")
    both = ckptpipe.save(processes=[one.pid, two.pid], to=workdir, name="a", settings=SETTINGS)
    if call == LOCK:
        with pytest.raises(ckptpipe.TargetError, match=rf"pid {two.pid} .*could not be locked") as failure:
            asyncio.run(both)
        assert any(f"pid {one.pid} " in note and "RUNNING again" in note for note in failure.value.__notes__)
    else:
        with pytest.raises(ckptpipe.CaptureFailed, match=rf"pid {one.pid} .*stays CHECKPOINTING") as stuck:
            asyncio.run(both)
        assert list(stuck.value.states) == [one.pid]
        assert recover(one, to=workdir, name="b").after == "RUNNING"
    runs(world, two, runtime)
    runs(world, one, runtime)


def test_several_that_stay_are_sent_elsewhere_one_by_one(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, break_sink: Plan
) -> None:
    one, two = spawn(world, seed=1), spawn(world, seed=2)
    faults = Faults()
    faults.fail("append", 6, StorageError("the disk is full"))
    break_sink("bad", faults)
    with pytest.raises(ckptpipe.CaptureFailed) as failure:
        asyncio.run(
            ckptpipe.save(processes=[one.pid, two.pid], to=workdir / "bad", name="a", settings=SETTINGS)
        )
    assert list(failure.value.states) == [one.pid, two.pid]
    for target in (one, two):
        assert recover(target, to=workdir, name=f"p{target.pid}").after == "RUNNING"
        target.check()
    for target in (one, two):
        runs(world, target, runtime)


def test_no_room_is_found_out_before_and_says_what_was_counted(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = spawn(world)
    asked: list[int] = []
    check = NvmeBackend.check

    async def full(self: NvmeBackend, *, writing: bool, need_bytes: int = 0) -> None:
        await check(self, writing=writing)
        asked.append(need_bytes)
        raise NoSpace(f"needs {need_bytes} bytes", cure="free some")

    monkeypatch.setattr(NvmeBackend, "check", full)
    with pytest.raises(NoSpace, match=r"needs \d+ bytes \(counted: everything in use on the GPUs"):
        save(target, workdir)
    assert asked[0] >= 2 * (2 << 20) + (3 << 20) + (1 << 20)
    assert world.calls(LOCK) == 0
    runs(world, target, runtime)


def test_put_back_from_the_second_image_where_the_first_cannot_be_read(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path
) -> None:
    target = spawn(world)
    hold = world.fault(RESTORE, hold=True)

    async def main() -> ckptpipe.SaveResult:
        work = asyncio.ensure_future(saving(target, [workdir / "one", workdir / "two"]))
        await asyncio.to_thread(hold.wait)
        for data in (workdir / "one" / "a").glob("data-*"):
            data.unlink()
        hold.release()
        return await work

    result = asyncio.run(main())
    assert any("taken from the next image" in note for note in result.facts.notes)
    runs(world, target, runtime)
