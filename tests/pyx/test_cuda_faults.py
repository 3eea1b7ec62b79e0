"""Copy queue when the driver refuses, when tasks are cancelled, and when it is closed in the middle."""

from __future__ import annotations

import asyncio
from typing import Any

import crc32c as reference
import pytest

from ckptpipe.pyx import cuda, cuda_kernel
from ckptpipe.pyx.staging import outstanding
from tests.pyx.gpu import MIB, Machine, machine, pattern
from tests.pyx.loops import LoopFactory, each_loop, run, turns, until

NBYTES = 256 << 10


@each_loop
@pytest.mark.parametrize("point", ["before", "after"])
@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuEventRecord"])
def test_one_refused_copy_fails_alone(loop_factory: LoopFactory, call: str, point: str) -> None:
    async def main(gpus: Machine) -> None:
        data = pattern(8 * NBYTES)
        base = gpus.allocate(0, data)
        with gpus.pinned(8, NBYTES) as ring:
            async with cuda.CopyQueue(0, gpus.context(0), checksum="host") as queue:
                leases = [await ring.acquire() for _ in range(8)]
                gpus.world.fault(call, nth=3, error="CUDA_ERROR_ILLEGAL_ADDRESS", point=point)
                answers = await asyncio.gather(
                    *(queue.fetch(lease, NBYTES, base + NBYTES * i) for i, lease in enumerate(leases)),
                    return_exceptions=True,
                )
                failure = answers.pop(2)
                assert isinstance(failure, cuda.CudaError)
                assert (failure.code, failure.name, failure.call) == (700, "CUDA_ERROR_ILLEGAL_ADDRESS", call)
                assert "GPU 0" in str(failure)
                assert f"{base + 2 * NBYTES:#x}" in str(failure)
                assert "simulated" in str(failure)
                parts = [data[i * NBYTES : (i + 1) * NBYTES] for i in range(8) if i != 2]
                assert answers == [(reference.crc32c(part), False) for part in parts]
                assert [lease.holds for lease in leases] == [1] * 8
                for lease in leases:
                    lease.release()

    with machine() as gpus:
        run(main(gpus), loop_factory)


@pytest.mark.parametrize("elide", [False, True])
@pytest.mark.parametrize(
    "call", ["cuLaunchKernel", "cuMemcpyDtoHAsync", "cuEventRecord", "cuEventSynchronize"]
)
def test_each_step_of_a_copy_with_a_device_checksum_can_fail(call: str, elide: bool) -> None:
    async def main(gpus: Machine) -> None:
        data = pattern(NBYTES)
        address = gpus.allocate(0, data)
        with gpus.pinned(1, NBYTES) as ring:
            async with cuda.CopyQueue(0, gpus.context(0), elide_zeros=elide) as queue:
                lease = await ring.acquire()
                gpus.world.fault(call, error="CUDA_ERROR_LAUNCH_FAILED")
                with pytest.raises(cuda.CudaError, match=f"^{call}: CUDA_ERROR_LAUNCH_FAILED .*dmesg"):
                    await queue.fetch(lease, NBYTES, address)
                assert lease.holds == 1
                assert await queue.fetch(lease, NBYTES, address) == (reference.crc32c(data), False)
                lease.release()

    with machine() as gpus:
        run(main(gpus))


def test_work_that_fails_on_the_device_fails_its_futures() -> None:
    """An error that the call does not know of yet: the event brings it; the stream is lost from then on."""

    async def main(gpus: Machine) -> None:
        address = gpus.allocate(0, pattern(NBYTES))
        with gpus.pinned(3, NBYTES) as ring:
            async with cuda.CopyQueue(0, gpus.context(0)) as queue:
                leases = [await ring.acquire() for _ in range(3)]
                assert not (await queue.fetch(leases[0], NBYTES, address)).zero
                error = "CUDA_ERROR_ECC_UNCORRECTABLE"
                gpus.world.fault("cuMemcpyDtoHAsync", error=error, scope="stream")
                answers = await asyncio.gather(
                    *(queue.fetch(lease, NBYTES, address) for lease in leases), return_exceptions=True
                )
                for answer in answers:
                    assert isinstance(answer, cuda.CudaError)
                    assert answer.name == error
                    assert "reset" in answer.cure
                for lease in leases:
                    lease.release()

    with machine() as gpus:
        run(main(gpus))


