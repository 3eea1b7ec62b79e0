"""A saving or restoring process that is killed at a step: the next one says what state the target is in, and goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ckptpipe
from tests.pipeline.cuda.runs import Spawn, recover, restore, runs, save
from tests.pipeline.runs import run
from tests.simcuda import SimWorld, Target

SAVE = """
import asyncio, sys, ckptpipe
pid, to, leave, capture = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
settings = ckptpipe.Settings(chunk_bytes=256 << 10, ring_bytes=4 << 20, workers=2)
asyncio.run(ckptpipe.save(pid=pid, to=to, name="a", leave=leave, capture=capture, settings=settings))
"""
RESTORE = """
import asyncio, sys, ckptpipe
pid, url = int(sys.argv[1]), sys.argv[2]
settings = ckptpipe.Settings(chunk_bytes=256 << 10, ring_bytes=4 << 20, workers=2)
asyncio.run(ckptpipe.restore(url, pid=pid, settings=settings))
"""
LOCK, CHECKPOINT, RESTORED, UNLOCK, COMPLETE = (
    "cuCheckpointProcessLock",
    "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessRestore",
    "cuCheckpointProcessUnlock",
    "cuCheckpointOperationComplete",
)


def killed(world: SimWorld, script: str, *arguments: object) -> None:
    """Run ``script`` until the ordered fault kills it."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=world.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr


@pytest.mark.parametrize(
    ("call", "point", "state", "action"),
    [
        (LOCK, "before", "RUNNING", None),
        (LOCK, "after", "LOCKED", "unlocked it"),
        (CHECKPOINT, "before", "LOCKED", "unlocked it"),
        (CHECKPOINT, "after", "CHECKPOINTED", "restored it from its own memory"),
        (RESTORED, "before", "CHECKPOINTED", "restored it from its own memory"),
        (RESTORED, "after", "LOCKED", "unlocked it"),
        (UNLOCK, "before", "LOCKED", "unlocked it"),
        (UNLOCK, "after", "RUNNING", None),
    ],
)
def test_a_save_by_driver_image(
    world: SimWorld,
    spawn: Spawn,
    workdir: Path,
    runtime: Path,
    call: str,
    point: str,
    state: str,
    action: str | None,
) -> None:
    target = spawn(world)
    world.fault(call, point=point, kill_caller=True)
    killed(world, SAVE, target.pid, workdir, "running", "driver-image")
    found = run(ckptpipe.target_state(target.pid))
    assert (found.state, found.worker) == (state, None)
    assert bool(found.way_back) == (state != "RUNNING")
    assert found.capture == ("" if state == "RUNNING" else "driver-image")
    assert recover(target).actions == ([action] if action else [])
    runs(world, target, runtime)
    save(target, workdir, overwrite=True)
    runs(world, target, runtime)


@pytest.mark.parametrize(
    ("call", "nth", "point", "state"),
    [
        (LOCK, 1, "after", "LOCKED"),
        (CHECKPOINT, 1, "before", "LOCKED"),
        (COMPLETE, 1, "after", "CHECKPOINTED"),
        (RESTORED, 1, "before", "CHECKPOINTED"),
        (COMPLETE, 2, "after", "LOCKED"),
        (UNLOCK, 1, "before", "LOCKED"),
    ],
)
def test_a_save_by_custom_storage(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, call: str, nth: int, point: str, state: str
) -> None:
    target = spawn(world)
    world.fault(call, nth=nth, point=point, kill_caller=True)
    killed(world, SAVE, target.pid, workdir, "running", "custom-storage")
    found = run(ckptpipe.target_state(target.pid))
    assert (found.state, found.capture) == (state, "custom-storage")
    if state == "CHECKPOINTED":
        assert found.images == [f"nvme:{workdir}/a"]
    assert recover(target).after == "RUNNING"
    runs(world, target, runtime)


@pytest.mark.parametrize(
    ("call", "nth", "state", "image"),
    [
        (CHECKPOINT, 1, "CHECKPOINTING", False),
        (COMPLETE, 1, "CHECKPOINTING", True),
        (COMPLETE, 2, "RESTORING", True),
    ],
)
def test_an_operation_that_died_with_its_process_is_said_honestly(
    world: SimWorld, spawn: Spawn, workdir: Path, call: str, nth: int, state: str, image: bool
) -> None:
    target = spawn(world)
    world.fault(call, nth=nth, point="after" if call == CHECKPOINT else "before", kill_caller=True)
    killed(world, SAVE, target.pid, workdir, "running", "custom-storage")
    assert run(ckptpipe.target_state(target.pid)).state == state
    for options in ({}, {"to": workdir / "other"}):
        with pytest.raises(ckptpipe.CkptpipeError) as failure:
            recover(target, **options)
        if not options:
            assert isinstance(failure.value, ckptpipe.CaptureFailed)
            assert "nobody can read or complete" in str(failure.value) and f"kill {target.pid}" in str(
                failure.value
            )
            assert (f"what was saved of it is at nvme:{workdir}/a" in str(failure.value)) == image
    with pytest.raises(ckptpipe.TargetError, match=rf"is {state}, not RUNNING"):
        save(target, workdir, name="b")


@pytest.mark.parametrize(
    ("call", "point", "state"),
    [(RESTORED, "before", "CHECKPOINTED"), (COMPLETE, "after", "LOCKED"), (UNLOCK, "before", "LOCKED")],
)
def test_a_restore(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, call: str, point: str, state: str
) -> None:
    target: Target = spawn(world)
    save(target, workdir, leave="checkpointed")
    world.fault(call, point=point, kill_caller=True)
    killed(world, RESTORE, target.pid, workdir / "a")
    assert run(ckptpipe.target_state(target.pid)).state == state
    if state == "CHECKPOINTED":
        restore(workdir / "a", target)
    else:
        assert recover(target).actions == ["unlocked it"]
    runs(world, target, runtime)
