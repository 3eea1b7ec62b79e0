"""Errors, delays and deaths that are ordered: at which call, for whom, at which point."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.simcuda import SimWorld, Target
from tests.simcuda.driver import call, checkpoint, driver, error, lock, restore, state, unlock
from tests.simcuda.storage import checkpoint as checkpoint_custom
from tests.simcuda.storage import restore as restore_custom

BUFFERS = [(0, 4 << 20), (1, 1 << 20)]


def _plain(world: SimWorld) -> Target:
    """A target that is there at once."""
    return Target(world.environment(), [(0, 65536), (1, 4096)], program=str(world.library / "plain_target"))


def test_the_nth_call_alone_fails(world: SimWorld, library: ctypes.CDLL) -> None:
    fault = world.fault("cuMemAlloc", nth=2, times=2, error="CUDA_ERROR_OUT_OF_MEMORY")
    results = [error(driver.cuMemAlloc(4096)) for _ in range(5)]
    assert results == ["SUCCESS", "OUT_OF_MEMORY", "OUT_OF_MEMORY", "SUCCESS", "SUCCESS"]
    assert fault.fired == 2
    assert world.process(os.getpid()).allocations == 2 + 3


def test_a_call_can_do_its_work_and_still_answer_an_error(world: SimWorld, library: ctypes.CDLL) -> None:
    with Target(world.environment(), BUFFERS) as target:
        world.fault("cuCheckpointProcessLock", error="CUDA_ERROR_UNKNOWN", point="after")
        assert lock(target.pid) == "UNKNOWN"
        assert state(target.pid) == "LOCKED"
        world.fault("cuCheckpointOperationComplete", error="CUDA_ERROR_UNKNOWN", point="after")
        code, operation = checkpoint_custom(library, target.pid)
        assert code == 0 and operation is not None
        assert error(operation.complete()) == "UNKNOWN"
        assert state(target.pid) == "CHECKPOINTED"


def test_a_fault_meets_one_process_and_one_target_only(world: SimWorld, library: ctypes.CDLL) -> None:
    with Target(world.environment(), BUFFERS) as one, Target(world.environment(), BUFFERS) as two:
        world.fault("cuCheckpointProcessLock", target=two.pid, error="CUDA_ERROR_NOT_READY")
        world.fault("cuMemcpyDtoH", pid=one.pid, error="CUDA_ERROR_ILLEGAL_ADDRESS")
        assert lock(one.pid) == "SUCCESS"
        assert lock(two.pid) == "NOT_READY"
        assert unlock(one.pid) == "SUCCESS"
        two.check()
        one.ask()
        with pytest.raises(RuntimeError, match="status 1"):
            one.answer()


def test_out_of_memory_in_the_middle_of_a_restore_leaves_it_checkpointed(
    world: SimWorld, library: ctypes.CDLL
) -> None:
    with Target(world.environment(), BUFFERS) as target:
        assert lock(target.pid) == "SUCCESS"
        assert checkpoint(target.pid) == "SUCCESS"
        world.fault("cuCheckpointProcessRestore", error="CUDA_ERROR_OUT_OF_MEMORY", point="middle")
        assert restore(target.pid) == "OUT_OF_MEMORY"
        assert state(target.pid) == "CHECKPOINTED"
        assert restore(target.pid) == "SUCCESS"
        assert unlock(target.pid) == "SUCCESS"
        target.check()


def test_a_checkpoint_that_fails_in_the_middle_leaves_it_locked_and_whole(
    world: SimWorld, library: ctypes.CDLL
) -> None:
    with Target(world.environment(), BUFFERS) as target:
        assert lock(target.pid) == "SUCCESS"
        for make in (checkpoint, lambda pid: error(checkpoint_custom(library, pid)[0])):
            world.fault("cuCheckpointProcessCheckpoint", error="CUDA_ERROR_OPERATING_SYSTEM", point="middle")
            assert make(target.pid) == "OPERATING_SYSTEM"
            assert state(target.pid) == "LOCKED"
        assert unlock(target.pid) == "SUCCESS"
        target.check()


def test_a_target_can_be_left_failed(world: SimWorld, library: ctypes.CDLL) -> None:
    with Target(world.environment(), BUFFERS) as target:
        assert lock(target.pid) == "SUCCESS"
        world.fault(
            "cuCheckpointProcessCheckpoint", error="CUDA_ERROR_UNKNOWN", point="middle", state="FAILED"
        )
        assert checkpoint(target.pid) == "UNKNOWN"
        assert state(target.pid) == "FAILED"
        for make in (lock, checkpoint, restore, unlock):
            assert make(target.pid) == "ILLEGAL_STATE"


@pytest.mark.parametrize("point", ["before", "middle", "after"])
@pytest.mark.parametrize("which", ["Lock", "Checkpoint", "Restore", "Unlock", "Complete"])
def test_a_target_that_dies_at_any_point_of_any_call(
    which: str, point: str, world: SimWorld, library: ctypes.CDLL
) -> None:
    with _plain(world) as target:
        pid = target.pid
        name = "cuCheckpointOperationComplete" if which == "Complete" else f"cuCheckpointProcess{which}"
        fault = world.fault(name, point=point, kill_target=True)
        results = [lock(pid)]
        if which == "Complete" and results[-1] == "SUCCESS":
            code, operation = checkpoint_custom(library, pid)
            results.append(error(code if operation is None else operation.complete()))
        else:
            for make in (checkpoint, restore, unlock):
                if results[-1] == "SUCCESS" and not fault.fired:
                    results.append(make(pid))
        assert target.wait() == -signal.SIGKILL
        assert fault.fired == 1
        expected = {"before": "OPERATING_SYSTEM" if which == "Complete" else "INVALID_VALUE"}
        assert results[-1] == {"middle": "OPERATING_SYSTEM", "after": "SUCCESS"}.get(
            point, expected["before"]
        )
        assert error(driver.cuCheckpointProcessGetState(pid)) == "INVALID_VALUE"
        assert [process.pid for process in world.processes()] == [os.getpid()]


CONTROLLER = """
import sys
from tests.simcuda.driver import checkpoint, hold_contexts, lock, restore, unlock
hold_contexts(2)
for call in (lock, checkpoint, restore, unlock):
    print(call(int(sys.argv[1])), flush=True)
