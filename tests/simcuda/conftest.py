"""A machine of two simulated GPUs for a test, with this process on it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from tests.simcuda import SimWorld


@pytest.fixture
def world() -> Iterator[SimWorld]:
    with SimWorld(gpus=2) as world:
        yield world


@pytest.fixture
def library(world: SimWorld) -> Iterator[ctypes.CDLL]:
    """libcuda of this process: attached to `world`, cuInit done, primary contexts of both GPUs held, GPU 0 current."""
    from tests.simcuda.driver import hold_contexts

    with world.attached() as library:
        hold_contexts(len(world.gpus))
        yield library
