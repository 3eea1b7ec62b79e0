"""How loads and file loaders end on the simulated driver: cancelled, closed, refused; nothing is left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import crc32c as reference
import pytest

from ckptpipe.pyx import cuda
from ckptpipe.pyx.memory import live_mappings
from tests.counted_file import held
from tests.pyx.gpu import Machine, machine, pattern
from tests.pyx.loads import PIECE, PLAN, Loading, load_threads
from tests.pyx.loops import LoopFactory, each_loop, run, turns, until


@each_loop
def test_a_cancelled_load_ends_with_the_pieces_that_the_gpu_has(
    tmp_path: Path, loop_factory: LoopFactory
) -> None:
    data = pattern(12 * PIECE)
    (tmp_path / "f").write_bytes(data)

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, len(data))
        async with Loading(gpus) as queue:
            with held(tmp_path / "f") as file:
                copies, scans = (gpus.world.calls(name) for name in ("cuMemcpyHtoDAsync", "cuLaunchKernel"))
                gpus.world.link(0, to_device=-1)
                first = queue.load(file, 0, len(data), target)
                second = queue.load(file, 0, len(data), target)
                await until(lambda: gpus.world.calls("cuMemcpyHtoDAsync") == copies + 4)
                first.cancel()
                second.cancel()
                await turns(20)
                assert (queue.inflight, file.holds) == (2, 3), "threads may still read the descriptor"
                gpus.world.link(0, to_device=0)
                await queue.drain()
                assert (queue.inflight, file.holds) == (0, 1)
                assert gpus.world.calls("cuMemcpyHtoDAsync") == copies + 4
                assert gpus.world.calls("cuLaunchKernel") == scans
                assert await queue.load(file, 0, len(data), target) == (reference.crc32c(data), False)

    with machine() as gpus:
        run(main(gpus), loop_factory)


@each_loop
def test_closing_waits_for_loads_also_when_cancelled(tmp_path: Path, loop_factory: LoopFactory) -> None:
    data = pattern(12 * PIECE)
    (tmp_path / "f").write_bytes(data)

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, len(data))
        queue = cuda.CopyQueue(0, gpus.context(0))
        loader = await cuda.FileLoader.open(queue, gpus.context(0), PLAN)
        with held(tmp_path / "f") as file:
            copies = gpus.world.calls("cuMemcpyHtoDAsync")
            gpus.world.link(0, to_device=-1)
            future = queue.load(file, 0, len(data), target)
            await until(lambda: gpus.world.calls("cuMemcpyHtoDAsync") == copies + 4)
            closing = asyncio.create_task(loader.aclose())
            await turns(20)
            closing.cancel()
            await turns(20)
            assert not closing.done()
            gpus.world.link(0, to_device=0)
            with pytest.raises(asyncio.CancelledError):
                await closing
            assert await future == (reference.crc32c(data), False)
            with pytest.raises(RuntimeError, match="FileLoader"):
                queue.load(file, 0, 1, target)
        await loader.aclose()
        await queue.aclose()

    with machine() as gpus:
        run(main(gpus), loop_factory)


def test_a_queue_closes_without_its_loader(tmp_path: Path) -> None:
    data = pattern(6 * PIECE)
    (tmp_path / "f").write_bytes(data)

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, len(data))
        queue = cuda.CopyQueue(0, gpus.context(0))
        loader = await cuda.FileLoader.open(queue, gpus.context(0), PLAN)
        with held(tmp_path / "f") as file:
            future = queue.load(file, 0, len(data), target)
            await queue.aclose()
            assert await future == (reference.crc32c(data), False)
        assert cuda.pinned_bytes() == loader.plan.nbytes
        await loader.aclose()
        assert cuda.pinned_bytes() == 0

    with machine() as gpus:
        run(main(gpus))


def test_everything_is_given_back() -> None:
    async def main(gpus: Machine) -> None:
        world = gpus.world
        ends = {"cuStreamCreate": "cuStreamDestroy", "cuEventCreate": "cuEventDestroy",
                "cuMemHostRegister": "cuMemHostUnregister"}  # fmt: skip
        mappings = live_mappings()
        async with cuda.CopyQueue(0, gpus.context(0)) as queue:
            before = {name: world.calls(name) for pair in ends.items() for name in pair}
            loader = await cuda.FileLoader.open(
                queue, gpus.context(0), cuda.LoadPlan(3, 6, PIECE, PIECE // 4)
            )
            assert load_threads() == 3
            assert cuda.pinned_bytes() == 6 * PIECE
            with pytest.raises(RuntimeError, match="already"):
                await cuda.FileLoader.open(queue, gpus.context(0), PLAN)
            await loader.aclose()
            await loader.aclose()
            await until(lambda: load_threads() == 0)
            made = {name: world.calls(name) - count for name, count in before.items()}
            assert made["cuStreamCreate"] == 1
            assert made["cuEventCreate"] == 6
            assert all(made[make] == made[end] for make, end in ends.items())
        assert (cuda.pinned_bytes(), live_mappings()) == (0, mappings)

    with machine() as gpus:
        run(main(gpus))


@pytest.mark.parametrize(
    ("call", "nth"),
    [
        ("cuCtxPushCurrent", 1),  # to pin, then to open
        ("cuCtxPushCurrent", 2),
        ("cuMemHostRegister", 1),
        ("cuStreamCreate", 1),
        ("cuEventCreate", 1),
        ("cuEventCreate", 4),
    ],
)
def test_a_refusal_at_any_step_of_the_set_up_leaves_nothing(call: str, nth: int) -> None:
    async def main(gpus: Machine) -> None:
        world, mappings = gpus.world, live_mappings()
        pairs = (("cuStreamCreate", "cuStreamDestroy"), ("cuEventCreate", "cuEventDestroy"))
        async with cuda.CopyQueue(0, gpus.context(0)) as queue:
            before = {name: world.calls(name) for pair in pairs for name in pair}
            fault = world.fault(call, nth=nth, error="CUDA_ERROR_OUT_OF_MEMORY")
            with pytest.raises(cuda.CudaError, match=f"{call}: CUDA_ERROR_OUT_OF_MEMORY"):
                await cuda.FileLoader.open(queue, gpus.context(0), PLAN)
            fault.cancel()
            counts = {name: world.calls(name) - count for name, count in before.items()}
            for make, end in pairs:
                assert counts[make] - (make == call) == counts[end]
            assert (cuda.pinned_bytes(), live_mappings(), load_threads()) == (0, mappings, 0)
            loader = await cuda.FileLoader.open(queue, gpus.context(0), PLAN)
            await loader.aclose()

    with machine() as gpus:
        run(main(gpus))


def test_a_cancelled_opening_leaves_nothing() -> None:
    async def main(gpus: Machine) -> None:
        async with cuda.CopyQueue(0, gpus.context(0)) as queue:
            fault = gpus.world.fault("cuMemHostRegister", hold=True)
            opening = asyncio.create_task(cuda.FileLoader.open(queue, gpus.context(0), PLAN))
            await asyncio.to_thread(fault.wait)
            opening.cancel()
            await turns(10)
            assert not opening.done()
            fault.release()
            with pytest.raises(asyncio.CancelledError):
                await opening
            assert (cuda.pinned_bytes(), load_threads()) == (0, 0)

    with machine() as gpus:
        run(main(gpus))
