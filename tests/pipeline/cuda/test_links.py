"""Contexts, queues and pinned rings: one a GPU, on its NUMA node, all given back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ckptpipe.pipeline import context as pipeline_context
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda import links as links_module
from ckptpipe.pipeline.cuda import topology
from ckptpipe.pipeline.cuda.driver import CudaDriver
from ckptpipe.pipeline.cuda.links import Links
from ckptpipe.pyx.cuda import CudaError, pinned_bytes
from ckptpipe.pyx.staging import StagingRing
from tests.pipeline.cuda.runs import SETTINGS, Spawn, runs, save
from tests.pipeline.runs import in_context
from tests.simcuda import SimWorld


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """A machine with a GPU on each of two NUMA nodes; on which of them rings were made."""
    asked: list[int | None] = []

    def ring(*arguments: Any, numa_node: int | None, **options: Any) -> StagingRing:
        asked.append(numa_node)
        return StagingRing(*arguments, **options)

    monkeypatch.setattr(pipeline_context, "StagingRing", ring)
    monkeypatch.setattr(links_module, "numa_nodes", lambda: (0, 1))

    def place_of(pci: str) -> topology.Place:
        return topology.Place(pci, topology.Link(), 0 if pci.startswith("0000:10") else 1, "")

    monkeypatch.setattr(topology, "place_of", place_of)
    return asked


def test_one_ring_where_there_is_one_node(world: SimWorld) -> None:
    async def body(context: GraphContext) -> None:
        async with await CudaDriver.open() as driver, Links(driver) as links:
            gpus = await driver.devices()
            await links.open(context, gpus)
            assert links[0].ring is links[1].ring is context.ring
            assert pinned_bytes() >= context.ring.nbytes
            await links.open(context, gpus)
            assert world.calls("cuDevicePrimaryCtxRetain") == 2
        assert pinned_bytes() == 0
        assert [world.used(gpu) for gpu in range(2)] == [0, 0], "the contexts are given back"

    in_context(body, SETTINGS)


def test_a_ring_on_each_node(world: SimWorld, two_nodes: list[int | None]) -> None:
    async def body(context: GraphContext) -> None:
        async with await CudaDriver.open() as driver, Links(driver) as links:
            await links.open(context, await driver.devices())
            assert links[0].ring is context.ring and links[1].ring is not context.ring
            assert links[0].ring.slots == links[1].ring.slots == 8
            assert links[0].ring.nbytes + links[1].ring.nbytes == (4 << 20)
            assert sorted(two_nodes, key=str) == [0, 1]

    in_context(body, SETTINGS)


def test_a_save_with_a_ring_on_each_node(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, two_nodes: list[int | None]
) -> None:
    target = spawn(world)
    save(target, workdir)
    runs(world, target, runtime)


@pytest.mark.parametrize("call", ["cuDevicePrimaryCtxRetain", "cuMemHostRegister", "cuStreamCreate"])
@pytest.mark.parametrize("nth", [1, 2])
def test_what_fails_on_the_way_gives_everything_back(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, call: str, nth: int
) -> None:
    target = spawn(world)
    if call == "cuMemHostRegister" and nth == 2:
        nth = 1
    world.fault(call, pid=os.getpid(), nth=nth, error="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(CudaError, match=r"OUT_OF_MEMORY"):
        save(target, workdir)
    assert world.calls("cuCheckpointProcessLock") == 0
    assert pinned_bytes() == 0
    runs(world, target, runtime)
