"""Virtual memory management and pools: what is mapped where, who may use it, what the decompression engine can."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from tests.simcuda import SimWorld
from tests.simcuda.driver import call, checkpoint, driver, error, lock, restore, state, unlock
from tests.simcuda.engine import DEFLATE, Operation, submit
from tests.simcuda.nvcomp import fetch, put

MIB = 1 << 20
GRANULE = 2 * MIB
CAPABLE = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE
READ_WRITE = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
NO_ACCESS = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE


def place(gpu: int) -> driver.CUmemLocation:
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = gpu
    return location


def properties(gpu: int = 0, usage: int = 0) -> driver.CUmemAllocationProp:
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location = place(gpu)
    wanted.allocFlags.usage = usage
    return wanted


def pool_properties(gpu: int = 0, usage: int = 0) -> driver.CUmemPoolProps:
    wanted = driver.CUmemPoolProps()
    wanted.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location = place(gpu)
    wanted.usage = usage
    return wanted


def allow(address: int, nbytes: int, *gpus: int, flags: object = READ_WRITE) -> str:
    descriptions = []
    for gpu in gpus:
        description = driver.CUmemAccessDesc()
        description.location = place(gpu)
        description.flags = flags
        descriptions.append(description)
    return error(driver.cuMemSetAccess(address, nbytes, descriptions, len(descriptions)))


def mapped(nbytes: int, *gpus: int, usage: int = 0, owner: int = 0) -> int:
    """An address with memory of ``owner``, for these GPUs to use; its handle is given up."""
    handle = call(driver.cuMemCreate(nbytes, properties(owner, usage), 0))
    address = int(call(driver.cuMemAddressReserve(nbytes, 0, 0, 0)))
    call(driver.cuMemMap(address, nbytes, 0, handle, 0))
    call(driver.cuMemRelease(handle))
    if gpus:
        assert allow(address, nbytes, *gpus) == "SUCCESS"
    return address


def capable(address: int) -> bool:
    return bool(int(call(driver.cuPointerGetAttribute(CAPABLE, address))))


def test_memory_is_mapped_used_and_given_back(world: SimWorld, library: ctypes.CDLL) -> None:
    option = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    assert call(driver.cuMemGetAllocationGranularity(properties(), option)) == GRANULE
    before = world.used(0)
    handle = call(driver.cuMemCreate(GRANULE, properties(), 0))
    assert world.used(0) == before + GRANULE
    address = int(call(driver.cuMemAddressReserve(2 * GRANULE, 0, 0, 0)))
    data = os.urandom(1000)
    assert error(driver.cuMemcpyHtoD(address, data, len(data))) == "INVALID_VALUE"  # nothing is mapped
    call(driver.cuMemMap(address + GRANULE, GRANULE, 0, handle, 0))
    assert error(driver.cuMemcpyHtoD(address + GRANULE, data, len(data))) == "INVALID_VALUE"  # no access
    assert allow(address + GRANULE, GRANULE, 0) == "SUCCESS"
    call(driver.cuMemcpyHtoD(address + GRANULE, data, len(data)))
    assert fetch(address + GRANULE, len(data)) == data
    base, nbytes = call(driver.cuMemGetAddressRange(address + GRANULE + 5))
    assert (int(base), nbytes) == (address + GRANULE, GRANULE)
    again = call(driver.cuMemRetainAllocationHandle(address + GRANULE))
    assert int(again) == int(handle)
    assert call(driver.cuMemGetAllocationPropertiesFromHandle(again)).location.id == 0
    for _ in range(2):
        call(driver.cuMemRelease(handle))
    assert error(driver.cuMemRelease(handle)) == "INVALID_VALUE"
    assert world.used(0) == before + GRANULE  # it lives while it is mapped
    assert error(driver.cuMemAddressFree(address, 2 * GRANULE)) == "INVALID_VALUE"
    assert error(driver.cuMemUnmap(address, GRANULE)) == "INVALID_VALUE"
    call(driver.cuMemUnmap(address + GRANULE, GRANULE))
    assert world.used(0) == before
    call(driver.cuMemAddressFree(address, 2 * GRANULE))
    assert error(driver.cuMemAddressFree(address, 2 * GRANULE)) == "INVALID_VALUE"


def test_two_mappings_side_by_side_are_one_range_for_copies(world: SimWorld, library: ctypes.CDLL) -> None:
    address = int(call(driver.cuMemAddressReserve(2 * GRANULE, 0, 0, 0)))
    for k in (1, 0):
        handle = call(driver.cuMemCreate(GRANULE, properties(), 0))
        call(driver.cuMemMap(address + k * GRANULE, GRANULE, 0, handle, 0))
        call(driver.cuMemRelease(handle))
    assert allow(address, 2 * GRANULE, 0) == "SUCCESS"
    data = os.urandom(2 * MIB)
    call(driver.cuMemcpyHtoD(address + MIB, data, len(data)))
    assert fetch(address + MIB, len(data)) == data
    assert allow(address + GRANULE, GRANULE, 0, flags=NO_ACCESS) == "SUCCESS"
    assert error(driver.cuMemcpyHtoD(address + MIB, data, len(data))) == "INVALID_VALUE"
    location = place(0)
    assert [int(call(driver.cuMemGetAccess(location, address + k * GRANULE))) for k in (0, 1)] == [3, 0]
    call(driver.cuMemUnmap(address, 2 * GRANULE))


def test_what_cannot_be_is_refused(world: SimWorld, library: ctypes.CDLL) -> None:
    assert error(driver.cuMemCreate(MIB, properties(), 0)) == "INVALID_VALUE"
    assert error(driver.cuMemCreate(GRANULE, properties(), 1)) == "INVALID_VALUE"
    assert error(driver.cuMemCreate(GRANULE, properties(usage=4), 0)) == "INVALID_VALUE"
    assert error(driver.cuMemCreate(GRANULE, properties(2), 0)) == "INVALID_DEVICE"
    assert error(driver.cuMemCreate(2 << 30, properties(), 0)) == "OUT_OF_MEMORY"
    host = properties()
    host.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
    assert error(driver.cuMemCreate(GRANULE, host, 0)) == "NOT_SUPPORTED"
    assert error(driver.cuMemAddressReserve(MIB, 0, 0, 0)) == "INVALID_VALUE"
    assert error(driver.cuMemAddressReserve(GRANULE, 3, 0, 0)) == "INVALID_VALUE"
    aligned = int(call(driver.cuMemAddressReserve(GRANULE, 64 * MIB, 0, 0)))
    assert aligned % (64 * MIB) == 0
    handle = call(driver.cuMemCreate(GRANULE, properties(), 0))
    for address, nbytes, offset in (
        (aligned, 2 * GRANULE, 0),
        (aligned + MIB, GRANULE, 0),
        (aligned, GRANULE, GRANULE),
        (aligned - GRANULE, GRANULE, 0),
    ):
        assert error(driver.cuMemMap(address, nbytes, offset, handle, 0)) == "INVALID_VALUE"
    call(driver.cuMemMap(aligned, GRANULE, 0, handle, 0))
    assert error(driver.cuMemMap(aligned, GRANULE, 0, handle, 0)) == "INVALID_VALUE"  # it is mapped
    assert allow(aligned, GRANULE, 2) == "INVALID_DEVICE"
    assert error(driver.cuMemFree(aligned)) == "INVALID_VALUE"


def test_which_memory_the_decompression_engine_can_use(world: SimWorld, library: ctypes.CDLL) -> None:
    plain, fitting = mapped(GRANULE, 0), mapped(GRANULE, 0, usage=2)
    assert (capable(plain), capable(fitting)) == (False, True)
    assert capable(int(call(driver.cuMemAlloc(100))))
    assert not capable(int(call(driver.cuMemHostAlloc(100, 0))))
    pools = [call(driver.cuMemPoolCreate(pool_properties(usage=usage))) for usage in (0, 2)]
    found = [capable(int(call(driver.cuMemAllocFromPoolAsync(100, pool, 0)))) for pool in pools]
    assert found == [False, True]
    assert not capable(int(call(driver.cuMemAllocAsync(100, 0))))
    wanted = [CAPABLE, driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL]
    last = call(driver.cuPointerGetAttributes(2, wanted, fitting + GRANULE - 1))
    assert [int(value) for value in last] == [1, 0]
    assert int(call(driver.cuPointerGetAttribute(wanted[1], mapped(GRANULE, owner=1)))) == 1


def test_the_engine_takes_memory_that_was_made_for_it() -> None:
    stream = zlib.compressobj(6, zlib.DEFLATED, -15)
    raw = b"checkpoint " * 1000
    data = stream.compress(raw) + stream.flush()
    with SimWorld(gpus=2, decompression=(DEFLATE, 4 * MIB)) as world, world.attached() as library:
        from tests.simcuda.driver import hold_contexts

        hold_contexts(2)
        fitting = mapped(GRANULE, 0, usage=2)
        call(driver.cuMemcpyHtoD(fitting, data, len(data)))
        operation = Operation(fitting, len(data), fitting + MIB, len(raw), fitting + MIB - 4)
        assert submit(library, [operation])[0] == "SUCCESS"
        call(driver.cuCtxSynchronize())
        assert operation.result() == raw
        assert submit(library, [operation.but(target=mapped(GRANULE, 0))]) == ("INVALID_VALUE", 0)
        foreign = mapped(GRANULE, 1, usage=2)  # GPU 0 has no access to it
        assert submit(library, [operation.but(target=foreign)])[0] == "SUCCESS"
        assert error(driver.cuCtxSynchronize()) == "ILLEGAL_ADDRESS"


def test_a_kernel_reaches_what_its_device_has_access_to(world: SimWorld, library: ctypes.CDLL) -> None:
    module = call(driver.cuModuleLoadData(b"simcuda_add_words\0"))
    function = call(driver.cuModuleGetFunction(module, b"simcuda_add_words"))

    def add(address: int) -> str:
        arguments = ((address, 1, 5), (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32))
        call(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0))
        return error(driver.cuCtxSynchronize())

    shared = mapped(GRANULE, 0, 1, owner=1)
    call(driver.cuMemsetD8(shared, 0, 4))
    assert add(shared) == "SUCCESS"
    assert fetch(shared, 4) == b"\x05\0\0\0"
    assert add(mapped(GRANULE, 1, owner=0)) == "ILLEGAL_ADDRESS"


def test_pools_give_and_take_in_a_streams_order(world: SimWorld, library: ctypes.CDLL) -> None:
    pool = call(driver.cuMemPoolCreate(pool_properties()))
    stream = call(driver.cuStreamCreate(1))
    before = world.used(0)
    address = int(call(driver.cuMemAllocFromPoolAsync(3 * MIB, pool, stream)))
    assert world.used(0) >= before + 3 * MIB
    hold = world.fault("cuMemsetD8Async", scope="stream", hold=True)
    call(driver.cuMemsetD8Async(address, 7, 3 * MIB, stream))
    call(driver.cuMemFreeAsync(address, stream))
    hold.wait()
    assert world.used(0) >= before + 3 * MIB
    assert error(driver.cuMemFreeAsync(address, stream)) == "INVALID_VALUE"
    hold.release()
    call(driver.cuStreamSynchronize(stream))
    assert world.used(0) == before
    assert error(driver.cuMemFreeAsync(put(b"x") + 1, stream)) == "INVALID_VALUE"
    other = call(driver.cuMemPoolCreate(pool_properties(gpu=1)))
    assert error(driver.cuMemAllocFromPoolAsync(16, other, stream)) == "INVALID_VALUE"
    assert error(driver.cuMemPoolCreate(pool_properties(gpu=2))) == "INVALID_DEVICE"
    assert error(driver.cuMemPoolCreate(pool_properties(usage=1))) == "INVALID_VALUE"
    call(driver.cuMemPoolDestroy(pool))
    assert error(driver.cuMemPoolDestroy(pool)) == "INVALID_VALUE"
    assert error(driver.cuMemPoolDestroy(call(driver.cuDeviceGetDefaultMemPool(0)))) == "INVALID_VALUE"


MAPPER = """
import sys, zlib
from cuda.bindings import driver
from tests.simcuda.driver import call, hold_contexts
from tests.simcuda.test_virtual_memory import GRANULE, mapped
from tests.simcuda.nvcomp import fetch
hold_contexts(1)
address = mapped(GRANULE, 0, usage=2)
plain = int(call(driver.cuMemAlloc(100)))
data = bytes(i * i % 251 for i in range(GRANULE))
call(driver.cuMemcpyHtoD(address, data, GRANULE))
call(driver.cuMemcpyHtoD(plain, data, 100))
print("ready", flush=True)
sys.stdin.readline()
print(fetch(address, GRANULE) == data and fetch(plain, 100) == data[:100], flush=True)
"""


@pytest.mark.parametrize("pairs", [None, [(0, 1), (1, 0)]])
def test_mapped_memory_is_checkpointed_and_restored(
    pairs: list[tuple[int, int]] | None, world: SimWorld, library: ctypes.CDLL
) -> None:
    environment = world.environment(PYTHONPATH=str(Path(__file__).resolve().parent.parent.parent))
    child = subprocess.Popen(
        [sys.executable, "-c", MAPPER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        used = world.used(0)
        assert (lock(child.pid), checkpoint(child.pid)) == ("SUCCESS", "SUCCESS")
        assert world.used(0) < used - GRANULE
        if pairs is None:
            assert restore(child.pid) == "SUCCESS"
        else:
            from tests.simcuda.storage import restore as restore_to

            uuids = [(world.gpus[old].uuid_bytes, world.gpus[new].uuid_bytes) for old, new in pairs]
            code, _ = restore_to(library, child.pid, uuids, custom=False)
            assert code == 0
            assert world.used(1) > GRANULE
        assert (unlock(child.pid), state(child.pid)) == ("SUCCESS", "RUNNING")
        out, _ = child.communicate("\n", timeout=60)
        assert out == "True\n"
    finally:
        child.kill()
        child.wait()
