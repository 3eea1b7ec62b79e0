"""The device codec's kernels, as C on a CPU: right at every alignment before they meet a GPU; compiled by NVRTC where it is."""

from __future__ import annotations

import ctypes
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import crc32c as reference
import pytest

from ckptpipe.pyx import cuda_kernel

# A block's threads become loops (crc32c_device.cu); here the grid does too.
EMULATION = """
unsigned emulated_block, emulated_second, emulated_first_count;
#include "crc32c_device.cu"
#include "codec_device.cu"
#define GRID(first, second, call)                                                       \\
    do {                                                                                \\
        emulated_first_count = (first);                                                 \\
        for (emulated_second = 0; emulated_second < (second); emulated_second++)        \\
            for (emulated_block = 0; emulated_block < (first); emulated_block++) call;  \\
    } while (0)
static crc_word scratch[(2 * MANY_BLOCKS + 1) * 64];
int crc_many(const codec_range *ranges, unsigned count, crc_word *results) {
    GRID(MANY_BLOCKS, count, ckptpipe_crc_many(ranges, scratch, results));
    for (unsigned i = 0; i < count; i++)
        if (scratch[(2 * MANY_BLOCKS + 1) * i + 2 * MANY_BLOCKS]) return 1;
    return 0;
}
void sample(const codec_sample *jobs, unsigned count, crc_word *counts) {
    GRID(SAMPLE_BLOCKS, count, ckptpipe_sample_bytes(jobs, counts));
}
void split(const codec_planes *jobs, unsigned count) { GRID(PLANE_BLOCKS, count, ckptpipe_split_planes(jobs)); }
void merge(const codec_planes *jobs, unsigned count) { GRID(PLANE_BLOCKS, count, ckptpipe_merge_planes(jobs)); }
void pieces(const codec_piece *list, unsigned count, unsigned parts) {
    GRID(count, parts, ckptpipe_copy_pieces(list));
}
void table(const void *from, void *to, unsigned granules, unsigned blocks) {
    GRID(blocks, 1, ckptpipe_copy_table(from, to, granules));
}
"""
ROOM = 4 << 20


class Memory:
    """Bytes that begin at a multiple of 64."""

    def __init__(self, data: bytes | int) -> None:
        nbytes = data if isinstance(data, int) else len(data)
        self._bytes = bytearray(nbytes + 64)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))
        self._skip = -start % 64
        self.address = start + self._skip
        self.nbytes = nbytes
        if not isinstance(data, int):
            self.view[:] = data

    @property
    def view(self) -> memoryview:
        return memoryview(self._bytes)[self._skip : self._skip + self.nbytes]


Table = Callable[[Sequence[Sequence[int]]], "ctypes.Array[ctypes.c_uint64]"]


