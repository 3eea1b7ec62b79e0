"""A simulated machine for a test, this process on it, and a runtime directory of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.simcuda import SimWorld, Target

if TYPE_CHECKING:
    from tests.pipeline.cuda.device_arrays import Allocate, Memory
    from tests.preload.launched import Launched

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-python: pip install 'ckptpipe[gpu]'")


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder / "ckptpipe"


@pytest.fixture
def make_world() -> Iterator[Callable[..., SimWorld]]:
    """``make_world(gpus=…)``: a machine, on which this process is too until the test ends."""
    stack = []

    def make(**options: object) -> SimWorld:
        world = SimWorld(**options)  # type: ignore[arg-type]
        attached = world.attached()
        attached.__enter__()
        stack.append((world, attached))
        return world

    yield make
    while stack:
        world, attached = stack.pop()
        attached.__exit__(None, None, None)
        world.close()


@pytest.fixture
def world(make_world: Callable[..., SimWorld]) -> SimWorld:
    return make_world(gpus=2)


@pytest.fixture
def spawn() -> Iterator[Callable[..., Target]]:
    """``spawn(world, buffers)``: a target that ends with the test, whatever state it is in.

    The C program starts ten times faster than the one in Python (``program="sums"``).
    """
    targets: list[Target] = []

    def start(world: SimWorld, buffers: object = ((0, 3 << 20), (1, 1 << 20)), **options: object) -> Target:
        options.setdefault("program", str(world.library / "plain_target"))
        targets.append(Target(world.environment(), buffers, **options))  # type: ignore[arg-type]
        return targets[-1]

    yield start
    for target in targets:
        target.kill()


@pytest.fixture
def launch(world: SimWorld) -> Iterator[Callable[..., Launched]]:
    """``launch(options, buffers, …)``: a launched target that ends with the test."""
    from tests.preload.launched import Launched

    started: list[Launched] = []

    def start(*arguments: Any, **options: Any) -> Launched:
        started.append(Launched(world, *arguments, **options))
        return started[-1]

    yield start
    for each in started:
        each.__exit__()


@pytest.fixture
def allocate(world: SimWorld) -> Iterator[Allocate]:
    """Device memory that is freed at the end: ``allocate(ordinal, data)``."""
    from tests.pipeline.cuda.device_arrays import Memory

    held: list[Memory] = []

    def make(ordinal: int, data: bytes) -> Memory:
        held.append(Memory(ordinal, data))
        return held[-1]

    yield make
    for memory in held:
        memory.free()