@each_loop
def test_stores_and_scans_fail_alone_too(loop_factory: LoopFactory) -> None:
    async def main(gpus: Machine) -> None:
        data = pattern(NBYTES)
        address = gpus.allocate(0, data)
        with gpus.pinned(1, NBYTES) as ring:
            for checksum in ("device", "host"):
                async with cuda.CopyQueue(0, gpus.context(0), checksum=checksum) as queue:
                    lease = await ring.acquire()
                    gpus.world.fault("cuMemcpyHtoDAsync", error="CUDA_ERROR_UNKNOWN")
                    with pytest.raises(cuda.CudaError, match="cuMemcpyHtoDAsync: CUDA_ERROR_UNKNOWN"):
                        await queue.store(address, lease, NBYTES)
                    step = "cuLaunchKernel" if checksum == "device" else "cuMemHostAlloc"
                    gpus.world.fault(step, error="CUDA_ERROR_OUT_OF_MEMORY")
                    with pytest.raises(cuda.CudaError, match=f"{step}: CUDA_ERROR_OUT_OF_MEMORY"):
                        await queue.scan(address, NBYTES)
                    assert await queue.scan(address, NBYTES) == (reference.crc32c(data), False)
                    lease.release()

    with machine() as gpus:
        run(main(gpus), loop_factory)


@each_loop
def test_a_cancelled_copy_holds_its_slot_until_the_gpu_is_done_with_it(loop_factory: LoopFactory) -> None:
    async def main(gpus: Machine) -> None:
        data = pattern(NBYTES)
        address = gpus.allocate(0, data)
        with gpus.pinned(3, NBYTES) as ring:
            async with cuda.CopyQueue(0, gpus.context(0), depth=1) as queue:
                running, waiting = await ring.acquire(), await ring.acquire()
                copies = gpus.world.calls("cuMemcpyDtoHAsync")
                with gpus.stalled(0):
                    first = queue.fetch(running, NBYTES, address)
                    second = queue.fetch(waiting, NBYTES, address)
                    await until(lambda: gpus.world.calls("cuMemcpyDtoHAsync") == copies + 1)
                    first.cancel()
                    second.cancel()
                    running.release()
                    waiting.release()
                    await turns(20)
                    assert ring.free == 1  # the GPU writes into one; the other is behind it in the queue
                    assert queue.inflight == 2
                await queue.drain()
                assert ring.free == 3
                # the one that had not begun never did
                assert gpus.world.calls("cuMemcpyDtoHAsync") == copies + 1
                assert queue.copied <= 2 * NBYTES

    with machine() as gpus:
        run(main(gpus), loop_factory)


@each_loop
@pytest.mark.parametrize("checksum", ["device", "host"])
def test_closing_waits_for_what_is_in_flight_also_when_cancelled(
    loop_factory: LoopFactory, checksum: Any
) -> None:
    async def main(gpus: Machine) -> None:
        data = pattern(NBYTES)
        address = gpus.allocate(0, data)
        with gpus.pinned(6, NBYTES) as ring:
            queue = cuda.CopyQueue(0, gpus.context(0), depth=2, checksum=checksum)
            leases = [await ring.acquire() for _ in range(6)]
            with gpus.stalled(0):
                futures = [queue.fetch(lease, NBYTES, address) for lease in leases]
                closings = [asyncio.create_task(queue.aclose()) for _ in range(2)]
                await turns()
                with pytest.raises(RuntimeError, match="closed"):
                    queue.scan(address, NBYTES)
                closings[0].cancel()
                await turns(20)
                assert not any(closing.done() for closing in closings)
                assert cuda.live_queues() == 1
            with pytest.raises(asyncio.CancelledError):
                await closings[0]
            await closings[1]
            assert queue.closed
            assert [future.result() for future in futures] == [(reference.crc32c(data), False)] * 6
            for lease in leases:
                lease.release()

    with machine() as gpus:
        run(main(gpus), loop_factory)


