"""Tests on real GPUs (`make test-gpu`): programs that hold GPU memory, and ckptpipe in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.gpu.programs import ROOT, Program, environment

COUNT = """
import sys
from cuda.bindings import driver
sys.exit(0 if int(driver.cuInit(0)[0]) else int(driver.cuDeviceGetCount()[1]))
"""


@pytest.fixture(scope="session")
def gpus() -> int:
    """Number of GPUs; skips where there is none. Asked in another process: this one stays without CUDA."""
    ended = subprocess.run(
        [sys.executable, "-c", COUNT],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        check=False,
        timeout=60,
    )
    if not 0 < ended.returncode < 100 or b"Error" in ended.stderr:
        pytest.skip("no GPU here")
    return ended.returncode


@pytest.fixture
def start(gpus: int) -> Iterator[Callable[..., Program]]:
    """Starts programs; they are ended with the test, whatever became of them."""
    with ExitStack() as stack:

        def begin(name: str, *arguments: str, launch: tuple[str, ...] | None = None) -> Program:
            return stack.enter_context(Program(name, arguments, launch))

        yield begin


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    os.chmod(folder, 0o700)
    return folder
