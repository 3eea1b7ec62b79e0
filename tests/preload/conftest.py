"""A machine of two simulated GPUs for a test, with this process on it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simcuda import SimWorld

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-python: pip install 'ckptpipe[gpu]'")


@pytest.fixture
def world() -> Iterator[SimWorld]:
    with SimWorld(gpus=2) as world:
        yield world


@pytest.fixture
def driver(world: SimWorld) -> Iterator[ctypes.CDLL]:
    """libcuda of this process: attached to `world`, cuInit done, the primary contexts of both GPUs held."""
    from tests.simcuda.driver import hold_contexts

    with world.attached() as library:
        hold_contexts(len(world.gpus))
        yield library


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime directory of the test's own, for budgets."""
    path = tmp_path / "runtime"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    return path
