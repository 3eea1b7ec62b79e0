"""The driver's own image: found in the target's mappings, streamed out, and compared before it is restored from."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.cuda import live_image
from ckptpipe.pipeline.cuda.choice import CapturePlan
from ckptpipe.pipeline.cuda.image_mappings import find_image, new_ranges
from ckptpipe.pipeline.cuda.target import Mapping
from ckptpipe.pyx.workers import Scan, WorkerPool
from tests.pipeline.cuda.runs import SETTINGS, Spawn, recover, restore, runs, save
from tests.pipeline.runs import run
from tests.simcuda import SimWorld

RESTORE = "cuCheckpointProcessRestore"


OLDER = """
import asyncio, json, sys, ckptpipe
pid, to, capture = int(sys.argv[1]), sys.argv[2], sys.argv[3]
plans = []
try:
    result = asyncio.run(ckptpipe.save(pid=pid, to=to, name="a", capture=capture, on_plan=plans.append))
except ckptpipe.CkptpipeError as error:
    print(json.dumps({"error": type(error).__name__, "text": str(error)}))
else:
    print(json.dumps({"capture": result.facts.capture, "why_not": plans[0].why_not, "notes": result.facts.notes}))
"""


@pytest.mark.parametrize(
    ("version", "capture", "expected"),
    [
        (13000, "auto", {"capture": "driver-image (simulated)"}),
        (13000, "custom-storage", {"error": "CaptureUnavailable"}),
        (12040, "auto", {"error": "CaptureUnavailable"}),
    ],
)
def test_an_older_driver(
    spawn: Spawn, workdir: Path, version: int, capture: str, expected: dict[str, str]
) -> None:
    """In a process of its own: entry points are found once a process."""
    with SimWorld(gpus=1, driver_version=version) as world:
        target = spawn(world, [(0, 3 << 20)])
        command = [sys.executable, "-c", OLDER, str(target.pid), str(workdir), capture]
        done = subprocess.run(command, env=world.environment(), capture_output=True, text=True, check=True)
        said = json.loads(done.stdout)
        assert said | expected == said
        if "error" in said:
            assert "came with CUDA" in said["text"] and "doctor" in said["text"]
        else:
            assert (
                "cuCheckpointOperationComplete: it came with CUDA 13.4" in said["why_not"]["custom-storage"]
            )
            assert any(note.startswith("not custom-storage: ") for note in said["notes"])
        assert world.process(target.pid).state == "RUNNING"
        target.check()


def test_there_and_back(world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path) -> None:
    target = spawn(world, [(0, 3 << 20), (1, 1 << 20)])
    plans: list[CapturePlan] = []
    result = save(target, workdir, capture="driver-image", leave="checkpointed", on_plan=plans.append)
    assert plans[0].why_not.pop("launch").startswith(f"process {target.pid} offers no pool")
    assert plans[0].why_not == {"custom-storage": "--capture driver-image was asked for"}
    assert result.facts.capture == "driver-image (simulated)"
    process = world.process(target.pid)
    assert process.state == "CHECKPOINTED" and [world.used(gpu) for gpu in range(2)] == [0, 0]
    record = json.loads((runtime / "targets" / f"{target.pid}.json").read_text())
    assert record["mappings"] == [[process.image_address, result.raw_bytes]]
    assert result.raw_bytes >= process.image_bytes
    manifest = run(ckptpipe.show(str(workdir / "a")))
    assert [stream["name"] for stream in manifest["streams"]] == ["proc/0/driver/0"]
    assert manifest["streams"][0]["kind"] == "driver"
    (facts,) = manifest["process"]["processes"]
    assert facts["capture"] == "driver-image" and [gpu["bytes"] for gpu in facts["gpus"]] == [None, None]
    stored = run_restore(workdir)
    for k in range(2):
        assert target.buffer(k) in stored
    back = restore(workdir / "a", target)
    assert back.facts.capture == "driver-image (simulated)" and back.raw_bytes == result.raw_bytes
    runs(world, target, runtime)


def run_restore(workdir: Path) -> bytes:
    run(ckptpipe.restore(str(workdir / "a"), to=workdir / "files"))
    return (workdir / "files" / "proc" / "0" / "driver" / "0").read_bytes()


@pytest.mark.parametrize("program", ["sums", "plain"])
def test_ten_cycles_with_changing_contents(
    world: SimWorld, spawn: Spawn, workdir: Path, program: str
) -> None:
    target = spawn(
        world, [(0, 1 << 20), (1, 600 << 10)], **({"program": "sums"} if program == "sums" else {})
    )
    for cycle in range(10):
        leave = "checkpointed" if cycle % 2 else "running"
        save(target, workdir, name=f"c{cycle}", leave=leave, capture="driver-image")
        if leave == "checkpointed":
            restore(workdir / f"c{cycle}", target)
        target.check()


def test_several_processes(world: SimWorld, spawn: Spawn, workdir: Path) -> None:
    targets = [spawn(world, seed=seed) for seed in (1, 2, 3)]
    pids = [target.pid for target in targets]
    options = {"to": workdir, "capture": "driver-image", "settings": SETTINGS}
    result = run(ckptpipe.save(processes=pids, name="a", leave="checkpointed", **options))  # type: ignore[arg-type]
    assert result.streams == 3 and {world.process(pid).state for pid in pids} == {"CHECKPOINTED"}
    run(ckptpipe.restore(str(workdir / "a"), processes=pids, settings=SETTINGS))
    for target in targets:
        target.check()
    run(ckptpipe.save(processes=pids, name="b", **options))  # type: ignore[arg-type]
    for target in targets:
        target.check()


def test_of_several_one_that_fails_brings_all_back(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path
) -> None:
    targets = [spawn(world, seed=seed) for seed in (1, 2, 3)]
    pids = [target.pid for target in targets]
    for call in ("cuCheckpointProcessLock", "cuCheckpointProcessCheckpoint"):
        world.fault(call, target=pids[1], error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(ckptpipe.CkptpipeError, match=r"UNKNOWN"):
            run(ckptpipe.save(processes=pids, to=workdir, capture="driver-image", settings=SETTINGS))
        for target in targets:
            runs(world, target, runtime)


def test_memory_that_changed_is_not_restored_from(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path
) -> None:
    target = spawn(world)
    save(target, workdir, capture="driver-image", leave="checkpointed")
    process = world.process(target.pid)
    with open(f"/proc/{target.pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(process.image_address + (1 << 20))
        byte = memory.read(1)
        memory.seek(process.image_address + (1 << 20))
        memory.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ckptpipe.ImageCorrupt, match=r"is not what .* chunk .*recover --pid"):
        restore(workdir / "a", target)
    assert world.calls(RESTORE) == 0 and world.process(target.pid).state == "CHECKPOINTED"
    with open(f"/proc/{target.pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(process.image_address + (1 << 20))
        memory.write(byte)
    restore(workdir / "a", target)
    runs(world, target, runtime)


def test_an_image_that_is_not_found_brings_the_target_back(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptpipe.pipeline.cuda.target import Target as Process

    target = spawn(world)
    maps = Process.maps
    monkeypatch.setattr(Process, "maps", lambda self: [m for m in maps(self) if not m.anonymous_private])
    with pytest.raises(ckptpipe.TargetError, match=r"image was not found in pid .*no new anonymous memory"):
        save(target, workdir, capture="driver-image")
    runs(world, target, runtime)


def test_memory_that_may_not_be_read(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptpipe.pipeline.cuda.target import Target as Process

    target = spawn(world)

    def refuse(self: Process) -> None:
        raise self.not_permitted()

    monkeypatch.setattr(Process, "require_readable", refuse)
    with pytest.raises(ckptpipe.CaptureUnavailable, match=r"driver-image does not work.*CAP_SYS_PTRACE"):
        save(target, workdir, capture="driver-image")
    plans: list[CapturePlan] = []
    save(target, workdir, on_plan=plans.append)
    assert plans[0].capture == "custom-storage" and "CAP_SYS_PTRACE" in plans[0].why_not["driver-image"]
    runs(world, target, runtime)


def test_a_checkpoint_by_another_tool_is_brought_back(world: SimWorld, spawn: Spawn, runtime: Path) -> None:
    from tests.simcuda.driver import checkpoint, lock

    target = spawn(world)
    assert lock(target.pid) == "SUCCESS"
    assert recover(target).actions == ["unlocked it"]
    runs(world, target, runtime)
    assert lock(target.pid) == checkpoint(target.pid) == "SUCCESS"
    state = run(ckptpipe.target_state(target.pid))
    assert (state.state, state.capture, state.images) == ("CHECKPOINTED", "", [])
    assert recover(target).actions == ["restored it from its own memory"]
    runs(world, target, runtime)
    assert recover(target).actions == []


def test_a_target_that_dies_while_its_memory_is_read(
    world: SimWorld, spawn: Spawn, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = spawn(world, [(0, 8 << 20)])
    read = WorkerPool.read_process
    count = 0

    class Pool:
        """Kills the target before the third read."""

        def __init__(self, pool: WorkerPool) -> None:
            self._pool = pool

        def __getattr__(self, name: str) -> object:
            return getattr(self._pool, name)

        def read_process(self, *arguments: object) -> asyncio.Future[Scan]:
            nonlocal count
            count += 1
            if count == 3:
                os.kill(target.pid, 9)
                target.wait()
            return read(self._pool, *arguments)  # type: ignore[arg-type]

    from ckptpipe.pipeline.sources.driver_image import DriverImageSource

    opened = DriverImageSource.open

    async def open_with(self: DriverImageSource, context: object) -> None:
        await opened(self, context)  # type: ignore[arg-type]
        context.workers = Pool(context.workers)  # type: ignore[attr-defined]

    monkeypatch.setattr(DriverImageSource, "open", open_with)
    with pytest.raises(ckptpipe.TargetGone, match=rf"pid {target.pid} .*ended in the middle"):
        save(target, workdir, capture="driver-image")


def anonymous(*ranges: tuple[int, int], permissions: str = "rw-p", path: str = "") -> list[Mapping]:
    return [Mapping(start, end, permissions, path) for start, end in ranges]


def test_new_ranges_are_found_where_the_kernel_joined_mappings() -> None:
    mib = 1 << 20
    before = anonymous((10 * mib, 20 * mib), (40 * mib, 41 * mib))
    assert new_ranges(before, before) == []
    joined = anonymous((8 * mib, 30 * mib), (40 * mib, 41 * mib), (50 * mib, 51 * mib))
    assert new_ranges(before, joined) == [(8 * mib, 2 * mib), (20 * mib, 10 * mib), (50 * mib, mib)]
    assert new_ranges(anonymous((0, mib), (2 * mib, 3 * mib)), anonymous((0, 5 * mib))) == [
        (mib, mib),
        (3 * mib, 2 * mib),
    ]
    others = [
        *anonymous((100 * mib, 200 * mib), permissions="rw-s"),
        *anonymous((200 * mib, 300 * mib), permissions="r--p"),
        *anonymous((300 * mib, 400 * mib), path="/lib/x.so"),
        *anonymous((400 * mib, 500 * mib), path="[heap]"),
    ]
    assert new_ranges([], others) == []
    assert new_ranges([], anonymous((0, mib), path="[anon:cuda]")) == [(0, mib)]


def test_what_can_be_the_image_and_what_cannot() -> None:
    mib = 1 << 20
    after = anonymous((0, 100 * mib), (200 * mib, 200 * mib + 64), (300 * mib, 310 * mib))
    assert find_image([], after, "pid 1", 1, 0, 80 << 30) == [(0, 100 * mib), (300 * mib, 10 * mib)]
    assert find_image([], after, "pid 1", 1, 110 * mib, 80 << 30)
    with pytest.raises(ckptpipe.TargetError, match=r"held 1000000000 bytes of GPU memory"):
        find_image([], after, "pid 1", 1, 1_000_000_000, 80 << 30)
    with pytest.raises(ckptpipe.TargetError, match=r"no new anonymous memory"):
        find_image(after, after, "pid 1", 1, 0, 80 << 30)
    huge = anonymous((0, 1 << 45))
    with pytest.raises(ckptpipe.TargetError, match=r"not found"):
        find_image([], huge, "pid 1", 1, 0, 80 << 30)


def test_mappings_that_moved_are_refused(world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path) -> None:
    target = spawn(world)
    save(target, workdir, capture="driver-image", leave="checkpointed")
    path = runtime / "targets" / f"{target.pid}.json"
    record = json.loads(path.read_text())
    for mappings in ([], [[record["mappings"][0][0], 4096]], [*record["mappings"], [0, 4096]]):
        path.write_text(json.dumps(record | {"mappings": mappings}))
        with pytest.raises(ckptpipe.CheckpointMismatch, match=r"driver (image|mappings)"):
            restore(workdir / "a", target)
    assert world.calls(RESTORE) == 0
    assert live_image.verify_live_image
    path.write_text(json.dumps(record))
    restore(workdir / "a", target)
    runs(world, target, runtime)
