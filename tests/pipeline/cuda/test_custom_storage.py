"""Custom storage, end to end on the simulated driver: contents proven by the targets' own sums."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.cuda.choice import CapturePlan
from ckptpipe.pipeline.cuda.records import busy_with
from tests.pipeline.runs import run
from tests.simcuda import SimWorld, Target

KIB = 1 << 10
SETTINGS = ckptpipe.Settings(chunk_bytes=256 * KIB, ring_bytes=4 << 20, workers=2)
Spawn = Callable[..., Target]


@pytest.mark.parametrize("compress", ["none", "zstd:1"])
def test_a_snapshot_leaves_the_process_running_with_its_memory(
    world: SimWorld, spawn: Spawn, workdir: Path, compress: str
) -> None:
    target = spawn(world)
    plans: list[CapturePlan] = []
    result = run(
        ckptpipe.save(
            pid=target.pid, to=workdir, name="a", compress=compress, settings=SETTINGS, on_plan=plans.append
        )
    )
    assert world.process(target.pid).state == "RUNNING"
    for _ in range(3):
        target.check()
    assert plans[0].capture == "custom-storage" and "driver-image" in plans[0].why_not
    assert result.facts.capture == "custom-storage (simulated)"
    assert result.facts.pause_seconds is not None and result.facts.pause_seconds > 0
    assert [(p.pid, p.state) for p in result.facts.processes] == [(target.pid, "RUNNING")]
    assert result.streams == 2
    run(ckptpipe.verify(str(workdir / "a"), settings=SETTINGS))


def test_the_image_holds_the_bytes_that_were_on_each_gpu(
    world: SimWorld, spawn: Spawn, workdir: Path
) -> None:
    target = spawn(world, [(0, 3 << 20), (1, 1 << 20)])
    run(ckptpipe.save(pid=target.pid, to=workdir, name="a", settings=SETTINGS))
    run(ckptpipe.restore(str(workdir / "a"), to=workdir / "files", settings=SETTINGS))
    for k, gpu in enumerate(world.gpus):
        stored = (workdir / "files" / "proc" / "0" / "gpu" / gpu.uuid).read_bytes()
        assert stored.endswith(target.buffer(k))


def test_the_manifest_says_what_was_captured(world: SimWorld, spawn: Spawn, workdir: Path) -> None:
    target = spawn(world)
    run(ckptpipe.save(pid=target.pid, to=workdir, name="a", settings=SETTINGS))
    facts = run(ckptpipe.show(str(workdir / "a")))["process"]
    (process,) = facts["processes"]
    assert facts["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert (process["k"], process["pid"], process["capture"]) == (0, target.pid, "custom-storage")
    assert [gpu["uuid"] for gpu in process["gpus"]] == [gpu.uuid for gpu in world.gpus]
    assert [gpu["memory_bytes"] for gpu in process["gpus"]] == [gpu.memory for gpu in world.gpus]
    assert [gpu["bytes"] for gpu in process["gpus"]] == [(2 << 20) + (3 << 20), (2 << 20) + (1 << 20)]
    assert len(process["nonce"]) == 32 and process["driver_version"] == "13.4"
    stat = Path(f"/proc/{target.pid}/stat").read_text()
    assert process["start_time"] == int(stat.rpartition(")")[2].split()[19])
    assert process["name"] == stat[stat.index("(") + 1 : stat.rindex(")")]


def test_checkpointed_frees_the_gpus_and_a_restore_brings_it_back(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path
) -> None:
    target = spawn(world)
    result = run(ckptpipe.save(pid=target.pid, to=workdir, name="a", leave="checkpointed", settings=SETTINGS))
    assert [p.state for p in result.facts.processes] == ["CHECKPOINTED"]
    assert result.facts.pause_seconds is None
    assert world.process(target.pid).state == "CHECKPOINTED"
    assert [world.used(gpu) for gpu in range(2)] == [0, 0]
    record = json.loads((runtime / "targets" / f"{target.pid}.json").read_text())
    assert record["images"] == [f"nvme:{workdir}/a"] and record["phase"] == "checkpointed"
    assert (runtime / "targets" / f"{target.pid}.json").stat().st_mode & 0o777 == 0o600
    assert (runtime / "targets").stat().st_mode & 0o777 == 0o700
    state = run(ckptpipe.target_state(target.pid))
    assert (state.state, state.images, state.worker) == ("CHECKPOINTED", [f"nvme:{workdir}/a"], None)

    back = run(ckptpipe.restore(str(workdir / "a"), pid=target.pid, settings=SETTINGS))
    assert back.facts.capture == "custom-storage (simulated)"
    assert [p.state for p in back.facts.processes] == ["RUNNING"]
    assert back.facts.pause_seconds is not None
    assert back.raw_bytes == result.raw_bytes and back.streams == 2
    assert world.process(target.pid).state == "RUNNING"
    for _ in range(3):
        target.check()
    assert list((runtime / "targets").iterdir()) == []
    assert busy_with(target.pid) is None


def test_ten_cycles_with_changing_contents(world: SimWorld, spawn: Spawn, workdir: Path) -> None:
    target = spawn(world, [(0, 1 << 20), (1, 300 * KIB)], program="sums")
    for cycle in range(10):
        leave = "checkpointed" if cycle % 2 else "running"
        to, name = workdir, f"c{cycle}"
        run(ckptpipe.save(pid=target.pid, to=to, name=name, leave=leave, settings=SETTINGS))  # type: ignore[arg-type]
        if leave == "checkpointed":
            run(ckptpipe.restore(str(workdir / name), pid=target.pid, settings=SETTINGS))
        target.check()


def test_a_process_that_was_locked_meanwhile_answers_after_the_save(
    world: SimWorld, spawn: Spawn, workdir: Path
) -> None:
    target = spawn(world)
    expected = target.expected()
    hold = world.fault("cuCheckpointOperationComplete", hold=True)

    async def main() -> None:
        saving = asyncio.ensure_future(ckptpipe.save(pid=target.pid, to=workdir, name="a", settings=SETTINGS))
        await asyncio.to_thread(hold.wait)
        target.ask()
        hold.release()
        await saving

    run(main())
    assert target.answer() == expected


def test_several_processes_at_once(world: SimWorld, spawn: Spawn, workdir: Path) -> None:
    targets = [
        spawn(world, [(0, 1 << 20), (1, 2 << 20)], seed=1),
        spawn(world, [(1, 3 << 20)], seed=2),
        spawn(world, [(0, 512 * KIB)], seed=3),
    ]
    pids = [target.pid for target in targets]
    result = run(ckptpipe.save(processes=pids, to=workdir, name="a", leave="checkpointed", settings=SETTINGS))
    assert result.streams == 4
    assert {world.process(pid).state for pid in pids} == {"CHECKPOINTED"}
    with pytest.raises(ckptpipe.UsageError, match="they belong together"):
        run(ckptpipe.restore(str(workdir / "a"), pid=pids[0], settings=SETTINGS))
    back = run(ckptpipe.restore(str(workdir / "a"), processes=pids[::-1], settings=SETTINGS))
    assert len(back.facts.processes) == 3
    assert {world.process(pid).state for pid in pids} == {"RUNNING"}
    for target in targets:
        target.check()
    result = run(ckptpipe.save(processes=pids, to=workdir, name="b", settings=SETTINGS))
    assert {p.state for p in result.facts.processes} == {"RUNNING"}
    for target in targets:
        target.check()


def test_to_two_places_at_once_and_back_from_the_first(world: SimWorld, spawn: Spawn, workdir: Path) -> None:
    target = spawn(world)
    result = run(
        ckptpipe.save(pid=target.pid, to=[workdir / "one", workdir / "two"], name="a", settings=SETTINGS)
    )
    assert [sink.ok for sink in result.sinks] == [True, True]
    for place in ("one", "two"):
        run(ckptpipe.verify(str(workdir / place / "a")))
    target.check()


def test_zeros_do_not_cross_the_link(world: SimWorld, spawn: Spawn, workdir: Path) -> None:
    target = spawn(world, [(0, 256 * KIB)])
    result = run(ckptpipe.save(pid=target.pid, to=workdir, name="a", settings=SETTINGS))
    assert result.zero_chunks >= 0
    target.check()


def test_memory_that_is_no_multiple_of_the_chunk(world: SimWorld, spawn: Spawn, workdir: Path) -> None:
    settings = ckptpipe.Settings(chunk_bytes=100 * 4096, ring_bytes=4 << 20, workers=2)
    target = spawn(world)
    run(ckptpipe.save(pid=target.pid, to=workdir, name="a", leave="checkpointed", settings=settings))
    run(ckptpipe.restore(str(workdir / "a"), pid=target.pid, settings=SETTINGS))
    target.check()
