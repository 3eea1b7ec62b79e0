"""Targets that cannot be captured: each gets one clear error before it is touched, wherever that can be known."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.cuda.errors import CaptureFailed
from ckptpipe.pipeline.cuda.states import ProcessState
from ckptpipe.pipeline.cuda.target import Target as Process
from ckptpipe.pipeline.cuda.target import while_alive
from tests.pipeline.cuda.runs import SETTINGS, Spawn, runs, save, saving
from tests.pipeline.runs import run
from tests.simcuda import SimWorld

LOCK = "cuCheckpointProcessLock"


@pytest.fixture
def stranger() -> object:
    """A process that does not use CUDA."""
    child = subprocess.Popen(["sleep", "600"])
    yield child
    child.kill()
    child.wait()


def test_pids_that_are_none(world: SimWorld, workdir: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(ckptpipe.TargetGone, match=rf"no process with pid {gone.pid}"):
        save(gone.pid, workdir)
    with pytest.raises(ckptpipe.TargetError, match=r"cannot checkpoint itself"):
        save(os.getpid(), workdir)
    for pid in (0, -5):
        with pytest.raises(ckptpipe.TargetError, match=r"no process id"):
            save(pid, workdir)
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ckptpipe.TargetGone, match=r"has ended"):
        save(zombie.pid, workdir)
    zombie.wait()


def test_a_thread_is_no_process(world: SimWorld, workdir: Path) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with pytest.raises(ckptpipe.TargetError, match=r"not of a thread"):
            save(thread.native_id or 0, workdir)
    finally:
        stop.set()
        thread.join()


def test_a_process_without_cuda(world: SimWorld, stranger: subprocess.Popen[bytes], workdir: Path) -> None:
    with pytest.raises(ckptpipe.TargetError, match=rf"pid {stranger.pid} \(sleep\) does not use CUDA"):
        save(stranger.pid, workdir)
    assert not list(workdir.iterdir())


def test_the_process_of_another_user(
    world: SimWorld, spawn: Spawn, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = spawn(world)
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: real + 4711)
    with pytest.raises(ckptpipe.TargetError, match=rf"belongs to user {real}, not to user {real + 4711}"):
        Process.open(target.pid)


@pytest.mark.parametrize("capture", ["custom-storage", "driver-image"])
@pytest.mark.parametrize("at", ["lock", "checkpoint"])
@pytest.mark.parametrize("option", ["--uvm", "--ipc"])
def test_what_the_driver_cannot_checkpoint(
    make_world: Callable[..., SimWorld],
    spawn: Spawn,
    workdir: Path,
    runtime: Path,
    option: str,
    at: str,
    capture: str,
) -> None:
    world = make_world(gpus=1, unsupported_at=at)
    target = spawn(world, [(0, 1 << 20)], options=[option], program="sums")
    with pytest.raises(
        ckptpipe.TargetError, match=r"the driver cannot checkpoint pid .*NOT_SUPPORTED.*UVM.*IPC"
    ):
        save(target, workdir, capture=capture)
    runs(world, target, runtime)


def test_mig_is_refused(
    make_world: Callable[..., SimWorld], spawn: Spawn, workdir: Path, runtime: Path
) -> None:
    world = make_world(gpus=1, names="Simulated GPU MIG 1g.5gb", mig=[0])
    target = spawn(world, [(0, 1 << 20)])
    with pytest.raises(ckptpipe.TargetError, match=r"MIG instance"):
        save(target, workdir)
    assert world.calls(LOCK) == 0
    runs(world, target, runtime)


@pytest.mark.parametrize("how", ["locked", "checkpointed"])
def test_a_target_that_is_not_running(world: SimWorld, spawn: Spawn, workdir: Path, how: str) -> None:
    from tests.simcuda.driver import checkpoint, lock

    target = spawn(world)
    assert lock(target.pid) == "SUCCESS"
    if how == "checkpointed":
        assert checkpoint(target.pid) == "SUCCESS"
    with pytest.raises(
        ckptpipe.TargetError, match=rf"is {how.upper()}, not RUNNING.*recover --pid {target.pid}"
    ):
        save(target, workdir)
    assert world.process(target.pid).state == how.upper()


def test_a_target_that_failed(world: SimWorld, spawn: Spawn, workdir: Path) -> None:
    target = spawn(world)
    world.fault("cuCheckpointProcessCheckpoint", error="CUDA_ERROR_UNKNOWN", state="FAILED")
    with pytest.raises(CaptureFailed, match=r"stays FAILED.*end it \(kill"):
        save(target, workdir)
    with pytest.raises(CaptureFailed, match=r"is FAILED.*kill"):
        run(ckptpipe.recover(target.pid))
    with pytest.raises(ckptpipe.TargetError, match=r"is FAILED, not RUNNING"):
        save(target, workdir)


def test_another_tool_takes_it_first(world: SimWorld, spawn: Spawn, workdir: Path) -> None:
    target = spawn(world)
    world.fault(LOCK, error="CUDA_ERROR_ILLEGAL_STATE", state="LOCKED")
    with pytest.raises(ckptpipe.TargetError, match=r"another tool has taken it"):
        save(target, workdir)
    assert world.process(target.pid).state == "LOCKED", "not ours to unlock"


def test_a_second_request_at_the_same_time(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path
) -> None:
    target = spawn(world)
    hold = world.fault("cuCheckpointProcessCheckpoint", hold=True)

    async def main() -> None:
        first = asyncio.ensure_future(saving(target, workdir / "one"))
        await asyncio.to_thread(hold.wait)
        with pytest.raises(ckptpipe.TargetBusy, match=rf"is being saved or restored by pid {os.getpid()}"):
            await saving(target, workdir / "two")
        with pytest.raises(ckptpipe.TargetBusy):
            await ckptpipe.recover(target.pid)
        hold.release()
        await first

    run(main())
    runs(world, target, runtime)


def test_two_targets_are_saved_at_the_same_time(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path
) -> None:
    targets = [spawn(world, seed=1), spawn(world, seed=2)]

    async def main() -> None:
        await asyncio.gather(
            *(saving(target, workdir, name=f"i{k}", capture=capture)
              for k, (target, capture) in enumerate(zip(targets, ["custom-storage", "driver-image"], strict=True)))
        )  # fmt: skip

    run(main())
    for target in targets:
        runs(world, target, runtime)


def test_arguments_that_make_no_sense(world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path) -> None:
    target = spawn(world)
    pid = target.pid
    for options, words in (
        ({"pid": pid, "capture": "magic"}, r"capture 'magic'"),
        ({"pid": pid, "leave": "dead"}, r"leave 'dead'"),
        ({"pid": pid, "lock_timeout": 0}, r"time-out"),
        ({"processes": [pid, pid]}, r"different pids"),
        ({"processes": ["1"]}, r"different pids"),
        ({"pid": pid, "sources": "/etc"}, r"give one of"),
        ({}, r"give one of"),
        ({"pid": pid, "device_buffers": {}}, r"give one of"),
        ({"pid": pid, "compress": "lzma"}, r"lzma"),
        ({"pid": pid, "name": "a/b"}, r"cannot name an image"),
        ({"pid": pid, "to": []}, r"no sink"),
    ):
        with pytest.raises(ckptpipe.UsageError, match=words):
            run(ckptpipe.save(**({"to": workdir, "settings": SETTINGS} | options)))  # type: ignore[arg-type]
    with pytest.raises(ckptpipe.UsageError, match=r"leave 'x'"):
        run(ckptpipe.recover(pid, leave="x"))
    with pytest.raises(ckptpipe.UsageError, match=r"no GPU memory of it that could be sent"):
        run(ckptpipe.recover(pid, to=workdir))
    assert world.calls(LOCK) == 0
    runs(world, target, runtime)


def test_a_plan_that_is_not_liked_ends_the_save_untouched(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path
) -> None:
    target = spawn(world)

    def refuse(plan: object) -> None:
        raise KeyboardInterrupt(str(plan))

    with pytest.raises(KeyboardInterrupt, match=r"capture custom-storage \(simulated\) of"):
        save(target, workdir, on_plan=refuse)
    assert world.calls(LOCK) == 0
    runs(world, target, runtime)


def test_states_and_their_ways_back() -> None:
    for state in ProcessState:
        assert state.meaning
        assert bool(state.way_back(42)) == (state is not ProcessState.RUNNING)
        assert "42" in state.way_back(42) or state is ProcessState.RUNNING


def test_while_alive_passes_results_errors_and_cancellations_on() -> None:
    child = subprocess.Popen(["sleep", "600"])
    process = Process.open(child.pid)

    async def value() -> int:
        return 7

    async def broken() -> None:
        raise ValueError("x")

    async def main() -> None:
        assert await while_alive([process], value()) == 7
        with pytest.raises(ValueError, match=r"x"):
            await while_alive([process], broken())
        waiting = asyncio.ensure_future(while_alive([process], asyncio.sleep(600)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        waiting = asyncio.ensure_future(while_alive([process], asyncio.sleep(600)))
        await asyncio.sleep(0)
        child.kill()
        with pytest.raises(ckptpipe.TargetGone, match=r"\(sleep\) ended in the middle"):
            await waiting
        child.wait()

    try:
        run(main())
    finally:
        child.kill()
        child.wait()
        process.close()


def test_gpus_of_a_process_from_proc(tmp_path: Path) -> None:
    """A root with /dev/nvidia1 open and two GPUs: what /proc says on a machine with NVIDIA's driver."""
    child = subprocess.Popen(["sleep", "600"])
    try:
        proc = tmp_path / "proc"
        folder = proc / str(child.pid)
        (folder / "fd").mkdir(parents=True)
        for name in ("stat", "status", "maps"):
            (folder / name).write_text(Path(f"/proc/{child.pid}/{name}").read_text())
        (proc / "sys/kernel/random").mkdir(parents=True)
        (proc / "sys/kernel/random/boot_id").write_text("boot\n")
        for number, target in enumerate(("/dev/null", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm")):
            (folder / "fd" / str(number)).symlink_to(target)
        for k in range(2):
            gpu = proc / f"driver/nvidia/gpus/0000:{k}0:00.0"
            gpu.mkdir(parents=True)
            (gpu / "information").write_text(
                f"Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-0000000{k}-aaaa-bbbb-cccc-000000000000\nDevice Minor: \t {k}\n"
            )
        process = Process.open(child.pid, tmp_path)
        try:
            assert process.boot_id == "boot"
            assert process.gpu_uuids() == ["GPU-00000001-aaaa-bbbb-cccc-000000000000"]
            assert process.devices() == ([1], False)
            (folder / "fd" / "9").symlink_to("/dev/nvidia-caps/nvidia-cap2")
            assert process.devices() == ([1], False)
            (folder / "fd" / "10").symlink_to("/dev/nvidia-caps/nvidia-cap12")
            assert process.devices() == ([1], True)
        finally:
            process.close()
    finally:
        child.kill()
        child.wait()


def test_without_cuda_python_the_cure_is_said(workdir: Path) -> None:
    script = (
        "import sys, asyncio\nsys.modules['cuda'] = None\nimport ckptpipe\n"
        "try:\n    asyncio.run(ckptpipe.save(pid=1, to='memory:'))\n"
        "except ckptpipe.UsageError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "pip install 'ckptpipe[gpu]'" in done.stdout
