"""The benchmark of launched processes runs, small, on the simulated driver: tables are whole, sums are compared."""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from bench import (
    gpu_launch,
    gpu_launch_early,
    gpu_launch_image,
    gpu_launch_refill,
    gpu_launch_workers,
    huge_pages,
    launch_pieces,
    launched,
)
from bench.budget import Budget
from bench.launched import Ask
from ckptpipe.pipeline.launch import LaunchOptions, PoolSize
from tests.preload.launched import MIB
from tests.simcuda import SimWorld, Target
from tests.test_bench import check

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-python: pip install 'ckptpipe[gpu]'")
CHOSEN = argparse.Namespace(
    sizes=[8 / 1024],
    cycles=1,
    workers=[2],
    pages=["small", "anonymous"],
    early_jobs=[1],
    disk="",
    disk_most=1.0,
    rest=0.0,
    seconds=math.inf,
)


@pytest.fixture(autouse=True)
def _simulated(tmp_path: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("CKPTPIPE_BENCH_DIR", str(workdir))
    monkeypatch.setattr(CHOSEN, "disk", str(workdir))
    for module in (gpu_launch, gpu_launch_image, gpu_launch_early, gpu_launch_workers):
        monkeypatch.setattr(module, "gpu_name", lambda: "Simulated GPU")
    monkeypatch.setattr(gpu_launch_refill, "reserved", lambda nbytes: nullcontext(False))
    monkeypatch.setattr(gpu_launch_image, "disk_rate", lambda folder, gib, block: 1.0)
    pool = LaunchOptions(pool=PoolSize(nbytes=64 * MIB), workers=2)
    monkeypatch.setattr(gpu_launch, "pool_of", lambda gib, **options: pool)
    with SimWorld(gpus=1) as world, world.attached():

        @contextmanager
        def process(gib: float, variables: Mapping[str, str], tensors: int = 8) -> Iterator[tuple[int, Ask]]:
            with Target(
                world.environment(variables),
                [(0, int(gib * (1 << 30)) // 2)] * 2,
                program=str(world.library / "plain_target"),
            ) as target:

                def ask(line: str) -> str:
                    if line == "step":
                        return "stepped"
                    target.check()
                    return "right"

                yield target.pid, ask

        monkeypatch.setattr(launched, "process", process)
        yield


@pytest.mark.parametrize(
    ("part", "rows"), [("speed", 3), ("workers", 2), ("pages", 3), ("save", 5), ("early", 21), ("refill", 10)]
)
def test_part(part: str, rows: int) -> None:
    answer = gpu_launch.PARTS[part](CHOSEN)
    check(answer, rows)
    for row in answer.table.records():
        assert all(value > 0 for key, value in row.items() if key.endswith(" s") and value is not None), row


@pytest.mark.parametrize(
    ("part", "rows", "left"),
    [
        ("speed", 1, "launch at 0.0078125 GiB"),
        ("workers", 1, "--workers 2"),
        ("pages", 1, "small pages"),
        ("save", 0, "null, driver unknown"),
        ("early", 1, "filled first"),
        ("refill", 5, "collapsed"),
    ],
)
def test_part_without_time(monkeypatch: pytest.MonkeyPatch, part: str, rows: int, left: str) -> None:
    """What was begun is brought to its end; what was not is named."""
    monkeypatch.setattr(CHOSEN, "seconds", 0.0)
    answer = gpu_launch.PARTS[part](CHOSEN)
    assert len(answer.table.rows) == rows
    assert any(left in note and "to keep within" in note for note in answer.notes)


def test_a_budget_saves_cycles_before_variants() -> None:
    now = [0.0]
    budget = Budget(100.0, lambda: now[0])
    made: list[tuple[str, int]] = []

    async def main() -> None:
        for name, seconds in budget.variants(
            [("a", 10), ("b", 10), ("c", 40), ("d", 10)], name=lambda e: e[0]
        ):

            async def once(seconds: int = seconds) -> None:
                now[0] += seconds

            made.append((name, len(await budget.cycles(5, once))))

    asyncio.run(main())
    assert made == [("a", 5), ("b", 3), ("c", 1)]
    assert now[0] == 120.0, "what was begun ended, though it took longer than those before it"
    assert budget.notes == [
        "fewer cycles of 2 variants, to keep within 100 s",
        "left out, to keep within 100 s: d",
    ]


def test_huge_pages_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "nr_hugepages"
    file.write_text("3\n")
    monkeypatch.setattr(huge_pages, "RESERVED", file)
    with huge_pages.reserved(5 << 20) as enough:
        assert enough and file.read_text() == "6"
    assert file.read_text() == "3\n"


def test_ways_of_copying() -> None:
    answer = gpu_launch_workers.compare(40 / 1024, [2, 3], 1, [], True)
    check(answer, 2 + len(gpu_launch_workers.ways([2, 3])))


def test_pieces() -> None:
    check(launch_pieces.compare(2, [1, 3], 1, 1), 12)
