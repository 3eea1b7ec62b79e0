"""The simulated nvCOMP: known answers of zlib, the real library's answers of sizes, every misuse an error."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import random
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from tests.simcuda import SimWorld
from tests.simcuda.driver import call, driver, error
from tests.simcuda.nvcomp import FLOAT8, FLOAT16, HARDWARE, Format, fetch, put

KIB, MIB = 1 << 10, 1 << 20
BLOCK = 64 * KIB


def weights(nbytes: int, seed: int = 1) -> bytes:
    """Like bf16: low bytes of chance, high bytes of few values."""
    source = random.Random(seed)
    low = source.randbytes(nbytes // 2)
    high = bytes(source.choices((0x3C, 0x3D, 0xBC, 0xBD, 0x3B), (9, 5, 9, 5, 2), k=nbytes // 2))
    return bytes(byte for pair in zip(low, high, strict=True) for byte in pair)


def inflate(data: bytes) -> bytes:
    stream = zlib.decompressobj(-15)
    raw = stream.decompress(data)
    assert stream.eof and not stream.unused_data
    return raw


def deflate(data: bytes, level: int = 6) -> bytes:
    stream = zlib.compressobj(level, zlib.DEFLATED, -15)
    return stream.compress(data) + stream.flush()


@pytest.fixture
def blocks() -> list[bytes]:
    return [weights(BLOCK), bytes(BLOCK), random.Random(2).randbytes(BLOCK), weights(998, 3), b"x"]


@pytest.mark.parametrize("level", range(6))
def test_zlib_reads_what_deflate_wrote(
    level: int, blocks: list[bytes], world: SimWorld, library: ctypes.CDLL
) -> None:
    deflater = Format(world.nvcomp, "Deflate", (level,))
    batch = deflater.compressing(blocks)
    assert deflater.compress(batch, BLOCK) == 0
    coded = batch.data()
    assert [inflate(data) for data in coded] == blocks
    assert len(coded[1]) < (10 * KIB if level == 0 else 400)  # level 0 codes entropy alone
    assert len(coded[0]) < 0.8 * BLOCK


def test_deflate_reads_what_zlib_wrote(blocks: list[bytes], world: SimWorld, library: ctypes.CDLL) -> None:
    deflater = Format(world.nvcomp, "Deflate")
    batch = deflater.decompressing([deflate(data) for data in blocks], [len(data) for data in blocks])
    assert deflater.decompress(batch) == 0
    assert batch.data() == blocks
    sizes = deflater.decompressing([deflate(data) for data in blocks], [1] * len(blocks))
    assert deflater.sizes(sizes) == 0
    assert [size for _, size in sizes.found()] == [len(data) for data in blocks]


@pytest.mark.parametrize(("element", "width"), [(0, 1), (1, 1), (FLOAT8, 1), (FLOAT16, 2)])
def test_ans_comes_back_the_same(element: int, width: int, world: SimWorld, library: ctypes.CDLL) -> None:
    coder = Format(world.nvcomp, "ANS", (0, element), (0, 255))
    raw = [weights(MIB), bytes(4 * KIB), random.Random(4).randbytes(70 * KIB), weights(6), b""]
    batch = coder.compressing(raw)
    assert coder.compress(batch, MIB) == 0
    coded = batch.data()
    assert len(coded[0]) < MIB / (1.4 if width == 2 else 1.15)
    assert all(data[:4] == b"SANS" for data in coded)
    back = coder.decompressing(coded, [len(data) for data in raw[:-1]] + [1])
    assert coder.decompress(back) == 0
    assert back.data() == raw
    other = Format(world.nvcomp, "ANS", (), (0, FLOAT16 if width == 1 else 0))
    wrong = other.decompressing(coded[:1], [MIB])
    assert other.decompress(wrong) == 0
    assert wrong.found() == [(12, 0)]


def test_sizes_and_alignments_are_the_real_librarys(world: SimWorld, library: ctypes.CDLL) -> None:
    """What nvCOMP 6.0.0.12 answers."""
    for level in range(6):
        deflater = Format(world.nvcomp, "Deflate", (level,))
        assert deflater.alignments("Compress") == (1, 8, 8)
        assert deflater.alignments("Decompress") == (4, 1, 1)
        assert deflater.bound(BLOCK) == -148256
        real = [0, 46141440, 83890176, 83890176, 142615552, 151004160][level]
        assert deflater.temp("Compress", 128, BLOCK) == pytest.approx(real, rel=1e-3)
        assert deflater.temp("Decompress", 128, BLOCK) == 0
    assert Format(world.nvcomp, "Deflate", (6,)).bound(BLOCK) == 11
    half = Format(world.nvcomp, "ANS", (0, FLOAT16), (0, 255))
    assert half.alignments("Compress") == half.alignments("Decompress") == (16, 16, 1)
    assert -half.bound(MIB) == pytest.approx(1182256, rel=1e-2)
    assert half.bound((16 * MIB) + 1) == 18
    assert half.temp("Compress", 16, MIB) == half.temp("Decompress", 16, MIB) == 0
    assert Format(world.nvcomp, "ANS", (0, 3)).bound(BLOCK) == 11
    lz4 = Format(world.nvcomp, "LZ4")
    assert (lz4.bound(BLOCK), lz4.temp("Compress", 8, MIB)) == (-65800, 262144)


def real_library() -> Path:
    """The wheel's libnvcomp, whose sizes need no GPU."""
    try:
        files = importlib.metadata.files("nvidia-libnvcomp-cu13") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.name.startswith("libnvcomp.so")]
    if not found:
        pytest.skip("the package nvidia-libnvcomp-cu13 is not installed")
    return found[0]