"""


@pytest.mark.parametrize("point", ["before", "middle", "after"])
@pytest.mark.parametrize("which", ["Lock", "Checkpoint", "Restore", "Unlock"])
def test_a_controller_that_dies_leaves_a_whole_target(
    which: str, point: str, world: SimWorld, library: ctypes.CDLL
) -> None:
    with _plain(world) as target:
        world.fault(f"cuCheckpointProcess{which}", point=point, kill_caller=True)
        root = str(Path(__file__).resolve().parent.parent.parent)
        child = subprocess.run(
            [sys.executable, "-c", CONTROLLER, str(target.pid)],
            env=world.environment(PYTHONPATH=root),
            check=False,
            stdout=subprocess.PIPE,
        )
        assert child.returncode == -signal.SIGKILL
        order = ["RUNNING", "LOCKED", "CHECKPOINTED", "LOCKED", "RUNNING"]
        place = ["Lock", "Checkpoint", "Restore", "Unlock"].index(which)
        # The target finishes what it began, whoever asked; the next caller waits for that.
        if point != "before":
            place += 1
            held = {"Lock": lock, "Checkpoint": checkpoint, "Restore": restore, "Unlock": unlock}[which]
            assert held(target.pid) == "ILLEGAL_STATE"
        assert state(target.pid) == order[place]
        if order[place] == "CHECKPOINTED":
            assert restore(target.pid) == "SUCCESS"
        if order[place] != "RUNNING":
            assert unlock(target.pid) == "SUCCESS"
        target.check()


def test_a_held_call_stands_still_until_it_is_released(world: SimWorld, library: ctypes.CDLL) -> None:
    with Target(world.environment(), BUFFERS) as target:
        assert lock(target.pid) == "SUCCESS"
        held = world.fault("cuCheckpointProcessCheckpoint", point="middle", hold=True)
        results: list[str] = []
        thread = threading.Thread(target=lambda: results.append(checkpoint(target.pid)))
        thread.start()
        held.wait()
        assert state(target.pid) == "LOCKED", "the state can be asked for meanwhile"
        assert results == []
        held.release()
        thread.join()
        assert results == ["SUCCESS"]


def test_a_custom_restore_that_fails_gives_the_memory_back(world: SimWorld, library: ctypes.CDLL) -> None:
    with Target(world.environment(), BUFFERS) as target:
        assert lock(target.pid) == "SUCCESS"
        code, operation = checkpoint_custom(library, target.pid)
        assert code == 0 and operation is not None
        images = [operation.read(k) for k in range(2)]
        assert operation.complete() == 0
        used = world.used(0)
        world.fault("cuCheckpointProcessRestore", error="CUDA_ERROR_OUT_OF_MEMORY", point="middle")
        code, failed = restore_custom(library, target.pid)
        assert (error(code), failed) == ("OUT_OF_MEMORY", None)
        assert world.used(0) == used
        code, operation = restore_custom(library, target.pid)
        assert code == 0 and operation is not None
        for k, image in enumerate(images):
            operation.write(k, image)
        assert operation.complete() == 0
        assert unlock(target.pid) == "SUCCESS"
        target.check()


def test_a_failed_copy_fails_its_event_and_its_stream(world: SimWorld, library: ctypes.CDLL) -> None:
    address = call(driver.cuMemAlloc(1 << 20))
    pinned = call(driver.cuMemHostAlloc(1 << 20, 0))
    good, bad = call(driver.cuStreamCreate(1)), call(driver.cuStreamCreate(1))
    event, other = call(driver.cuEventCreate(1)), call(driver.cuEventCreate(1))
    fault = world.fault("cuMemcpyDtoHAsync", error="CUDA_ERROR_ECC_UNCORRECTABLE", scope="stream")
    assert error(driver.cuMemcpyDtoHAsync(pinned, address, 1 << 20, bad)) == "SUCCESS"
    call(driver.cuEventRecord(event, bad))
    assert error(driver.cuEventSynchronize(event)) == "ECC_UNCORRECTABLE"
    assert error(driver.cuStreamSynchronize(bad)) == "ECC_UNCORRECTABLE"
    assert fault.fired == 1
    call(driver.cuMemcpyDtoHAsync(pinned, address, 1 << 20, good))
    call(driver.cuEventRecord(other, good))
    assert error(driver.cuEventSynchronize(other)) == "SUCCESS"


def test_a_failed_copy_keeps_a_checkpoint_open(world: SimWorld, library: ctypes.CDLL) -> None:
    with Target(world.environment(), BUFFERS) as target:
        assert lock(target.pid) == "SUCCESS"
        code, operation = checkpoint_custom(library, target.pid)
        assert code == 0 and operation is not None
        device = operation.devices[0]
        pinned = call(driver.cuMemHostAlloc(4096, 0))
        world.fault("cuMemcpyDtoHAsync", error="CUDA_ERROR_ECC_UNCORRECTABLE", scope="stream")
        call(driver.cuMemcpyDtoHAsync(pinned, device.address, 4096, device.stream))
        assert error(operation.complete()) == "ECC_UNCORRECTABLE"
        assert state(target.pid) == "CHECKPOINTING"


def test_two_controllers_take_turns(world: SimWorld, library: ctypes.CDLL) -> None:
    with Target(world.environment(), BUFFERS) as target:
        held = world.fault("cuCheckpointProcessLock", point="middle", hold=True)
        results: list[str] = []
        threads = [threading.Thread(target=lambda: results.append(lock(target.pid))) for _ in range(2)]
        for thread in threads:
            thread.start()
        held.wait()
        held.release()
        for thread in threads:
            thread.join()
        assert sorted(results) == ["ILLEGAL_STATE", "SUCCESS"]
        assert state(target.pid) == "LOCKED"


def test_a_failed_copy_can_break_its_context(world: SimWorld, library: ctypes.CDLL) -> None:
    address = call(driver.cuMemAlloc(4096))
    stream = call(driver.cuStreamCreate(1))
    world.fault("cuMemsetD8Async", error="CUDA_ERROR_ILLEGAL_ADDRESS", scope="context")
    call(driver.cuMemsetD8Async(address, 1, 4096, stream))
    assert error(driver.cuStreamSynchronize(stream)) == "ILLEGAL_ADDRESS"
    assert error(driver.cuMemAlloc(4096)) == "ILLEGAL_ADDRESS"
    assert error(driver.cuMemGetInfo()) == "ILLEGAL_ADDRESS"


def test_a_fault_for_no_call_is_refused(world: SimWorld) -> None:
    for name in ("cuMemAlloc_v2", "cuNothing", "cuGetErrorName"):
        with pytest.raises(ValueError, match=name):
            world.fault(name)
