"""Custom storage, end to end on the simulated driver: contents proven by the targets' own sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.cuda.choice import CapturePlan
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