ASK_REAL = """
import json, pathlib, sys
from tests.simcuda.test_nvcomp import sizes
print(json.dumps(sizes(pathlib.Path(sys.argv[1]))))
"""


def sizes(path: Path) -> list[list[int]]:
    """Alignments, the longest output and temporary bytes of everything that is written here."""
    formats = [("Deflate", (level,), (0,)) for level in range(6)]
    formats += [("ANS", (0, element), (0, 255)) for element in (0, FLOAT8, FLOAT16)]
    return [
        [
            *(*coder.alignments("Compress"), *coder.alignments("Decompress")),
            *(coder.temp("Decompress", 9, nbytes), -coder.bound(nbytes), coder.temp("Compress", 9, nbytes)),
        ]
        for coder in (Format(path, *arguments) for arguments in formats)
        for nbytes in (1, 1000, BLOCK, MIB)
    ]


def test_the_real_library_answers_the_same_of_sizes(world: SimWorld) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SIMCUDA_DIR"}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent.parent)
    command = [sys.executable, "-c", ASK_REAL, str(real_library())]
    real = json.loads(subprocess.check_output(command, env=environment, text=True))
    for mine, theirs in zip(sizes(world.nvcomp), real, strict=True):
        assert mine[:7] == theirs[:7]
        assert mine[7] == pytest.approx(theirs[7], rel=0.2, abs=512)
        assert mine[8] == pytest.approx(theirs[8], rel=0.1, abs=512)


@pytest.mark.parametrize("name", ["Gdeflate", "LZ4", "Snappy", "Bitcomp", "Zstd", "Gzip", "Cascaded"])
def test_formats_that_are_not_written_here_say_so(name: str, world: SimWorld, library: ctypes.CDLL) -> None:
    other = Format(world.nvcomp, name)
    batch = other.compressing([bytes(KIB)])
    assert other.compress(batch, KIB) == 11


