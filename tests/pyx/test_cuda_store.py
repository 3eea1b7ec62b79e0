"""Stores that are checked where they arrive, and zeros that need no link, on the simulated driver."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import crc32c as reference
import pytest

from ckptpipe.pyx import cuda
from ckptpipe.pyx.staging import lease_buffer
from ckptpipe.pyx.workers import Scan
from tests.pyx.gpu import MIB, Machine, machine, pattern
from tests.pyx.loops import LoopFactory, each_loop, run, turns, until

SIZES = [1, 63, 64, 4097, MIB - 1, 2 * MIB + 5]
NBYTES = 256 << 10


@each_loop
@pytest.mark.parametrize("checksum", ["device", "host"])
def test_one_operation_stores_and_scans(loop_factory: LoopFactory, checksum: Any) -> None:
    data = pattern(max(SIZES))

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, len(data))
        with gpus.pinned(1, 4 * MIB) as ring:
            async with cuda.CopyQueue(0, gpus.context(0), checksum=checksum) as queue:
                with await ring.acquire() as lease:
                    with memoryview(lease) as view:
                        view[: len(data)] = data
                    for nbytes in SIZES:
                        part = data[:nbytes]
                        answer = await queue.store_and_scan(target, lease, nbytes)
                        assert answer == Scan(reference.crc32c(part), zero=False)
                        assert gpus.read(0, target, nbytes) == part
                    assert await queue.store_and_scan(target, lease, 0) == Scan(0, zero=True)
                    with memoryview(lease) as view:
                        view[:NBYTES] = bytes(NBYTES)
                    assert (await queue.store_and_scan(target, lease, NBYTES)).zero
                    assert lease.holds == 1
                assert queue.copied == sum(SIZES) + NBYTES

    with machine() as gpus:
        run(main(gpus), loop_factory)


def test_what_has_arrived_is_scanned_and_not_what_was_sent() -> None:
    """The copy waits on a link that stands still; the lease's bytes are what they are when it goes on."""

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, bytes(NBYTES))
        with gpus.pinned(1, NBYTES) as ring:
            async with cuda.CopyQueue(0, gpus.context(0)) as queue:
                with await ring.acquire() as lease:
                    scans = gpus.world.calls("cuLaunchKernel")
                    gpus.world.link(0, to_device=-1)
                    future = queue.store_and_scan(target, lease, NBYTES)
                    await until(lambda: gpus.world.calls("cuLaunchKernel") == scans + 1)
                    await turns(20)
                    assert not future.done(), "the kernel comes after the copy"
                    with memoryview(lease) as view:
                        view[:] = b"\7" * NBYTES
                    gpus.world.link(0, to_device=0)
                    assert await future == (reference.crc32c(b"\7" * NBYTES), False)

    with machine() as gpus:
        run(main(gpus))


@each_loop
@pytest.mark.parametrize("point", ["before", "after"])
@pytest.mark.parametrize(
    "call",
    ["cuMemcpyHtoDAsync", "cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernel", "cuEventSynchronize"],
)
def test_each_step_can_fail(loop_factory: LoopFactory, call: str, point: str) -> None:
    async def main(gpus: Machine) -> None:
        data = pattern(NBYTES)
        target = gpus.allocate(0, NBYTES)
        with gpus.pinned(1, NBYTES) as ring:
            async with cuda.CopyQueue(0, gpus.context(0)) as queue:
                lease = await ring.acquire()
                with memoryview(lease) as view:
                    view[:] = data
                gpus.world.fault(call, error="CUDA_ERROR_LAUNCH_FAILED", point=point)
                with pytest.raises(cuda.CudaError, match=f"^{call}: CUDA_ERROR_LAUNCH_FAILED"):
                    await queue.store_and_scan(target, lease, NBYTES)
                assert lease.holds == 1
                assert await queue.store_and_scan(target, lease, NBYTES) == (reference.crc32c(data), False)
                lease.release()

    with machine() as gpus:
        run(main(gpus), loop_factory)


