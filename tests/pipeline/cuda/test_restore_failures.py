"""Restoring into a process: what is refused before it is touched, and what is said when a step fails."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.cuda import put_back, records
from ckptpipe.pipeline.cuda.device_map import GpuUnsuitable
from ckptpipe.pipeline.cuda.records import TargetLock
from ckptpipe.pipeline.cuda.target import Target as Process
from tests.pipeline.cuda.runs import SETTINGS, Spawn, recover, restore, runs, save
from tests.pipeline.runs import run
from tests.simcuda import SimWorld, Target

RESTORE, UNLOCK, COMPLETE = (
    "cuCheckpointProcessRestore",
    "cuCheckpointProcessUnlock",
    "cuCheckpointOperationComplete",
)


@pytest.fixture
def checkpointed(world: SimWorld, spawn: Spawn, workdir: Path) -> Target:
    target = spawn(world)
    save(target, workdir, leave="checkpointed")
    return target


def damage(image: Path, position: int = 5000) -> None:
    data = max(image.glob("data-*"), key=lambda path: path.stat().st_size)
    with open(data, "r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))


def test_bad_bytes_end_in_a_named_state_and_a_good_copy_brings_it_back(
    world: SimWorld, checkpointed: Target, workdir: Path, runtime: Path
) -> None:
    shutil.copytree(workdir / "a", workdir / "copy")
    damage(workdir / "a")
    with pytest.raises(
        ckptpipe.CaptureFailed,
        match=rf"checksum.*pid {checkpointed.pid} .*stays RESTORING.*ckptpipe restore .* --pid {checkpointed.pid}",
    ) as failure:
        restore(workdir / "a", checkpointed)
    assert isinstance(failure.value.__cause__, ckptpipe.ImageCorrupt)
    assert failure.value.exit_code == 3
    assert world.process(checkpointed.pid).state == "RESTORING"
    assert world.calls(UNLOCK) == 0 and world.calls(COMPLETE) == 1, "only the save's"
    with pytest.raises(ckptpipe.CaptureFailed, match=r"stays RESTORING"):
        recover(checkpointed)
    restore(workdir / "copy", checkpointed)
    runs(world, checkpointed, runtime)


def test_bytes_that_are_bad_once_are_read_again(
    world: SimWorld, checkpointed: Target, workdir: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(workdir / "a", workdir / "copy")
    damage(workdir / "a")
    made = put_back.ImageSource

    def source(*arguments: object, **options: object) -> object:
        if mended:
            shutil.copytree(workdir / "copy", workdir / "a", dirs_exist_ok=True)
        mended.append(True)
        return made(*arguments, **options)  # type: ignore[arg-type]

    mended: list[bool] = []
    monkeypatch.setattr(put_back, "ImageSource", source)
    result = restore(workdir / "a", checkpointed)
    assert any("read again" in note for note in result.facts.notes)
    runs(world, checkpointed, runtime)


@pytest.mark.parametrize("what", ["manifest.json", "index", "data", "short"])
def test_an_image_that_is_not_whole_is_refused_before_the_target_is_touched(
    world: SimWorld, checkpointed: Target, workdir: Path, what: str
) -> None:
    for path in sorted((workdir / "a").iterdir()):
        if what == "short" and path.name.startswith("data"):
            os.truncate(path, path.stat().st_size - 4096)
        elif path.name.startswith(what):
            path.unlink()
    with pytest.raises((ckptpipe.ImageNotFound, ckptpipe.ImageCorrupt)):
        restore(workdir / "a", checkpointed)
    assert world.process(checkpointed.pid).state == "CHECKPOINTED"
    assert world.calls(RESTORE) == 0


def test_an_image_of_another_checkpoint_is_refused(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path
) -> None:
    target = spawn(world)
    save(target, workdir, name="old")
    target.check()
    save(target, workdir, name="new", leave="checkpointed")
    with pytest.raises(ckptpipe.CheckpointMismatch, match=rf"another checkpoint.*nvme:{workdir}/new"):
        restore(workdir / "old", target)
    assert world.process(target.pid).state == "CHECKPOINTED"
    restore(workdir / "new", target)
    runs(world, target, runtime)


def test_a_snapshot_cannot_go_into_the_process_that_went_on(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path
) -> None:
    target = spawn(world)
    save(target, workdir)
    with pytest.raises(ckptpipe.CheckpointMismatch, match=r"no record of the present checkpoint"):
        restore(workdir / "a", target)
    runs(world, target, runtime)


def test_without_the_record_nothing_is_restored(
    world: SimWorld, checkpointed: Target, workdir: Path, runtime: Path
) -> None:
    record = runtime / "targets" / f"{checkpointed.pid}.json"
    kept = record.read_bytes()
    for content in (None, b"", b"{", b"[]", b'{"pid": 1}', b'"x"', b"\xff"):
        record.unlink()
        if content is not None:
            record.write_bytes(content)
        else:
            record.symlink_to("/etc/passwd")
        with pytest.raises(ckptpipe.CheckpointMismatch, match=r"no record"):
            restore(workdir / "a", checkpointed)
    record.unlink()
    record.write_bytes(kept)
    restore(workdir / "a", checkpointed)
    runs(world, checkpointed, runtime)


def test_the_pid_of_another_process(
    world: SimWorld, spawn: Spawn, checkpointed: Target, workdir: Path
) -> None:
    other = spawn(world)
    with pytest.raises(ckptpipe.UsageError, match=rf"image of pid {checkpointed.pid} .*CRIU"):
        restore(workdir / "a", other)
    # A reused pid: the same number, another start time.
    with pytest.MonkeyPatch.context() as patch:
        init = Process.__init__

        def later(self: Process, pid: int, pidfd: int, root: Path) -> None:
            init(self, pid, pidfd, root)
            self.start_time += 1

        patch.setattr(Process, "__init__", later)
        with pytest.raises(ckptpipe.CheckpointMismatch, match=r"of another process.*CRIU"):
            restore(workdir / "a", checkpointed)
        patch.setattr(Process, "__init__", init)

        def rebooted(self: Process, pid: int, pidfd: int, root: Path) -> None:
            init(self, pid, pidfd, root)
            self.boot_id = "another"

        patch.setattr(Process, "__init__", rebooted)
        with pytest.raises(ckptpipe.CheckpointMismatch, match=r"before this machine was booted"):
            restore(workdir / "a", checkpointed)
    assert world.calls(RESTORE) == 0


def test_a_process_that_has_exited(world: SimWorld, checkpointed: Target, workdir: Path) -> None:
    checkpointed.kill()
    with pytest.raises(ckptpipe.TargetGone, match=rf"no process with pid {checkpointed.pid}"):
        restore(workdir / "a", checkpointed)


def test_an_image_of_files_is_none_of_a_process(world: SimWorld, checkpointed: Target, workdir: Path) -> None:
    run(ckptpipe.save({"x": b"1"}, to=workdir, name="files"))
    with pytest.raises(ckptpipe.UsageError, match=r"not the image of a process"):
        restore(workdir / "files", checkpointed)


def test_a_bad_process_block_is_corrupt(
    world: SimWorld, checkpointed: Target, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptpipe.pipeline.image import manifest

    good = manifest.Manifest.decode((workdir / "a" / "manifest.json").read_bytes())
    assert good.process is not None
    (process,) = good.process["processes"]
    for change in (
        {"k": -1},
        {"k": 7},
        {"pid": "1"},
        {"capture": "magic"},
        {"gpus": []},
        {"gpus": process["gpus"][:1]},
        {"gpus": [dict(process["gpus"][0], bytes=1), process["gpus"][1]]},
        {"gpus": None},
        {"start_time": True},
        {"nonce": 3},
    ):
        bad = replace(good, process=dict(good.process, processes=[dict(process, **change)]))
        (workdir / "a" / "manifest.json").write_bytes(bad.encode())
        with pytest.raises(ckptpipe.ImageCorrupt, match=r"facts about the process"):
            restore(workdir / "a", checkpointed)
    for facts in (
        {},
        {"boot_id": "x"},
        {"boot_id": "x", "processes": []},
        {"boot_id": 1, "processes": [process]},
    ):
        (workdir / "a" / "manifest.json").write_bytes(replace(good, process=facts).encode())
        with pytest.raises(ckptpipe.ImageCorrupt, match=r"facts about the process"):
            restore(workdir / "a", checkpointed)
    assert world.calls(RESTORE) == 0


@pytest.mark.parametrize("point", ["before", "middle"])
def test_out_of_memory_leaves_it_checkpointed(
    world: SimWorld, checkpointed: Target, workdir: Path, runtime: Path, point: str
) -> None:
    world.fault(RESTORE, point=point, error="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(ckptpipe.CaptureFailed, match=r"OUT_OF_MEMORY.*stays CHECKPOINTED"):
        restore(workdir / "a", checkpointed)
    restore(workdir / "a", checkpointed)
    runs(world, checkpointed, runtime)


def test_a_completion_that_fails_is_never_followed_by_an_unlock(
    world: SimWorld, checkpointed: Target, workdir: Path, runtime: Path
) -> None:
    world.fault(COMPLETE, error="CUDA_ERROR_UNKNOWN")
    with pytest.raises(ckptpipe.CaptureFailed, match=r"stays RESTORING"):
        restore(workdir / "a", checkpointed)
    assert world.calls(UNLOCK) == 0
    restore(workdir / "a", checkpointed)
    runs(world, checkpointed, runtime)


def test_gpus_that_cannot_hold_the_image(
    make_world: Callable[..., SimWorld], spawn: Spawn, workdir: Path, runtime: Path
) -> None:
    world = make_world(gpus=2, memory=64 << 20)
    target = spawn(world, [(0, 30 << 20)])
    save(target, workdir, leave="checkpointed")
    other = spawn(world, [(0, 40 << 20)])
    with pytest.raises(GpuUnsuitable, match=rf"{world.gpus[0].uuid} .*bytes of memory free, the image needs"):
        restore(workdir / "a", target)
    assert world.calls(RESTORE) == 0
    other.kill()
    restore(workdir / "a", target)
    runs(world, target, runtime)


def test_a_device_map_moves_it_to_another_gpu(
    make_world: Callable[..., SimWorld], spawn: Spawn, workdir: Path, runtime: Path
) -> None:
    world = make_world(gpus=3, names="Simulated GPU")
    a, b, c = (gpu.uuid for gpu in world.gpus)
    target = spawn(world, [(0, 3 << 20), (1, 1 << 20)])
    for capture in ("custom-storage", "driver-image"):
        save(target, workdir, name=capture, leave="checkpointed", capture=capture)
        restore(workdir / capture, target, device_map={a: b, b: c})
        assert [world.used(gpu) > 0 for gpu in range(3)] == [False, True, True]
        runs(world, target, runtime)
        save(target, workdir, name=f"{capture}2", leave="checkpointed", capture=capture)
        restore(workdir / f"{capture}2", target, device_map={b: a, c: b})
        runs(world, target, runtime)


def test_device_maps_that_cannot_be(make_world: Callable[..., SimWorld], spawn: Spawn, workdir: Path) -> None:
    world = make_world(gpus=3, names=["A", "A", "B"], chips=["a", "a", "b"])
    a, b, c = (gpu.uuid for gpu in world.gpus)
    target = spawn(world, [(0, 1 << 20), (1, 1 << 20)])
    save(target, workdir, leave="checkpointed")
    nobody = "GPU-00000000-0000-0000-0000-000000000000"
    for mapped, error, words in (
        ({a: b}, ckptpipe.UsageError, r"must list every GPU"),
        ({a: b, b: b}, ckptpipe.UsageError, r"names a GPU twice"),
        ({a: b, b: c}, GpuUnsuitable, r"is a B, the image is of a A"),
        ({a: b, b: nobody}, GpuUnsuitable, r"not in this machine"),
        ({a: b, b: a, c: c}, ckptpipe.UsageError, r"which the image was not on"),
        ({"x": a}, ckptpipe.UsageError, r"no GPU's UUID"),
    ):
        with pytest.raises(error, match=words):
            restore(workdir / "a", target, device_map=mapped)
    assert world.calls(RESTORE) == 0
    with pytest.raises(ckptpipe.UsageError, match=r"device map is for"):
        run(ckptpipe.restore(str(workdir / "a"), to=workdir / "f", device_map={a: b}))


def test_of_two_processes_the_one_that_fits_runs_again(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path
) -> None:
    one, two = spawn(world, seed=1), spawn(world, seed=2)
    pids = [one.pid, two.pid]
    run(ckptpipe.save(processes=pids, to=workdir, name="a", leave="checkpointed", settings=SETTINGS))
    world.fault(RESTORE, target=two.pid, error="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(
        ckptpipe.CaptureFailed, match=rf"OUT_OF_MEMORY.*pid {two.pid} .*stays CHECKPOINTED"
    ) as failure:
        run(ckptpipe.restore(str(workdir / "a"), processes=pids, settings=SETTINGS))
    assert list(failure.value.states) == [two.pid]
    one.check()
    assert recover(two).after == "RUNNING"
    runs(world, two, runtime)


def test_somebody_else_works_on_it(world: SimWorld, checkpointed: Target, workdir: Path) -> None:
    process = Process.open(checkpointed.pid)
    lock = TargetLock.take(process)
    try:
        with pytest.raises(ckptpipe.TargetBusy, match=rf"by pid {os.getpid()}") as failure:
            restore(workdir / "a", checkpointed)
        assert failure.value.retryable
        with pytest.raises(ckptpipe.TargetBusy):
            recover(checkpointed)
        assert records.busy_with(checkpointed.pid) == os.getpid()
        assert run(ckptpipe.target_state(checkpointed.pid)).worker == os.getpid()
    finally:
        lock.release()
        process.close()
    assert records.busy_with(checkpointed.pid) is None
