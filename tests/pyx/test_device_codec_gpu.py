"""Device codec on a real GPU with the real nvCOMP; skips where one is missing. Each test is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptpipe.pyx import cuda, nvcomp

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _real() -> None:
    try:
        if cuda.load().simulated:
            pytest.skip("this process is on a simulated GPU")
        nvcomp.find()
    except (cuda.NoDriverError, nvcomp.NvcompUnavailableError) as error:
        pytest.skip(str(error))


def bench(*arguments: str) -> str:
    hidden = ("SIMCUDA_DIR", nvcomp.ENVIRONMENT)
    ended = subprocess.run(
        [sys.executable, "-m", "bench.gpu_codec", "--no-files", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in hidden},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_every_kind_of_data_comes_back_and_zlib_reads_deflate() -> None:
    assert "all are right" in bench("--only", "check")


def test_rates() -> None:
    """None is asserted: they are printed (pytest -s)."""
    plans = ("deflate:0 planes2", "ans:f16")
    print(bench("--only", "encode", "decode", "--chunks", "8", "--scratch", "512", "--plans", *plans))
