"""Devices, contexts, memory, modules: what the calls answer, and what is left behind."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from tests.simcuda import SimWorld, Target
from tests.simcuda.driver import call, driver, error, hold_contexts

MIB = 1 << 20
KERNEL = Path(__file__).resolve().parent.parent.parent / "pyx" / "kernels" / "crc32c_device.cu"


def test_devices_are_as_the_world_has_them() -> None:
    numa = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID
    mask = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_ALGORITHM_MASK
    longest = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_MAXIMUM_LENGTH
    with (
        SimWorld(
            gpus=3, memory=[MIB << 4, MIB << 5, MIB << 6], decompression=(7, 4 * MIB), numa=[0, 1, 1]
        ) as world,
        world.attached() as library,
    ):
        assert library.simcuda_version() == 1
        hold_contexts(3)
        assert call(driver.cuDriverGetVersion()) == 13040
        assert call(driver.cuDeviceGetCount()) == 3
        for k, gpu in enumerate(world.gpus):
            device = call(driver.cuDeviceGet(k))
            assert call(driver.cuDeviceGetName(64, device)).rstrip(b"\0 ") == f"Simulated GPU {k}".encode()
            assert bytes(call(driver.cuDeviceGetUuid(device)).bytes) == gpu.uuid_bytes
            assert call(driver.cuDeviceTotalMem(device)) == MIB << (4 + k)
            assert call(driver.cuDeviceGetPCIBusId(16, device)).rstrip(b"\0 ").decode() == gpu.pci
            assert int(call(driver.cuDeviceGetByPCIBusId(gpu.pci.encode()))) == k
            assert call(driver.cuDeviceGetAttribute(numa, device)) == [0, 1, 1][k]
            assert call(driver.cuDeviceGetAttribute(mask, device)) == 7
            assert call(driver.cuDeviceGetAttribute(longest, device)) == 4 * MIB
        assert error(driver.cuDeviceGet(3)) == "INVALID_DEVICE"


def test_visible_devices_are_chosen_by_number_and_uuid() -> None:
    with SimWorld(gpus=3) as world:
        code = (
            "from cuda.bindings import driver as d; d.cuInit(0); n = d.cuDeviceGetCount()[1];"
            "print([d.cuDeviceGetName(32, k)[1].rstrip(b'\\0 ').decode()[-1] for k in range(n)])"
        )
        for visible, expected in [
            ("2,0", "['2', '0']"),
            (world.gpus[1].uuid, "['1']"),
            ("1,7,0", "['1']"),
        ]:
            environment = world.environment(CUDA_VISIBLE_DEVICES=visible)
            out = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
            assert out.strip() == expected


def test_memory_is_counted_over_processes_and_refused_when_full(
    world: SimWorld, library: ctypes.CDLL
) -> None:
    total = call(driver.cuMemGetInfo())[1]
    with Target(world.environment(), [(0, 24 * MIB)]) as target:
        assert call(driver.cuMemGetInfo())[0] == total - 2 * (2 * MIB) - 24 * MIB
        assert error(driver.cuMemAlloc(total - 24 * MIB)) == "OUT_OF_MEMORY"
        call(driver.cuMemAlloc(total - 40 * MIB))
        target.kill()
        call(driver.cuMemAlloc(24 * MIB))  # a dead process's memory is free


def test_device_addresses_are_checked_and_the_cpu_cannot_touch_them(
    world: SimWorld, library: ctypes.CDLL
) -> None:
    address = call(driver.cuMemAlloc(MIB))
    data = bytearray(2 * MIB)
    assert error(driver.cuMemcpyDtoH(data, address, MIB + 1)) == "INVALID_VALUE"
    assert error(driver.cuMemcpyDtoH(data, 0, 16)) == "INVALID_VALUE"
    assert error(driver.cuMemFree(int(address) + 256)) == "INVALID_VALUE"
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        ctypes.string_at(int(address), 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) < 0
    call(driver.cuMemFree(address))
    assert error(driver.cuMemcpyDtoH(data, address, 16)) == "INVALID_VALUE"
    assert error(driver.cuMemFree(address)) == "INVALID_VALUE"


def test_a_forked_child_cannot_use_its_parents_driver(world: SimWorld, library: ctypes.CDLL) -> None:
    child = os.fork()
    if child == 0:
        os._exit(library.cuCtxSynchronize())
    assert error(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) == "NOT_INITIALIZED"


def test_a_call_without_a_context_is_refused(world: SimWorld) -> None:
    with world.attached():
        assert error(driver.cuDeviceGetCount()) == "NOT_INITIALIZED"
        call(driver.cuInit(0))
        assert error(driver.cuMemAlloc(16)) == "INVALID_CONTEXT"
        context = call(driver.cuDevicePrimaryCtxRetain(1))
        call(driver.cuCtxPushCurrent(context))
        assert int(call(driver.cuCtxGetDevice())) == 1
        assert call(driver.cuDevicePrimaryCtxGetState(1))[1] == 1
        call(driver.cuDevicePrimaryCtxRelease(1))
        assert call(driver.cuDevicePrimaryCtxGetState(1))[1] == 0
        assert error(driver.cuMemAlloc(16)) == "CONTEXT_IS_DESTROYED"
        assert world.used(1) == 0


IMPORTER = """
import ctypes, sys
from cuda.bindings import driver
from tests.simcuda.driver import call, hold_contexts
hold_contexts(1)
handle = driver.CUipcMemHandle()
ctypes.memmove(handle.getPtr(), bytes.fromhex(sys.argv[1]), 64)
data = bytearray(16)
call(driver.cuMemcpyDtoH(data, call(driver.cuIpcOpenMemHandle(handle, 1)), 16))
print(data.hex())
"""


def test_memory_is_shared_between_processes(world: SimWorld, library: ctypes.CDLL) -> None:
    address = call(driver.cuMemAlloc(MIB))
    call(driver.cuMemsetD8(address, 0x5A, MIB))
    handle = call(driver.cuIpcGetMemHandle(address))
    environment = world.environment(PYTHONPATH=str(KERNEL.parent.parent.parent))
    command = [sys.executable, "-c", IMPORTER, ctypes.string_at(handle.getPtr(), 64).hex()]
    assert subprocess.check_output(command, env=environment, text=True).strip() == "5a" * 16
    assert world.process(os.getpid()).uses == ("ipc",)


def test_registered_memory(world: SimWorld, library: ctypes.CDLL) -> None:
    memory = ctypes.create_string_buffer(MIB)
    place = ctypes.addressof(memory)
    kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    assert error(driver.cuPointerGetAttribute(kind, place)) == "INVALID_VALUE"
    call(driver.cuMemHostRegister(place, MIB, 1))
    assert int(call(driver.cuPointerGetAttribute(kind, place))) == 1
    assert error(driver.cuMemHostRegister(place + 4096, 4096, 1)) == "HOST_MEMORY_ALREADY_REGISTERED"
    assert int(call(driver.cuMemHostGetDevicePointer(place, 0))) == place
    call(driver.cuMemHostUnregister(place))
    assert error(driver.cuMemHostUnregister(place)) == "HOST_MEMORY_NOT_REGISTERED"
    assert error(driver.cuMemHostGetDevicePointer(place, 0)) == "INVALID_VALUE"
    assert error(driver.cuMemHostRegister(1 << 46, MIB, 0)) == "INVALID_VALUE"


def test_pointer_attributes_of_device_memory(world: SimWorld, library: ctypes.CDLL) -> None:
    names = driver.CUpointer_attribute
    call(driver.cuCtxSetCurrent(call(driver.cuDevicePrimaryCtxRetain(1))))
    address = int(call(driver.cuMemAlloc(MIB)))
    wanted = [
        names.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        names.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        names.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        names.CU_POINTER_ATTRIBUTE_IS_MANAGED,
        names.CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE,
    ]
    found = [int(value) for value in call(driver.cuPointerGetAttributes(len(wanted), wanted, address + 100))]
    assert found == [2, 1, MIB, 0, 1]
    assert (
        int(call(driver.cuPointerGetAttribute(names.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address + 9)))
        == address
    )


@pytest.mark.skipif(not KERNEL.exists(), reason="the checksum kernel's source is not here")
@pytest.mark.parametrize(
    ("data", "crc", "any_set"), [(b"123456789", 0xE3069283, 1), (bytes(32), 0x8A9136AA, 0)]
)
def test_the_checksum_kernel_gives_known_answers(
    data: bytes, crc: int, any_set: int, world: SimWorld, library: ctypes.CDLL
) -> None:
    # 0xE3069283 is CRC32C's check value; 0x8A9136AA is RFC 3720's for 32 zero bytes.
    module = call(driver.cuModuleLoadData(KERNEL.read_bytes() + b"\0"))
    function = call(driver.cuModuleGetFunction(module, b"ckptpipe_crc32c_zero"))
    source, scratch = call(driver.cuMemAlloc(4096)), call(driver.cuMemAlloc(4096))
    answer = call(driver.cuMemHostAlloc(8, 0))
    call(driver.cuMemcpyHtoD(source, data, len(data)))
    call(driver.cuMemsetD8(scratch, 0, 4096))
    arguments = (
        (int(source), len(data), int(scratch), int(answer)),
        (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64),
    )
    call(driver.cuLaunchKernel(function, 256, 1, 1, 256, 1, 1, 0, 0, arguments, 0))
    call(driver.cuCtxSynchronize())
    assert list((ctypes.c_uint32 * 2).from_address(int(answer))) == [crc, any_set]


def test_images_without_a_known_kernel_are_refused(world: SimWorld, library: ctypes.CDLL) -> None:
    for image in (b"\x7fELF" + bytes(64), b".visible .entry my_kernel()\0", b"// xckptpipe_crc32c_zero\0"):
        assert error(driver.cuModuleLoadData(image)) == "NO_BINARY_FOR_GPU"


def test_a_process_with_no_world_has_no_device() -> None:
    with SimWorld(gpus=1) as world:
        environment = world.environment()
        del environment["SIMCUDA_DIR"]
        code = "from cuda.bindings import driver; print(driver.cuInit(0)[0].name)"
        out = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
        assert out.strip() == "CUDA_ERROR_NO_DEVICE"


def test_nothing_is_left(tmp_path: Path) -> None:
    with SimWorld(gpus=2, parent=tmp_path) as world:
        with world.attached():
            hold_contexts(2)
            call(driver.cuMemsetD8(call(driver.cuMemAlloc(8 * MIB)), 1, 8 * MIB))
            stored = sum(path.stat().st_blocks for path in world.directory.glob("gpu-*"))
            assert stored * 512 >= 8 * MIB
        assert world.processes() == []
        assert sum(path.stat().st_blocks for path in world.directory.glob("gpu-*")) == 0
    assert list(tmp_path.iterdir()) == []
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8")
    assert str(tmp_path) not in mapped


def test_the_world_of_a_killed_run_is_removed_by_the_next(tmp_path: Path) -> None:
    code = "import os; from tests.simcuda import SimWorld; SimWorld(1, parent=os.environ['PLACE']); os.kill(os.getpid(), 9)"
    environment = dict(os.environ, PYTHONPATH=str(KERNEL.parent.parent.parent), PLACE=str(tmp_path))
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode < 0
    assert len(list(tmp_path.iterdir())) == 1
    with SimWorld(1, parent=tmp_path) as world:
        assert list(tmp_path.iterdir()) == [world.directory]


def test_worlds_one_after_another_in_one_process() -> None:
    for value in range(3):
        with SimWorld(gpus=1 + value) as world, world.attached():
            hold_contexts(1)
            assert call(driver.cuDeviceGetCount()) == 1 + value
            address = call(driver.cuMemAlloc(MIB))
            call(driver.cuMemsetD8(address, value, MIB))
            data = bytearray(MIB)
            call(driver.cuMemcpyDtoH(data, address, MIB))
            assert zlib.crc32(data) == zlib.crc32(bytes([value]) * MIB)