def test_what_cannot_be_decompressed_has_a_status(world: SimWorld, library: ctypes.CDLL) -> None:
    raw = weights(BLOCK)
    good = deflate(raw)
    bad = bytearray(good)
    bad[0] |= 6  # a block of the type that does not exist
    deflater = Format(world.nvcomp, "Deflate")
    inputs = [good, bytes(bad), good[:-9], good + b"\0", good, b""]
    batch = deflater.decompressing(inputs, [BLOCK] * 4 + [BLOCK - 1, BLOCK])
    assert deflater.decompress(batch) == 0
    assert batch.found() == [(0, BLOCK)] + [(12, 0)] * 5
    assert fetch(batch.outputs[0], BLOCK) == raw
    coder = Format(world.nvcomp, "ANS", (0, FLOAT16), (0, 255))
    coded = coder.compressing([raw])
    assert coder.compress(coded, BLOCK) == 0
    stream = coded.data()[0]
    flips = [
        stream[:k] + bytes([stream[k] ^ 0x10]) + stream[k + 1 :] for k in (0, 6, 9, 30, 700, len(stream) // 3)
    ]
    broken = coder.decompressing([*flips, stream[:-1], b""], [BLOCK] * 8)
    assert coder.decompress(broken) == 0
    statuses = [status for status, _ in broken.found()]
    assert statuses[:3] + statuses[6:] == [12] * 5
    assert set(statuses) <= {0, 12}  # a flip in a stored plane is for the checksum to find


def outcome(world: SimWorld, change: dict[str, object]) -> str:
    """What the context has after a batch of two chunks that is wrong in one thing."""
    deflater = Format(world.nvcomp, "Deflate", (1,))
    batch = deflater.compressing([weights(BLOCK), weights(BLOCK, 2)])
    for name, value in change.items():
        setattr(batch, name, value(getattr(batch, name)) if callable(value) else value)
    assert deflater.compress(batch, BLOCK) == 0
    found = error(driver.cuCtxSynchronize())
    assert error(driver.cuMemAlloc(16)) == found  # and stays
    return found


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"outputs": lambda values: [values[0], values[1] + 4]}, "MISALIGNED_ADDRESS"),
        ({"outputs": lambda values: [values[0], values[1] + 8]}, "ILLEGAL_ADDRESS"),  # shorter than its bound
        ({"input_bytes": [BLOCK, BLOCK + 1]}, "ILLEGAL_ADDRESS"),
        ({"inputs": lambda values: [values[0], values[1] + 1]}, "ILLEGAL_ADDRESS"),
        ({"inputs": [0, 0]}, "ILLEGAL_ADDRESS"),
        ({"sizes": 8}, "ILLEGAL_ADDRESS"),
        ({"sizes": lambda address: address + 4}, "MISALIGNED_ADDRESS"),
        ({"temp_bytes": 1 << 40}, "SUCCESS"),
        ({"temp": lambda address: address + 8}, "ILLEGAL_ADDRESS"),  # its last bytes are not there
    ],
)
def test_a_batch_that_is_undefined_behaviour_breaks_the_context(
    change: dict[str, object], expected: str, world: SimWorld, library: ctypes.CDLL
) -> None:
    assert outcome(world, change) == expected


def test_what_the_library_sees_at_once_is_its_answer(world: SimWorld, library: ctypes.CDLL) -> None:
    deflater = Format(world.nvcomp, "Deflate", (1,))
    batch = deflater.compressing([weights(BLOCK)])
    batch.temp_bytes -= 1
    assert deflater.compress(batch, BLOCK) == 10
    batch.temp_bytes += 1
    batch.temp += 4
    assert deflater.compress(batch, BLOCK) == 17
    batch.temp = 0
    assert deflater.compress(batch, BLOCK) == 10
    assert Format(world.nvcomp, "Deflate", (), (HARDWARE,)).decompress(batch) == 12  # no engine in this GPU
    assert Format(world.nvcomp, "ANS", (), (HARDWARE, 255)).decompress(batch) == 10
    assert Format(world.nvcomp, "ANS", (0, 3)).compress(batch, BLOCK) == 11
    assert error(driver.cuCtxSynchronize()) == "SUCCESS"


def test_temporary_memory_and_the_rest_of_an_output_are_overwritten(
    world: SimWorld, library: ctypes.CDLL
) -> None:
    deflater = Format(world.nvcomp, "Deflate", (1,))
    batch = deflater.compressing([weights(BLOCK)])
    call(driver.cuMemsetD8(batch.temp, 7, batch.temp_bytes))
    call(driver.cuMemsetD8(batch.outputs[0], 7, batch.room[0]))
    assert deflater.compress(batch, BLOCK) == 0
    ((_, size),) = batch.found()
    assert fetch(batch.temp, 8) == b"\xa5" * 8
    assert fetch(batch.outputs[0] + size, 8) == b"\xa5" * 8


