"""cuCheckpointProcess*: every state, every call in it, as the driver's documentation has it (cuda.bindings quotes it)."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.simcuda import BusyTarget, SimWorld, Target
from tests.simcuda.driver import call, checkpoint, driver, error, lock, restore, state, unlock
from tests.simcuda.storage import checkpoint as checkpoint_custom
from tests.simcuda.storage import restore as restore_custom

BUFFERS = [(0, 3 << 20), (1, 1 << 20), (0, 100_000)]


def test_each_state_is_reached_by_the_documented_call(world: SimWorld, library: ctypes.CDLL) -> None:
    with Target(world.environment(), BUFFERS) as target:
        assert state(target.pid) == "RUNNING"
        assert lock(target.pid) == "SUCCESS"
        assert state(target.pid) == "LOCKED"
        assert checkpoint(target.pid) == "SUCCESS"
        assert state(target.pid) == "CHECKPOINTED"
        assert restore(target.pid) == "SUCCESS"
        assert state(target.pid) == "LOCKED"
        assert unlock(target.pid) == "SUCCESS"
        assert state(target.pid) == "RUNNING"
        target.check()


def _bring(pid: int, wanted: str, library: ctypes.CDLL) -> None:
    """Bring a running target into a state by the legal calls."""
    if wanted == "RUNNING":
        return
    assert lock(pid) == "SUCCESS"
    if wanted in ("CHECKPOINTED", "CHECKPOINTED custom", "CHECKPOINTING", "RESTORING"):
        if wanted == "CHECKPOINTED":
            assert checkpoint(pid) == "SUCCESS"
            return
        code, operation = checkpoint_custom(library, pid)
        assert code == 0 and operation is not None
        if wanted == "CHECKPOINTING":
            return
        assert operation.complete() == 0
        if wanted == "RESTORING":
            code, operation = restore_custom(library, pid)
            assert code == 0 and operation is not None


LEGAL: dict[str, set[str]] = {
    "RUNNING": {"lock"},
    "LOCKED": {"unlock", "checkpoint", "checkpoint custom"},
    "CHECKPOINTED": {"restore"},
    "CHECKPOINTED custom": {"restore custom"},
    "CHECKPOINTING": set(),
    "RESTORING": set(),
}
OTHER_KIND = {("CHECKPOINTED", "restore custom"), ("CHECKPOINTED custom", "restore")}
"""The right state, but the bytes are not where this call takes them from: INVALID_VALUE."""


@pytest.mark.parametrize("where", LEGAL)
def test_every_other_call_is_an_illegal_state_and_changes_nothing(
    where: str, world: SimWorld, library: ctypes.CDLL
) -> None:
    calls: dict[str, Callable[[int], str]] = {
        "lock": lock,
        "unlock": unlock,
        "checkpoint": checkpoint,
        "restore": restore,
        "checkpoint custom": lambda pid: error(checkpoint_custom(library, pid)[0]),
        "restore custom": lambda pid: error(restore_custom(library, pid)[0]),
    }
    with Target(world.environment(), BUFFERS) as target:
        _bring(target.pid, where, library)
        for name, make in calls.items():
            if name not in LEGAL[where]:
                expected = "INVALID_VALUE" if (where, name) in OTHER_KIND else "ILLEGAL_STATE"
                assert (name, make(target.pid)) == (name, expected)
                assert state(target.pid) == where.removesuffix(" custom")


def test_lock_blocks_further_calls_until_unlock(world: SimWorld, library: ctypes.CDLL) -> None:
    with BusyTarget(world.environment()) as target:
        target.progress()
        assert lock(target.pid) == "SUCCESS"
        before = world.calls("cuEventRecord")
        assert checkpoint(target.pid) == "SUCCESS"
        assert restore(target.pid) == "SUCCESS"
        assert world.calls("cuEventRecord") == before
        assert unlock(target.pid) == "SUCCESS"
        first = target.progress()
        assert target.progress() > first


def test_lock_waits_for_calls_in_flight_and_a_time_out_leaves_it_running(
    world: SimWorld, library: ctypes.CDLL
) -> None:
    with Target(world.environment(), BUFFERS) as target:
        held = world.fault("cuMemcpyDtoH", pid=target.pid, hold=True)
        target.ask()
        held.wait()
        assert lock(target.pid, 50) == "NOT_READY"
        assert state(target.pid) == "RUNNING"
        expected = target.expected()
        held.release()
        assert target.answer() == expected
        assert lock(target.pid, 60_000) == "SUCCESS"
        assert unlock(target.pid) == "SUCCESS"
        target.check()


def test_lock_waits_for_work_on_streams(world: SimWorld, library: ctypes.CDLL) -> None:
    with Target(world.environment(), BUFFERS) as target:
        world.link(0, to_host=-1)
        target.ask()  # its copy stands still on the link
        while world.calls("cuMemcpyDtoH") == 0:
            os.sched_yield()
        assert lock(target.pid, 50) == "NOT_READY"
        world.link(0, to_host=0)
        target.answer()
        assert lock(target.pid) == "SUCCESS"


def test_processes_that_cannot_be_targets(world: SimWorld, library: ctypes.CDLL) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        for make in (lock, unlock, checkpoint, restore):
            assert make(other.pid) == "NOT_INITIALIZED"
        assert error(driver.cuCheckpointProcessGetState(other.pid)) == "NOT_INITIALIZED"
        other.kill()
        other.wait()
        assert lock(other.pid) == "INVALID_VALUE"
    for pid in (0, -1, 2**22 + 5):
        assert error(driver.cuCheckpointProcessGetState(pid)) == "INVALID_VALUE"


def test_a_process_may_lock_itself_but_not_to_custom_storage(library: ctypes.CDLL) -> None:
    own = os.getpid()
    address = call(driver.cuMemAlloc(1 << 20))
    call(driver.cuMemsetD8(address, 7, 1 << 20))
    assert lock(own) == "SUCCESS"
    assert error(checkpoint_custom(library, own)[0]) == "NOT_SUPPORTED"
    assert checkpoint(own) == "SUCCESS"
    assert restore(own) == "SUCCESS"
    assert unlock(own) == "SUCCESS"
    data = bytearray(1 << 20)
    call(driver.cuMemcpyDtoH(data, address, 1 << 20))
    assert data == b"\7" * (1 << 20)


@pytest.mark.parametrize("option", ["--uvm", "--ipc"])
@pytest.mark.parametrize("where", ["checkpoint", "lock"])
def test_unified_memory_and_ipc_are_refused(option: str, where: str) -> None:
    with SimWorld(gpus=1, unsupported_at=where) as world, world.attached():
        with Target(world.environment(), [(0, 4096)], options=[option]) as target:
            assert world.process(target.pid).uses == (option[2:],)
            if where == "lock":
                assert lock(target.pid) == "NOT_SUPPORTED"
                assert state(target.pid) == "RUNNING"
            else:
                assert lock(target.pid) == "SUCCESS"
                assert checkpoint(target.pid) == "NOT_SUPPORTED"
                assert state(target.pid) == "LOCKED"
                assert unlock(target.pid) == "SUCCESS"
            target.check()


def test_mig_is_refused() -> None:
    with SimWorld(gpus=2, mig=[1]) as world, world.attached():
        with (
            Target(world.environment(), [(0, 4096)]) as plain,
            Target(world.environment(), [(1, 4096)]) as mig,
        ):
            for target in (plain, mig):
                assert lock(target.pid) == "SUCCESS"
            assert checkpoint(plain.pid) == "SUCCESS"
            assert checkpoint(mig.pid) == "NOT_SUPPORTED"


def test_restore_wants_persistence_mode_or_cuinit() -> None:
    with SimWorld(gpus=1, persistence=False) as world, world.attached():
        with Target(world.environment(), [(0, 4096)]) as target:
            assert lock(target.pid) == "SUCCESS"
            assert checkpoint(target.pid) == "SUCCESS"
            assert restore(target.pid) == "NOT_INITIALIZED"
            assert state(target.pid) == "CHECKPOINTED"
            call(driver.cuInit(0))
            assert restore(target.pid) == "SUCCESS"


def test_restore_thread_is_a_thread_of_the_target(world: SimWorld, library: ctypes.CDLL) -> None:
    with Target(world.environment(), BUFFERS) as target:
        thread = call(driver.cuCheckpointProcessGetRestoreThreadId(target.pid))
        assert thread != target.pid
        assert str(thread) in os.listdir(f"/proc/{target.pid}/task")


def test_a_locked_target_can_be_killed(world: SimWorld, library: ctypes.CDLL) -> None:
    with Target(world.environment(), BUFFERS) as target:
        assert lock(target.pid) == "SUCCESS"
        used = world.used(0)
        os.kill(target.pid, signal.SIGKILL)
        target.wait()
        assert unlock(target.pid) == "INVALID_VALUE"
        assert world.used(0) < used
        assert [process.pid for process in world.processes()] == [os.getpid()]
