"""Custom storage through the driver's own structures: a target's memory out and back, byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import crc32c as reference
import pytest

from ckptpipe.pyx import cuda
from tests.pyx.gpu import MIB, Machine, done, machine
from tests.pyx.loops import LoopFactory, each_loop, run
from tests.simcuda import Target


@contextmanager
def target(gpus: Machine, *buffers: tuple[int, int]) -> Iterator[Target]:
    """A process on the machine, locked."""
    with Target(gpus.world.environment(), buffers) as process:
        process.check()
        done(gpus.driver.cuCheckpointProcessLock(process.pid, None))
        yield process


def state(gpus: Machine, pid: int) -> str:
    return gpus.world.process(pid).state


@each_loop
def test_a_process_on_two_gpus_goes_out_and_back(loop_factory: LoopFactory) -> None:
    async def main(gpus: Machine, process: Target) -> None:
        operation = await asyncio.to_thread(cuda.checkpoint_custom, process.pid)
        assert state(gpus, process.pid) == "CHECKPOINTING"
        assert operation.handle != 0
        assert len(operation.devices) == 2
        queues = [
            cuda.CopyQueue(gpu, gpus.context(gpu), stream=device.stream)
            for gpu, device in enumerate(operation.devices)
        ]
        saved: list[list[bytes]] = []
        with gpus.pinned(4) as ring:
            for queue, device in zip(queues, operation.devices, strict=True):
                assert device.nbytes >= 3 * MIB
                parts = []
                for offset in range(0, device.nbytes, MIB):
                    nbytes = min(MIB, device.nbytes - offset)
                    with await ring.acquire() as lease:
                        scan = await queue.fetch(lease, nbytes, device.device_address + offset)
                        parts.append(bytes(memoryview(lease)[:nbytes]))
                        assert scan.crc32c == reference.crc32c(parts[-1])
                saved.append(parts)
            for queue in queues:
                await queue.aclose()
            await asyncio.to_thread(cuda.operation_complete, operation.handle)
            assert state(gpus, process.pid) == "CHECKPOINTED"
            pairs = [(gpu.uuid_bytes, gpu.uuid_bytes) for gpu in gpus.world.gpus]
            operation = await asyncio.to_thread(cuda.restore_custom, process.pid, pairs)
            assert state(gpus, process.pid) == "RESTORING"
            for gpu, device in enumerate(operation.devices):
                async with cuda.CopyQueue(gpu, gpus.context(gpu), stream=device.stream) as queue:
                    address = device.device_address
                    for part in saved[gpu]:
                        with await ring.acquire() as lease:
                            memoryview(lease)[: len(part)] = part
                            await queue.store(address, lease, len(part))
                        address += len(part)
            await asyncio.to_thread(cuda.operation_complete, operation.handle)
        assert state(gpus, process.pid) == "LOCKED"
        done(gpus.driver.cuCheckpointProcessUnlock(process.pid, None))
        process.check()

    with machine() as gpus, target(gpus, (0, 3 * MIB), (1, 4 * MIB)) as process:
        run(main(gpus, process), loop_factory)


def test_uuids_are_sixteen_bytes() -> None:
    with machine(1), pytest.raises(ValueError, match="16 bytes"):
        cuda.restore_custom(1, [(b"short", bytes(16))])


def test_each_call_fails_with_the_process_and_the_drivers_name() -> None:
    with machine() as gpus, target(gpus, (0, MIB)) as process:
        gpus.world.fault("cuCheckpointProcessCheckpoint", error="CUDA_ERROR_OPERATING_SYSTEM")
        with pytest.raises(cuda.CudaError, match=f"custom storage of process {process.pid}") as caught:
            cuda.checkpoint_custom(process.pid)
        assert caught.value.name == "CUDA_ERROR_OPERATING_SYSTEM"
        assert caught.value.call == "cuCheckpointProcessCheckpoint"
        with pytest.raises(cuda.CudaError) as caught:
            cuda.restore_custom(process.pid, [])
        assert caught.value.name == "CUDA_ERROR_ILLEGAL_STATE"
        operation = cuda.checkpoint_custom(process.pid)
        gpus.world.fault("cuCheckpointOperationComplete", error="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
        with pytest.raises(cuda.CudaError, match="end the capture"):
            cuda.operation_complete(operation.handle)
        cuda.operation_complete(operation.handle)
        with pytest.raises(cuda.CudaError):  # exactly once
            cuda.operation_complete(operation.handle)


def test_a_process_that_is_not_there() -> None:
    with machine(1), pytest.raises(cuda.CudaError, match="process 2147483000"):
        cuda.checkpoint_custom(2147483000)


def test_without_the_contexts_of_the_targets_gpus() -> None:
    with machine() as gpus, target(gpus, (1, MIB)) as process:
        done(gpus.driver.cuDevicePrimaryCtxRelease(1))
        try:
            with pytest.raises(cuda.CudaError, match="retain the primary context") as caught:
                cuda.checkpoint_custom(process.pid)
            assert caught.value.name == "CUDA_ERROR_INVALID_CONTEXT"
        finally:
            done(gpus.driver.cuDevicePrimaryCtxRetain(1))
        assert state(gpus, process.pid) == "LOCKED"