@each_loop
def test_draining_goes_on_when_cancelled(loop_factory: LoopFactory) -> None:
    async def main(gpus: Machine) -> None:
        address = gpus.allocate(0, pattern(NBYTES))
        with gpus.pinned(1, NBYTES) as ring:
            async with cuda.CopyQueue(0, gpus.context(0)) as queue:
                await queue.drain()
                lease = await ring.acquire()
                with gpus.stalled(0):
                    future = queue.fetch(lease, NBYTES, address)
                    draining = asyncio.create_task(queue.drain())
                    await turns()
                    draining.cancel()
                    await turns(10)
                    assert not draining.done()
                with pytest.raises(asyncio.CancelledError):
                    await draining
                assert future.done()
                lease.release()

    with machine() as gpus:
        run(main(gpus), loop_factory)


SET_UP = [
    "cuCtxPushCurrent",
    "cuStreamCreate",
    "cuEventCreate",
    "cuMemAlloc",
    "cuMemsetD8Async",
    "cuMemHostAlloc",
    "cuMemHostGetDevicePointer",
]


@pytest.mark.parametrize("call", SET_UP)
def test_no_memory_at_any_step_of_the_set_up_leaves_nothing(call: str) -> None:
    async def main(gpus: Machine) -> None:
        world, holds = gpus.world, outstanding()
        used = world.used(0)
        ends = {"cuStreamCreate": "cuStreamDestroy", "cuEventCreate": "cuEventDestroy"}
        refused = 0
        for nth in (1,) if call == "cuCtxPushCurrent" or call.startswith("cuMem") else (1, 2, 3):
            fault = world.fault(call, nth=nth, error="CUDA_ERROR_OUT_OF_MEMORY")
            with pytest.raises(
                cuda.CudaError, match=f"{call}: CUDA_ERROR_OUT_OF_MEMORY.*copy queue of GPU 0"
            ):
                cuda.CopyQueue(0, gpus.context(0))
            refused += fault.fired
        assert refused
        for make, end in ends.items():
            assert world.calls(make) - (refused if make == call else 0) == world.calls(end)
        assert (cuda.live_queues(), outstanding(), world.used(0)) == (0, holds, used)
        async with cuda.CopyQueue(0, gpus.context(0)):
            pass
        assert world.used(0) == used

    with machine() as gpus:
        run(main(gpus))


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction"])
def test_a_kernel_that_the_driver_does_not_take_means_checksums_by_the_cpu(call: str) -> None:
    async def main(gpus: Machine) -> None:
        data = pattern(NBYTES)
        address = gpus.allocate(0, data)
        gpus.world.fault(call, error=222)
        with gpus.pinned(1, NBYTES) as ring:
            async with cuda.CopyQueue(0, gpus.context(0), elide_zeros=True) as queue:
                assert (queue.requested, queue.checksum, queue.elide_zeros) == ("device", "host", False)
                assert call in queue.why
                assert "CUDA_ERROR_UNSUPPORTED_PTX_VERSION" in queue.why
                with await ring.acquire() as lease:
                    assert await queue.fetch(lease, NBYTES, address) == (reference.crc32c(data), False)
                assert await queue.scan(address, NBYTES) == (reference.crc32c(data), False)

    with machine() as gpus:
        run(main(gpus))


def test_no_nvrtc_means_checksums_by_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nowhere:
        def read_bytes(self) -> bytes:
            raise cuda_kernel.KernelUnavailableError(
                "no checksum kernel for the GPU: no NVRTC", cure="get one"
            )

    async def main(gpus: Machine) -> None:
        monkeypatch.setattr(cuda_kernel, "SOURCE", Nowhere())
        queue = await cuda.CopyQueue.create(0, gpus.context(0))
        assert (queue.checksum, queue.why) == ("host", "no checksum kernel for the GPU: no NVRTC; get one")
        assert cuda.prepare(0) == queue.why
        await queue.aclose()
        monkeypatch.undo()
        assert cuda.prepare(0) == ""

    with machine() as gpus:
        run(main(gpus))


def test_a_memory_range_that_is_not_there() -> None:
    async def main(gpus: Machine) -> None:
        address = gpus.allocate(0, MIB)
        with gpus.pinned(1) as ring:
            async with cuda.CopyQueue(0, gpus.context(0), checksum="host") as queue:
                with await ring.acquire() as lease:
                    with pytest.raises(cuda.CudaError) as caught:
                        await queue.fetch(lease, MIB, address + (1 << 40))
                    assert caught.value.code in (1, 700)

    with machine() as gpus:
        run(main(gpus))
