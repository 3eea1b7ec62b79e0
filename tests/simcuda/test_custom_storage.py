"""Custom storage of CUDA 13.4: mappings, streams, completion, refusals, GPUs exchanged on restore."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

import pytest

from tests.simcuda import SimWorld, Target
from tests.simcuda.driver import call, checkpoint, driver, error, hold_contexts, lock, restore, state, unlock
from tests.simcuda.storage import Operation
from tests.simcuda.storage import checkpoint as checkpoint_custom
from tests.simcuda.storage import restore as restore_custom

BUFFERS = [(0, 3 << 20), (1, 1 << 20), (0, 128 << 10)]
CONTEXT = 2 << 20


def _open(library: ctypes.CDLL, target: Target) -> Operation:
    assert lock(target.pid) == "SUCCESS"
    code, operation = checkpoint_custom(library, target.pid)
    assert error(code) == "SUCCESS"
    assert operation is not None
    return operation


def _restore(
    library: ctypes.CDLL, target: Target, pairs: list[tuple[bytes, bytes]] | None = None
) -> Operation:
    code, operation = restore_custom(library, target.pid, pairs or [])
    assert error(code) == "SUCCESS"
    assert operation is not None
    return operation


def test_bytes_of_two_gpus_there_and_back(world: SimWorld, library: ctypes.CDLL) -> None:
    with Target(world.environment(), BUFFERS) as target:
        before = [world.used(gpu) for gpu in range(2)]
        operation = _open(library, target)
        assert state(target.pid) == "CHECKPOINTING"
        assert [device.size for device in operation.devices] == [
            CONTEXT + (3 << 20) + (128 << 10),
            CONTEXT + (1 << 20),
        ]
        images = [operation.read(k) for k in range(2)]
        # The mapping holds the allocations in order: the context's own, then what the target asked for.
        assert images[0][CONTEXT : CONTEXT + (3 << 20)] == target.buffer(0)
        assert images[0][CONTEXT + (3 << 20) :] == target.buffer(2)
        assert images[1][CONTEXT:] == target.buffer(1)
        assert [world.used(gpu) for gpu in range(2)] == before, (
            "the memory is the target's until the completion"
        )
        assert operation.complete() == 0
        assert state(target.pid) == "CHECKPOINTED"
        assert [world.used(gpu) for gpu in range(2)] == [CONTEXT, CONTEXT], "only this process's contexts"
        operation = _restore(library, target)
        assert state(target.pid) == "RESTORING"
        for k, image in enumerate(images):
            operation.write(k, image)
        assert operation.complete() == 0
        assert state(target.pid) == "LOCKED"
        assert unlock(target.pid) == "SUCCESS"
        for _ in range(3):
            target.check()


def test_a_restore_that_wrote_nothing_breaks_the_target(world: SimWorld, library: ctypes.CDLL) -> None:
    with Target(world.environment(), BUFFERS) as target:
        assert _open(library, target).complete() == 0
        assert _restore(library, target).complete() == 0
        assert unlock(target.pid) == "SUCCESS"
        target.ask()
        with pytest.raises(RuntimeError, match="ended with status 1"):
            target.answer()


def test_completion_waits_for_the_streams(world: SimWorld, library: ctypes.CDLL) -> None:
    with Target(world.environment(), [(0, 1 << 20)]) as target:
        operation = _open(library, target)
        device = operation.devices[0]
        pinned = call(driver.cuMemHostAlloc(device.size, 0))
        world.link(0, to_host=-1)
        call(driver.cuMemcpyDtoHAsync(pinned, device.address, device.size, device.stream))
        assert error(driver.cuStreamQuery(device.stream)) == "NOT_READY"
        world.link(0, to_host=0)
        assert operation.complete() == 0
        data = ctypes.string_at(pinned, device.size)
        assert data[CONTEXT:] == target.buffer(0)


def test_the_stream_belongs_to_the_primary_context_of_its_gpu(world: SimWorld, library: ctypes.CDLL) -> None:
    with Target(world.environment(), BUFFERS) as target:
        operation = _open(library, target)
        for gpu, device in enumerate(operation.devices):
            assert int(call(driver.cuStreamGetDevice(device.stream))) == gpu
            context = call(driver.cuDevicePrimaryCtxRetain(gpu))
            assert int(call(driver.cuStreamGetCtx(device.stream))) == int(context)
            base, size = call(driver.cuMemGetAddressRange(device.address + 5))
            assert (int(base), size) == (device.address, device.size)
            where = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
            assert call(driver.cuPointerGetAttribute(where, device.address)) == gpu


def test_addresses_and_streams_are_gone_after_completion(world: SimWorld, library: ctypes.CDLL) -> None:
    with Target(world.environment(), [(0, 1 << 20)]) as target:
        operation = _open(library, target)
        device = operation.devices[0]
        assert operation.complete() == 0
        assert error(driver.cuMemcpyDtoH(bytearray(16), device.address, 16)) == "INVALID_VALUE"
        assert error(driver.cuStreamQuery(device.stream)) == "INVALID_HANDLE"
        assert error(operation.complete()) == "INVALID_VALUE"


def test_a_copy_past_the_end_of_a_mapping_is_refused(world: SimWorld, library: ctypes.CDLL) -> None:
    with Target(world.environment(), BUFFERS) as target:
        device = _open(library, target).devices[0]
        whole = bytearray(device.size + 1)
        assert error(driver.cuMemcpyDtoH(whole, device.address, device.size)) == "SUCCESS"
        assert error(driver.cuMemcpyDtoH(whole, device.address, device.size + 1)) == "INVALID_VALUE"


def test_capturing_streams_are_refused(world: SimWorld, library: ctypes.CDLL) -> None:
    with Target(world.environment(), [(0, 1 << 20)]) as target:
        operation = _open(library, target)
        stream = operation.devices[0].stream
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        call(driver.cuStreamBeginCapture(stream, mode))
        assert error(operation.complete()) == "STREAM_CAPTURE_UNSUPPORTED"
        assert state(target.pid) == "CHECKPOINTING"
        call(driver.cuStreamEndCapture(stream))
        assert operation.complete() == 0


def test_primary_contexts_of_every_gpu_are_needed(world: SimWorld) -> None:
    with world.attached() as library, Target(world.environment(), BUFFERS) as target:
        assert lock(target.pid) == "SUCCESS"
        assert error(checkpoint_custom(library, target.pid)[0]) == "NOT_INITIALIZED"
        call(driver.cuInit(0))
        assert error(checkpoint_custom(library, target.pid)[0]) == "INVALID_CONTEXT"
        call(driver.cuDevicePrimaryCtxRetain(0))
        assert error(checkpoint_custom(library, target.pid)[0]) == "INVALID_CONTEXT"
        assert state(target.pid) == "LOCKED"
        call(driver.cuDevicePrimaryCtxRetain(1))
        code, operation = checkpoint_custom(library, target.pid)
        assert code == 0 and operation is not None
        assert operation.complete() == 0
        call(driver.cuDevicePrimaryCtxRelease(1))
        assert error(restore_custom(library, target.pid)[0]) == "INVALID_CONTEXT"
        assert state(target.pid) == "CHECKPOINTED"


def test_an_older_driver_has_no_custom_storage() -> None:
    code = (
        "from cuda.bindings import driver\n"
        "status, address, found = driver.cuGetProcAddress(b'cuCheckpointOperationComplete', 13000, 0)\n"
        "print(int(status), int(address or 0), found.name)\n"
        "status, address, found = driver.cuGetProcAddress(b'cuCheckpointProcessLock', 13000, 0)\n"
        "print(int(status), bool(int(address)), found.name)\n"
        "try: driver.cuCheckpointOperationComplete(0)\n"
        "except RuntimeError as error: print(error)\n"
    )
    with SimWorld(gpus=1, driver_version=13000) as world:
        lines = subprocess.run(
            [sys.executable, "-c", code], env=world.environment(), check=True, capture_output=True, text=True
        ).stdout.splitlines()
        assert lines[0] == "0 0 CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND"
        assert lines[1] == "0 True CU_GET_PROC_ADDRESS_SUCCESS"
        assert "cuCheckpointOperationComplete" in lines[2]
        with world.attached() as library, Target(world.environment(), [(0, 4096)]) as target:
            hold_contexts(1)
            assert lock(target.pid) == "SUCCESS"
            assert error(checkpoint_custom(library, target.pid)[0]) == "INVALID_VALUE"
            assert error(driver.cuCheckpointOperationComplete(0)) == "NOT_SUPPORTED"


def test_gpus_can_be_exchanged_on_restore(world: SimWorld, library: ctypes.CDLL) -> None:
    first, second = (gpu.uuid_bytes for gpu in world.gpus)
    with Target(world.environment(), BUFFERS) as target:
        operation = _open(library, target)
        images = [operation.read(k) for k in range(2)]
        assert operation.complete() == 0
        operation = _restore(library, target, [(first, second), (second, first)])
        assert [device.size for device in operation.devices] == [len(images[1]), len(images[0])]
        operation.write(0, images[1])
        operation.write(1, images[0])
        assert operation.complete() == 0
        assert unlock(target.pid) == "SUCCESS"
        for _ in range(3):
            target.check()


@pytest.mark.parametrize("custom", [False, True])
def test_gpu_pairs_that_are_refused(custom: bool) -> None:
    with SimWorld(gpus=3, chips=["A", "A", "B"]) as world, world.attached() as library:
        hold_contexts(3)
        a, b, other = (gpu.uuid_bytes for gpu in world.gpus)
        refused = [
            [(a, a)],  # not every GPU
            [(a, a), (b, other)],  # another chip
            [(a, b), (b, b)],  # one for two
            [(a, a), (a, b)],  # one twice
            [(a, a), (b, bytes(16))],  # no such GPU
            [(bytes(16), a), (b, b)],
        ]
        with Target(world.environment(), BUFFERS) as target:
            operation = _open(library, target) if custom else None
            if operation is not None:
                assert operation.complete() == 0
            else:
                assert lock(target.pid) == "SUCCESS"
                assert checkpoint(target.pid) == "SUCCESS"
            for pairs in refused:
                code, opened = restore_custom(library, target.pid, pairs, custom=custom)
                assert (pairs, error(code), opened) == (pairs, "INVALID_VALUE", None)
                assert state(target.pid) == "CHECKPOINTED"
            code, _ = restore_custom(library, target.pid, [(b, b), (a, a)], custom=custom)
            assert error(code) == "SUCCESS"


def test_restore_without_enough_memory_leaves_it_checkpointed(world: SimWorld, library: ctypes.CDLL) -> None:
    with Target(world.environment(), BUFFERS) as target:
        assert _open(library, target).complete() == 0
        address = call(driver.cuMemAlloc((1 << 30) - CONTEXT - (3 << 20)))
        assert error(restore_custom(library, target.pid)[0]) == "OUT_OF_MEMORY"
        assert state(target.pid) == "CHECKPOINTED"
        call(driver.cuMemFree(address))
        assert restore_custom(library, target.pid)[0] == 0


def test_several_targets_at_once(world: SimWorld, library: ctypes.CDLL) -> None:
    with (
        Target(world.environment(), BUFFERS, seed=1) as one,
        Target(world.environment(), BUFFERS, seed=2) as two,
    ):
        operations = [_open(library, target) for target in (one, two)]
        images = [[operation.read(k) for k in range(2)] for operation in operations]
        assert [operation.complete() for operation in reversed(operations)] == [0, 0]
        operations = [_restore(library, target) for target in (two, one)]
        for operation, image in zip(operations, reversed(images), strict=True):
            for k in range(2):
                operation.write(k, image[k])
        assert [operation.complete() for operation in reversed(operations)] == [0, 0]
        for target in (one, two):
            assert unlock(target.pid) == "SUCCESS"
            target.check()


CONTROLLER = """
import os, signal, sys
from tests.simcuda.driver import hold_contexts, lock
from tests.simcuda.storage import checkpoint
import ctypes
hold_contexts(2)
lock(int(sys.argv[1]))
checkpoint(ctypes.CDLL("libcuda.so.1"), int(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_controller_leaves_the_state_to_the_next(world: SimWorld, library: ctypes.CDLL) -> None:
    with Target(world.environment(), BUFFERS) as target:
        child = subprocess.run(
            [sys.executable, "-c", CONTROLLER, str(target.pid)],
            env=world.environment(PYTHONPATH="."),
            check=False,
        )
        assert child.returncode == -signal.SIGKILL
        assert state(target.pid) == "CHECKPOINTING"
        for make in (lock, checkpoint, restore, unlock):
            assert make(target.pid) == "ILLEGAL_STATE"
        assert target.alive


def test_a_target_killed_in_the_middle(world: SimWorld, library: ctypes.CDLL) -> None:
    with Target(world.environment(), BUFFERS) as target:
        operation = _open(library, target)
        os.kill(target.pid, signal.SIGKILL)
        target.wait()
        assert error(driver.cuCheckpointProcessGetState(target.pid)) == "INVALID_VALUE"
        assert operation.read(1)[CONTEXT:] == target.buffer(1), (
            "what is mapped here stays until the completion"
        )
        assert error(operation.complete()) == "OPERATING_SYSTEM"
        assert error(operation.complete()) == "INVALID_VALUE"
        assert [process.pid for process in world.processes()] == [os.getpid()]
        assert [world.used(gpu) for gpu in range(2)] == [CONTEXT, CONTEXT]