def table(rows: Sequence[Sequence[int]]) -> ctypes.Array[ctypes.c_uint64]:
    flat = [value for row in rows for value in row]
    return (ctypes.c_uint64 * len(flat))(*flat)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "emulation.c").write_text(EMULATION, encoding="utf-8")
    library = folder / "emulation.so"
    include = str(cuda_kernel.SOURCE.parent)
    options = ["-O3", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-I", include, "-o", str(library)]
    subprocess.run([compiler, *options, str(folder / "emulation.c")], check=True)
    return ctypes.CDLL(str(library))


def test_sums_of_many_ranges_at_once(code: ctypes.CDLL) -> None:
    memory = Memory(random.Random(1).randbytes(ROOM))
    data = bytes(memory.view)
    sizes = [1, 3, 15, 16, 63, 64, 65, 4095, 65536, 131071, 131072, 131073, 131088, (1 << 20) + 7, 3 << 20]
    ranges = [(memory.address + (7 * i) % 64, nbytes) for i, nbytes in enumerate(sizes)]
    results = (ctypes.c_uint32 * (2 * len(sizes)))()
    for _ in range(2):  # the second launch finds the scratch as the first left it
        assert code.crc_many(table(ranges), len(sizes), results) == 0
        for i, nbytes in enumerate(sizes):
            offset = (7 * i) % 64
            expected = reference.crc32c(data[offset : offset + nbytes])
            assert (results[2 * i], results[2 * i + 1] != 0) == (expected, True), (offset, nbytes)


def test_one_byte_that_is_not_zero_is_seen_in_its_range_alone(code: ctypes.CDLL) -> None:
    nbytes = 300_001
    memory = Memory(2 * nbytes)
    ranges = table([(memory.address, nbytes), (memory.address + nbytes, nbytes)])
    results = (ctypes.c_uint32 * 4)()
    zeros = reference.crc32c(bytes(nbytes))
    for place in (0, 15, 150_000, nbytes - 1):
        memory.view[nbytes + place] = 1
        assert code.crc_many(ranges, 2, results) == 0
        assert (results[0], results[1]) == (zeros, 0)
        assert results[2] == reference.crc32c(bytes(memory.view[nbytes:]))
        assert results[3] != 0
        memory.view[nbytes + place] = 0


@pytest.mark.parametrize("planes", [1, 2, 4])
def test_samples_keep_positions_apart(code: ctypes.CDLL, planes: int) -> None:
    nbytes = 1_000_003
    memory = Memory(bytes(range(10, 10 + planes)) * (nbytes // planes + 1))
    counts = (ctypes.c_uint32 * 2048)()
    jobs = table([(memory.address, nbytes, planes), (memory.address, 1024, planes)])
    code.sample(jobs, 2, counts)
    for job in range(2):
        for plane in range(4):
            found = {i: n for i, n in enumerate(counts[1024 * job + 256 * plane :][:256]) if n}
            assert found == ({10 + plane: (256 << 10) // planes} if plane < planes else {})


@pytest.mark.parametrize("planes", [2, 4])
@pytest.mark.parametrize("nbytes", [1, 5, 31, 32, 63, 64, 65, 4096, 70_001])
@pytest.mark.parametrize("shift", [0, 1, 6])
def test_planes_are_split_and_merged(code: ctypes.CDLL, planes: int, nbytes: int, shift: int) -> None:
    whole = Memory(random.Random(nbytes).randbytes(nbytes + 16))
    data = bytes(whole.view[shift : shift + nbytes])
    parts = [Memory(nbytes + 32) for _ in range(planes)]
    lengths = [(nbytes - p + planes - 1) // planes for p in range(planes)]
    wanted = [0 if p == 0 and shift == 6 else parts[p].address + shift for p in range(planes)]
    code.split(table([(whole.address + shift, nbytes, planes, *wanted, *[0] * (4 - planes))]), 1)
    for p, (part, length) in enumerate(zip(parts, lengths, strict=True)):
        expected = bytes(length) if not wanted[p] else data[p::planes]
        assert bytes(part.view[shift : shift + length]) == expected
        assert not any(part.view[:shift])
        assert not any(part.view[shift + length :])
        part.view[shift : shift + length] = data[p::planes]
    whole.view[:] = bytes(nbytes + 16)
    sources = [part.address + shift for part in parts]
    code.merge(table([(whole.address + shift, nbytes, planes, *sources, *[0] * (4 - planes))]), 1)
    assert bytes(whole.view) == bytes(shift) + data + bytes(16 - shift)


def test_two_chunks_in_one_launch_each_with_planes_of_its_own(code: ctypes.CDLL) -> None:
    first, second = Memory(b"aAbBcCdD" * 8), Memory(b"1234" * 17)
    parts = [Memory(64) for _ in range(6)]
    jobs = [
        (first.address, 64, 2, parts[0].address, parts[1].address, 0, 0),
        (second.address, 68, 4, *(part.address for part in parts[2:])),
    ]
    code.split(table(jobs), 2)
    assert bytes(parts[0].view[:32]) == b"abcd" * 8
    assert bytes(parts[1].view[:32]) == b"ABCD" * 8
    assert [bytes(part.view[:17]) for part in parts[2:]] == [b"1" * 17, b"2" * 17, b"3" * 17, b"4" * 17]


def test_pieces_from_any_to_any_alignment(code: ctypes.CDLL) -> None:
    source = Memory(random.Random(3).randbytes(200_000))
    data = bytes(source.view)
    chance = random.Random(4)
    target = Memory(8_000_000)
    rows, expected, at = [], bytearray(8_000_000), 0
    for nbytes in [*range(1, 70), 1000, 65535, 65536, 65537, 131072, 150_000]:
        for _ in range(6):
            begin, gap = chance.randrange(64), chance.randrange(1, 40)
            at += gap
            rows.append((source.address + begin, target.address + at, nbytes))
            expected[at : at + nbytes] = data[begin : begin + nbytes]
            at += nbytes
    assert at < len(expected)
    code.pieces(table(rows), len(rows), 3)
    assert bytes(target.view) == bytes(expected)


def test_tables_are_copied_whole_and_no_farther(code: ctypes.CDLL) -> None:
    source = Memory(random.Random(5).randbytes(100_000))
    for granules in (1, 255, 256, 257, 4096):
        target = Memory(16 * granules + 16)
        code.table(*(ctypes.c_void_p(memory.address) for memory in (source, target)), granules, 16)
        assert target.view[:-16] == source.view[: 16 * granules]
        assert target.view[-16:] == bytes(16)


def test_the_launches_are_those_of_the_source() -> None:
    folder = cuda_kernel.SOURCE.parent
    source = (folder / "codec_device.cu").read_text(encoding="utf-8")
    header = (folder / "codec_lane.h").read_text(encoding="utf-8")
    setup = (folder / "codec_setup.c").read_text(encoding="utf-8")
    for name in ("MANY_BLOCKS", "PLANE_BLOCKS", "SAMPLE_BLOCKS"):
        (here,) = re.findall(rf"#define {name} (\d+)u", source)
        assert f"CK_{name} = {here}" in header
    assert "#define PIECE_PART 65536ull" in source
    assert "#define CK_PIECE_PART 65536u" in header
    for name in re.findall(r"ENTRY (\w+)\(", source):
        assert f'"{name}"' in setup


def test_nvrtc_compiles_them() -> None:
    try:
        image = cuda_kernel.compiled(9, 0, cuda_kernel.CODEC_SOURCES)
    except cuda_kernel.KernelUnavailableError as error:
        pytest.skip(str(error))
    source = Path(cuda_kernel.CODEC_SOURCES[-1]).read_text(encoding="utf-8")
    for name in re.findall(r"ENTRY (\w+)\(", source):
        assert name.encode() in image