@pytest.mark.parametrize("call", ["cuStreamWaitEvent", "cuLaunchKernel"])
def test_a_slot_is_not_given_back_while_its_copy_goes_on(call: str) -> None:
    """The kernel could not be launched; the copy was enqueued, and the GPU still reads the slot."""

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, NBYTES)
        with gpus.pinned(1, NBYTES) as ring:
            async with cuda.CopyQueue(0, gpus.context(0)) as queue:
                lease = await ring.acquire()
                fault = gpus.world.fault(call, error="CUDA_ERROR_OUT_OF_MEMORY")
                gpus.world.link(0, to_device=-1)
                future = queue.store_and_scan(target, lease, NBYTES)
                await asyncio.to_thread(fault.wait)
                lease.release()
                await turns(20)
                assert ring.free == 0
                assert not future.done()
                gpus.world.link(0, to_device=0)
                with pytest.raises(cuda.CudaError, match=call):
                    await future
                assert ring.free == 1

    with machine() as gpus:
        run(main(gpus))


@each_loop
def test_a_cancelled_one_holds_its_slot_until_the_gpu_is_done(loop_factory: LoopFactory) -> None:
    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, NBYTES)
        with gpus.pinned(2, NBYTES) as ring:
            async with cuda.CopyQueue(0, gpus.context(0), depth=1) as queue:
                leases = [await ring.acquire() for _ in range(2)]
                copies = gpus.world.calls("cuMemcpyHtoDAsync")
                gpus.world.link(0, to_device=-1)
                futures = [queue.store_and_scan(target, lease, NBYTES) for lease in leases]
                await until(lambda: gpus.world.calls("cuMemcpyHtoDAsync") == copies + 1)
                for future, lease in zip(futures, leases, strict=True):
                    future.cancel()
                    lease.release()
                await turns(20)
                assert ring.free == 0
                gpus.world.link(0, to_device=0)
                await queue.drain()
                assert ring.free == 2
                assert gpus.world.calls("cuMemcpyHtoDAsync") == copies + 1

    with machine() as gpus:
        run(main(gpus), loop_factory)


def test_two_streams_take_turns_and_a_given_one_takes_all() -> None:
    async def main(gpus: Machine) -> None:
        data = pattern(8 * NBYTES)
        target = gpus.allocate(0, len(data))
        with gpus.pinned(8, NBYTES) as ring:
            async with cuda.CopyQueue(0, gpus.context(0)) as queue:
                leases = [await ring.acquire() for _ in range(8)]
                for number, lease in enumerate(leases):
                    with memoryview(lease) as view:
                        view[:] = data[number * NBYTES : (number + 1) * NBYTES]
                answers = await asyncio.gather(
                    *(
                        queue.store_and_scan(target + number * NBYTES, lease, NBYTES)
                        for number, lease in enumerate(leases)
                    )
                )
                assert [answer.crc32c for answer in answers] == [
                    reference.crc32c(data[at : at + NBYTES]) for at in range(0, len(data), NBYTES)
                ]
                for lease in leases:
                    lease.release()
        assert gpus.read(0, target, len(data)) == data

    with machine() as gpus:
        run(main(gpus))


@each_loop
def test_zeros_need_no_link(loop_factory: LoopFactory) -> None:
    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, pattern(MIB))
        async with cuda.CopyQueue(0, gpus.context(0)) as queue:
            moved = gpus.world.moved(0)
            assert await queue.clear(target + 16, MIB - 32) is None
            assert await queue.clear(target, 0) is None
            assert gpus.world.moved(0) == moved
            assert queue.copied == 0
            kept = gpus.read(0, target, MIB)
            assert kept[16:-16] == bytes(MIB - 32)
            assert kept[:16] + kept[-16:] != bytes(32)
            gpus.world.fault("cuMemsetD8Async", error="CUDA_ERROR_UNKNOWN")
            with pytest.raises(cuda.CudaError, match="cuMemsetD8Async: CUDA_ERROR_UNKNOWN"):
                await queue.clear(target, MIB)

    with machine() as gpus:
        run(main(gpus), loop_factory)


def test_a_queue_that_was_not_closed_ends_its_checked_stores() -> None:
    memory = bytearray(pattern(NBYTES))

    async def main(gpus: Machine) -> tuple[cuda.CopyQueue, int]:
        target = gpus.allocate(0, NBYTES)
        queue = cuda.CopyQueue(0, gpus.context(0))
        with lease_buffer(memory) as lease:
            queue.store_and_scan(target, lease, NBYTES)
        return queue, target

    with machine() as gpus:
        queue, target = run(main(gpus))
        with pytest.warns(ResourceWarning, match="CopyQueue of GPU 0 was not closed"):
            del queue
            gc.collect()
        assert gpus.read(0, target, NBYTES) == memory
