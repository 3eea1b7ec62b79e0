"""The checksum kernel: right on a CPU before it meets a GPU, compiled by NVRTC where there is one."""

from __future__ import annotations

import ctypes
import os
import random
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import crc32c as reference
import pytest

from ckptpipe.pyx import cuda_kernel

# The source is C as well as CUDA C++: a block's threads become loops, the grid a loop over blocks.
EMULATION = """
unsigned emulated_block;
#include "crc32c_device.cu"
static crc_word scratch[2 * BLOCKS + 1];
void emulate(const unsigned char *data, unsigned long long nbytes, unsigned first, unsigned step, crc_word *result) {
    for (unsigned i = 0; i < BLOCKS; i++) {
        emulated_block = (first + i * step) % BLOCKS;
        ckptpipe_crc32c_zero(data, nbytes, scratch, result);
    }
}
unsigned counter(void) { return scratch[2 * BLOCKS]; }
"""
Kernel = Callable[[memoryview, int, int], tuple[int, bool]]
ROOM = (3 << 20) + 256


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "emulation.c").write_text(EMULATION, encoding="utf-8")
    library = folder / "emulation.so"
    include = str(cuda_kernel.SOURCE.parent)
    options = ["-O3", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-I", include, "-o", str(library)]
    subprocess.run([compiler, *options, str(folder / "emulation.c")], check=True)
    code = ctypes.CDLL(str(library))
    code.emulate.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p]
    chance = random.Random(3)
    answer = (ctypes.c_uint32 * 2)()

    def run(memory: memoryview, offset: int, nbytes: int) -> tuple[int, bool]:
        """``offset`` from an address that is a multiple of 16; blocks end in an order of chance."""
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        address = -(-start // 16) * 16 + offset
        code.emulate(address, nbytes, chance.randrange(256), chance.choice((1, 3, 101, 255)), answer)
        assert code.counter() == 0, "the counter of finished blocks is not ready for the next launch"
        return answer[0], answer[1] == 0

    return run


def aligned(memory: bytearray) -> int:
    """Where the first multiple of 16 lies."""
    return -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % 16


@pytest.mark.parametrize("offset", [0, 1, 4, 12, 13, 15])
def test_known_answers_at_every_short_length(emulated: Kernel, offset: int) -> None:
    memory = bytearray(random.Random(offset).randbytes(4096))
    start = aligned(memory) + offset
    for nbytes in [*range(1, 20), *range(46, 84), 127, 128, 129, 255, 256, 257, 1000]:
        expected = reference.crc32c(bytes(memory[start : start + nbytes]))
        assert emulated(memoryview(memory), offset, nbytes) == (expected, False), nbytes


@pytest.mark.parametrize(
    "nbytes",
    [
        4095,
        4096,
        4097,
        65536,
        (1 << 20) - 1,
        1 << 20,
        (1 << 20) + 1,
        (1 << 20) + 16,
        (2 << 20) + 12345,
        3 << 20,
    ],
)
@pytest.mark.parametrize("offset", [0, 7])
def test_known_answers_at_long_lengths(emulated: Kernel, nbytes: int, offset: int) -> None:
    memory = bytearray(random.Random(nbytes).randbytes(ROOM))
    start = aligned(memory) + offset
    expected = reference.crc32c(bytes(memory[start : start + nbytes]))
    assert emulated(memoryview(memory), offset, nbytes) == (expected, False)


def test_the_check_value_of_the_catalogue(emulated: Kernel) -> None:
    memory = bytearray(64)
    memory[aligned(memory) : aligned(memory) + 9] = b"123456789"
    assert emulated(memoryview(memory), 0, 9) == (0xE3069283, False)


@pytest.mark.parametrize("nbytes", [1, 15, 63, 64, 65, 4096, (1 << 20) + 21])
@pytest.mark.parametrize("offset", [0, 9])
def test_one_byte_that_is_not_zero_is_seen_anywhere(emulated: Kernel, nbytes: int, offset: int) -> None:
    memory = bytearray(nbytes + 64)
    start = aligned(memory) + offset
    assert emulated(memoryview(memory), offset, nbytes) == (reference.crc32c(bytes(nbytes)), True)
    for place in {0, nbytes // 2, nbytes - 1, max(nbytes - 16, 0), min(3, nbytes - 1)}:
        memory[start + place] = 0x80
        crc, zero = emulated(memoryview(memory), offset, nbytes)
        assert (crc, zero) == (reference.crc32c(bytes(memory[start : start + nbytes])), False), place
        memory[start + place] = 0
    # what lies beside the range does not count
    memory[start - 1 if start else start + nbytes] = 1
    memory[start + nbytes] = 1
    assert emulated(memoryview(memory), offset, nbytes)[1]


def test_the_constants_are_powers_of_x() -> None:
    def times_x(value: int) -> int:
        return (value >> 1) ^ (0x82F63B78 if value & 1 else 0)

    source = cuda_kernel.SOURCE.read_text(encoding="utf-8")
    units = {"": 1, "K": 1024}
    found = {
        int(digits) * units[unit]: int(value, 16)
        for digits, unit, value in re.findall(r"#define X_(\d+)(K?) (0x[0-9a-f]{8})u", source)
    }
    found[1 << 20] = int(re.findall(r"#define X_ROW (0x[0-9a-f]{8})u", source)[0], 16)
    assert sorted(found) == [4, *(16 << i for i in range(17))]
    value = 1 << 31  # x^0
    for _ in range(32):
        value = times_x(value)
    assert found[4] == value
    for _ in range(96):
        value = times_x(value)
    assert found[16] == value
    for nbytes in [16 << i for i in range(16)]:
        square, factor = 0, found[nbytes]
        for power in range(32):
            square ^= factor if found[nbytes] >> (31 - power) & 1 else 0
            factor = times_x(factor)
        assert found[2 * nbytes] == square, 2 * nbytes


def test_the_launch_is_that_of_the_source() -> None:
    source = cuda_kernel.SOURCE.read_text(encoding="utf-8")
    header = (cuda_kernel.SOURCE.parent / "cuda_queue.h").read_text(encoding="utf-8")
    for name in ("THREADS", "BLOCKS"):
        here = re.findall(rf"#define {name} (\d+)u", source)
        assert here == re.findall(rf"#define CK_KERNEL_{name} (\d+)", header)
    assert f'#define CK_KERNEL_NAME "{cuda_kernel.NAME}"' in header
    assert f"ENTRY {cuda_kernel.NAME}(" in source


def nvrtc_missing() -> str:
    try:
        cuda_kernel.compiled(9, 0)
    except cuda_kernel.KernelUnavailableError as error:
        return str(error)
    return ""


def test_nvrtc_compiles_it() -> None:
    missing = nvrtc_missing()
    if missing:
        pytest.skip(missing)
    image = cuda_kernel.compiled(9, 0)
    assert image.startswith(b"\x7fELF")  # a cubin for this very GPU
    assert cuda_kernel.NAME.encode() in image
    assert cuda_kernel.compiled(9, 0) is image
    ptx = cuda_kernel.compiled(99, 0)  # a GPU that this NVRTC does not know: the driver compiles for it
    assert f".entry {cuda_kernel.NAME}".encode() in ptx
    with pytest.raises(
        cuda_kernel.KernelUnavailableError, match=r"capability 2\.0 .*older nvidia-cuda-nvrtc"
    ):
        cuda_kernel.compiled(2, 0)


def test_without_cuda_python_the_reason_is_told_each_time() -> None:
    text = """
        import sys
        sys.modules["cuda"] = None
        from ckptpipe.pyx import cuda_kernel
        for _ in range(2):
            try:
                cuda_kernel.compiled(9, 0)
            except cuda_kernel.KernelUnavailableError as error:
                print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, check=True, timeout=60
    )
    first, second = done.stdout.splitlines()
    assert first == second
    assert "no kernels for the GPU" in first
    assert "nvidia-cuda-nvrtc" in first


def test_a_broken_compiler_is_a_reason_and_no_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = nvrtc_missing()
    if missing:
        pytest.skip(missing)
    broken = tmp_path / "broken.cu"
    broken.write_text("this is no C++", encoding="utf-8")
    monkeypatch.setattr(cuda_kernel, "SOURCE", broken)
    with pytest.raises(
        cuda_kernel.KernelUnavailableError, match=r"cannot compile broken\.cu for sm_80.*error"
    ):
        cuda_kernel.compiled(8, 0)
    with cuda_kernel._lock:
        del cuda_kernel._refusals[8, 0]
