"""The benchmark of loading files into a GPU runs, small, on the simulated driver. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simcuda import SimWorld

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-python: pip install 'ckptpipe[gpu]'")
ROOT = Path(__file__).resolve().parent.parent

GRID = """
import json, sys
from bench import gpu_load
from ckptpipe.pyx import cuda
plans = [cuda.LoadPlan(2, buffers, 1 << 20, 256 << 10) for buffers in (2, 3)]
answer = gpu_load.measure_grid(1 / 8, sys.argv[1], plans, repeat=1)
print(json.dumps(gpu_load.best_of(answer, each=1).as_json()))
"""


def on_simulation(*arguments: str) -> str:
    with SimWorld(gpus=1) as world:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=world.environment(),
            cwd=ROOT,
            check=False,
            capture_output=True,
            text=True,
            timeout=110,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_each_kind_of_row_is_there_and_the_files_are_gone(tmp_path: Path) -> None:
    answer = json.loads(on_simulation("-c", GRID, str(tmp_path)))
    assert [row["what"] for row in answer["rows"]] == ["load", "load, source in cache", "pread alone"]
    assert all(row["GB/s"] > 0 for row in answer["rows"])
    assert answer["parameters"]["gib"] == 1 / 8
    assert list(tmp_path.iterdir()) == []


def test_each_step_of_a_start_is_timed() -> None:
    answer = json.loads(on_simulation("-c", "from bench.gpu_load import print_starts; print_starts()"))
    assert answer["cold"].keys() == answer["warm"].keys()
    assert len(answer["cold"]) >= 12