def test_a_batch_runs_in_its_streams_order(world: SimWorld, library: ctypes.CDLL) -> None:
    raw = weights(BLOCK)
    deflater = Format(world.nvcomp, "Deflate", (1,))
    batch = deflater.compressing([bytes(BLOCK)])
    source = call(driver.cuMemHostAlloc(BLOCK, 0))
    ctypes.memmove(int(source), raw, BLOCK)
    stream = call(driver.cuStreamCreate(1))
    hold = world.fault("cuMemcpyHtoDAsync", scope="stream", hold=True)
    call(driver.cuMemcpyHtoDAsync(batch.inputs[0], int(source), BLOCK, stream))
    assert deflater.compress(batch, BLOCK, int(stream)) == 0
    hold.wait()
    assert error(driver.cuStreamQuery(stream)) == "NOT_READY"
    hold.release()
    call(driver.cuStreamSynchronize(stream))
    assert inflate(batch.data()[0]) == raw


def test_errors_are_ordered_by_the_calls_name(world: SimWorld, library: ctypes.CDLL) -> None:
    name = "nvcompBatchedDeflateCompressAsync"
    deflater = Format(world.nvcomp, "Deflate", (0,))
    batch = deflater.compressing([weights(BLOCK), weights(BLOCK)])
    world.fault(name, error="nvcompErrorInternal")
    assert deflater.compress(batch, BLOCK) == 1000  # no status of nvCOMP's own calls: the CUDA error's
    world.fault(name, error="nvcompErrorNotSupported")
    assert deflater.compress(batch, BLOCK) == 11
    world.fault(name, error="CUDA_ERROR_OUT_OF_MEMORY")
    assert deflater.compress(batch, BLOCK) == 1000
    world.fault(name, error="nvcompErrorCannotCompress", scope="chunk")
    assert deflater.compress(batch, BLOCK) == 0
    assert [status for status, _ in batch.found()] == [19, 0]
    assert deflater.compress(batch, BLOCK) == 0
    assert [status for status, _ in batch.found()] == [0, 0]
    world.fault(name, error="CUDA_ERROR_ECC_UNCORRECTABLE", scope="context")
    assert deflater.compress(batch, BLOCK) == 0
    assert error(driver.cuCtxSynchronize()) == "ECC_UNCORRECTABLE"
    with pytest.raises(ValueError, match="has no chunks"):
        world.fault("cuMemAlloc", error="nvcompErrorInternal", scope="chunk")


def test_another_gpus_memory_is_out_of_reach(world: SimWorld, library: ctypes.CDLL) -> None:
    deflater = Format(world.nvcomp, "Deflate", (0,))
    batch = deflater.compressing([weights(BLOCK)])
    call(driver.cuCtxSetCurrent(call(driver.cuDevicePrimaryCtxRetain(1))))
    batch.inputs = [put(weights(BLOCK))]
    call(driver.cuCtxSetCurrent(call(driver.cuDevicePrimaryCtxRetain(0))))
    assert deflater.compress(batch, BLOCK) == 0
    assert error(driver.cuCtxSynchronize()) == "ILLEGAL_ADDRESS"


def test_it_says_that_it_is_a_simulation(world: SimWorld, library: ctypes.CDLL) -> None:
    nvcomp = ctypes.CDLL(os.environ["CKPTPIPE_NVCOMP"])
    assert nvcomp.simnvcomp_version() == 1
    nvcomp.nvcompGetStatusString.restype = ctypes.c_char_p
    assert nvcomp.nvcompGetStatusString(12) == b"the data cannot be decompressed (simulated nvCOMP)"
    version = (ctypes.c_uint32 * 2)()
    assert nvcomp.nvcompGetProperties(ctypes.byref(version)) == 0
    assert version[0] == 6000
