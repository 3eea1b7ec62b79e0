"""The simulated decompression engine: zlib's and lz4's known answers, every error where it is found."""

from __future__ import annotations

import ctypes
import random
import threading
import zlib
from collections.abc import Iterator

import pytest

from tests.simcuda import SimWorld, answers
from tests.simcuda.driver import call, driver, error, hold_contexts
from tests.simcuda.engine import DEFLATE, LZ4, NO_INDEX, SNAPPY, Operation, submit
from tests.simcuda.nvcomp import HARDWARE, Format, fetch, put

KIB, MIB = 1 << 10, 1 << 20
LONGEST = 4 * MIB
TEXT = b"a checkpoint is a checkpoint is a checkpoint, " * 40
CAPABLE = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE


def deflate(data: bytes, level: int = 6) -> bytes:
    stream = zlib.compressobj(level, zlib.DEFLATED, -15)
    return stream.compress(data) + stream.flush()


def shown(value: int | bytes) -> str:
    return value[:8].hex() if isinstance(value, bytes) else str(value)


@pytest.fixture
def world() -> Iterator[SimWorld]:
    with SimWorld(gpus=2, decompression=(DEFLATE | SNAPPY | LZ4, LONGEST)) as world:
        yield world


def test_zlibs_streams_come_out(world: SimWorld, library: ctypes.CDLL) -> None:
    source = random.Random(1)
    raw = [source.randbytes(64 * KIB), bytes(MIB), TEXT, b"x", TEXT * 3]
    operations = [Operation.of(deflate(data, level), len(data)) for level, data in enumerate(raw)]
    operations[2] = operations[2].but(target_bytes=0)  # a hint: it may be left out
    assert submit(library, operations) == ("SUCCESS", NO_INDEX)
    call(driver.cuCtxSynchronize())
    assert [operation.result() for operation in operations] == raw
    assert world.calls("cuMemBatchDecompressAsync") == 1


def test_the_target_may_have_more_room(world: SimWorld, library: ctypes.CDLL) -> None:
    operation = Operation.of(deflate(TEXT), len(TEXT) + 100)
    assert submit(library, [operation])[0] == "SUCCESS"
    call(driver.cuCtxSynchronize())
    assert operation.written() == len(TEXT)
    assert fetch(operation.target + len(TEXT), 100) == b"\x5a" * 100


def lz4_block(data: bytes) -> bytes:
    library = ctypes.CDLL("liblz4.so.1")
    out = ctypes.create_string_buffer(len(data) + 1024)
    written = library.LZ4_compress_default(data, out, len(data), len(out))
    assert written > 0
    return out.raw[:written]


@pytest.mark.parametrize(
    ("algorithm", "data", "raw"),
    [
        (LZ4, b"\x17a\x01\x00\x50bcdef", b"a" * 12 + b"bcdef"),
        (LZ4, b"\x50hello", b"hello"),
        (LZ4, b"\xf0\x05" + bytes(range(20)), bytes(range(20))),
        (LZ4, b"\x1fa\x01\x00\xff\x00\x10b", b"a" * (1 + 4 + 15 + 255) + b"b"),
        (LZ4, b"\x00", b""),
        (SNAPPY, b"\x05\x10hello", b"hello"),
        (SNAPPY, b"\x0c\x00a\x1d\x01", b"a" * 12),  # a copy of 11 bytes, 1 back
        (SNAPPY, b"\x0a\x10abcde\x12\x05\x00", b"abcdeabcde"),  # of 5, 5 back, in two bytes
        (SNAPPY, b"\x0a\x10abcde\x13\x05\x00\x00\x00", b"abcdeabcde"),  # in four
        (SNAPPY, b"\x46\xf0\x45" + bytes(range(70)), bytes(range(70))),  # a long literal
        (SNAPPY, b"\x00", b""),
    ],
    ids=shown,
)
def test_small_streams_written_by_hand(
    algorithm: int, data: bytes, raw: bytes, world: SimWorld, library: ctypes.CDLL
) -> None:
    operation = Operation.of(data, max(1, len(raw)), algorithm)
    assert submit(library, [operation])[0] == "SUCCESS"
    call(driver.cuCtxSynchronize())
    assert operation.result() == raw


def test_lz4s_own_blocks_come_out(world: SimWorld, library: ctypes.CDLL) -> None:
    try:
        ctypes.CDLL("liblz4.so.1")
    except OSError:
        pytest.skip("liblz4.so.1 is not on this machine")
    source = random.Random(3)
    raw = [
        TEXT * 20,
        bytes(100 * KIB),
        source.randbytes(10 * KIB),
        bytes(source.choices(b"abcd", k=50 * KIB)),
    ]
    operations = [Operation.of(lz4_block(data), len(data), LZ4) for data in raw]
    assert submit(library, operations)[0] == "SUCCESS"
    call(driver.cuCtxSynchronize())
    assert [operation.result() for operation in operations] == raw


@pytest.mark.parametrize(
    ("algorithm", "data", "room"),
    [
        (DEFLATE, deflate(TEXT)[:-4], len(TEXT)),
        (DEFLATE, deflate(TEXT) + b"\0", len(TEXT)),
        (DEFLATE, b"\x07" + deflate(TEXT)[1:], len(TEXT)),
        (DEFLATE, deflate(TEXT), len(TEXT) - 1),
        (LZ4, b"\x17a\x02\x00\x50bcdef", 64),  # a match before the beginning
        (LZ4, b"\x17a\x00\x00\x50bcdef", 64),
        (LZ4, b"\x17a\x01\x00\x50bcde", 64),
        (LZ4, b"\x17a\x01\x00", 64),
        (LZ4, b"\x17a\x01", 64),
        (LZ4, b"\xf0\xff", 64),
        (LZ4, b"\x1fa\x01\x00\xff", 512),
        (LZ4, b"\x17a\x01\x00\x50bcdef", 16),
        (SNAPPY, b"\x06\x10hello", 64),
        (SNAPPY, b"\x04\x10hello", 64),
        (SNAPPY, b"\x05\x10hell", 64),
        (SNAPPY, b"\x0c\x00a\x1d\x02", 64),
        (SNAPPY, b"\x0c\x00a\x1d", 64),
        (SNAPPY, b"\xff\xff\xff\xff\xff\xff", 64),
        (SNAPPY, b"\x05\x10hello", 4),
    ],
    ids=shown,
)
def test_data_that_is_wrong_breaks_the_context(
    algorithm: int, data: bytes, room: int, world: SimWorld, library: ctypes.CDLL
) -> None:
    good, bad = Operation.of(deflate(TEXT), len(TEXT)), Operation.of(data, room, algorithm)
    event = call(driver.cuEventCreate(2))
    assert submit(library, [good, bad]) == ("SUCCESS", NO_INDEX)
    driver.cuEventRecord(event, 0)
    assert error(driver.cuCtxSynchronize()) == "LAUNCH_FAILED"
    assert error(driver.cuEventQuery(event)) == "LAUNCH_FAILED"
    assert error(driver.cuMemAlloc(16)) == "LAUNCH_FAILED"  # every call from now on
    answers: list[str] = []
    other = threading.Thread(target=lambda: answers.append(allocate_on_gpu_1()))
    other.start()
    other.join()
    assert answers == ["SUCCESS"]  # the other GPU's context is whole


def allocate_on_gpu_1() -> str:
    call(driver.cuCtxSetCurrent(call(driver.cuDevicePrimaryCtxRetain(1))))
    return error(driver.cuMemAlloc(16))


def test_a_buffer_over_the_longest_fails_on_the_stream(world: SimWorld, library: ctypes.CDLL) -> None:
    operation = Operation.of(deflate(bytes(LONGEST)), LONGEST)
    assert submit(library, [operation])[0] == "SUCCESS"
    call(driver.cuCtxSynchronize())
    assert operation.written() == LONGEST
    long = Operation.of(deflate(TEXT), LONGEST + 1)
    assert submit(library, [long]) == ("SUCCESS", NO_INDEX)
    assert error(driver.cuCtxSynchronize()) == "LAUNCH_FAILED"


def test_memory_that_is_shorter_than_said_fails_on_the_stream(world: SimWorld, library: ctypes.CDLL) -> None:
    operation = Operation.of(deflate(TEXT), len(TEXT))
    assert submit(library, [operation.but(target_bytes=len(TEXT) + 1)])[0] == "SUCCESS"
    assert error(driver.cuCtxSynchronize()) == "ILLEGAL_ADDRESS"


def test_what_the_call_sees_it_answers_with_the_index(world: SimWorld, library: ctypes.CDLL) -> None:
    good = Operation.of(deflate(TEXT), len(TEXT))
    host = int(call(driver.cuMemHostAlloc(4096, 0)))
    for bad in (
        good.but(algorithm=0),
        good.but(algorithm=DEFLATE | LZ4),
        good.but(algorithm=8),
        good.but(source=0),
        good.but(target=0),
        good.but(actual=0),
        good.but(actual=good.actual + 2),
        good.but(source=host),
        good.but(target=host),
        good.but(actual=host),
        good.but(source_bytes=0),
    ):
        assert submit(library, [good, bad, good]) == ("INVALID_VALUE", 1)
    assert submit(library, [good], flags=1) == ("INVALID_VALUE", NO_INDEX)
    assert submit(library, []) == ("INVALID_VALUE", NO_INDEX)
    assert submit(library, [good], stream=12345)[0] == "INVALID_HANDLE"
    call(driver.cuCtxSynchronize())
    assert good.written() == 0x5A5A5A5A  # nothing of a refused batch ran
    pushed = call(driver.cuCtxPopCurrent())
    assert submit(library, [good])[0] == "INVALID_CONTEXT"
    call(driver.cuCtxPushCurrent(pushed))


def test_a_mask_says_what_the_engine_has() -> None:
    with SimWorld(gpus=2, decompression=(DEFLATE, LONGEST)) as world, world.attached() as library:
        world.decompression(1, 0, 0)
        hold_contexts(2)
        good = Operation.of(deflate(TEXT), len(TEXT))
        lz4 = Operation.of(b"\x50hello", 5, LZ4)
        assert submit(library, [good, lz4]) == ("INVALID_VALUE", 1)
        assert submit(library, [good])[0] == "SUCCESS"
        call(driver.cuCtxSynchronize())
        call(driver.cuCtxSetCurrent(call(driver.cuDevicePrimaryCtxRetain(1))))
        other = Operation.of(deflate(TEXT), len(TEXT))
        assert (
            int(call(driver.cuPointerGetAttribute(CAPABLE, other.source))) == 1
        )  # says nothing of the device
        assert submit(library, [other]) == ("NOT_SUPPORTED", NO_INDEX)


def test_an_older_driver_has_no_such_call() -> None:
    with SimWorld(gpus=1, driver_version=12040) as world, world.attached() as library:
        hold_contexts(1)
        address, status = ctypes.c_void_p(), ctypes.c_int()
        name = b"cuMemBatchDecompressAsync"
        library.cuGetProcAddress_v2(
            name, ctypes.byref(address), 12040, ctypes.c_uint64(0), ctypes.byref(status)
        )
        assert (address.value, status.value) == (None, 1)


def test_errors_are_ordered(world: SimWorld, library: ctypes.CDLL) -> None:
    good = Operation.of(deflate(TEXT), len(TEXT))
    world.fault("cuMemBatchDecompressAsync", error="CUDA_ERROR_NOT_SUPPORTED")
    assert submit(library, [good])[0] == "NOT_SUPPORTED"
    world.fault("cuMemBatchDecompressAsync", error="CUDA_ERROR_ECC_UNCORRECTABLE", scope="context")
    assert submit(library, [good])[0] == "SUCCESS"
    assert error(driver.cuCtxSynchronize()) == "ECC_UNCORRECTABLE"


def test_a_batch_runs_in_its_streams_order(world: SimWorld, library: ctypes.CDLL) -> None:
    data = deflate(TEXT)
    source = int(call(driver.cuMemHostAlloc(len(data), 0)))
    ctypes.memmove(source, data, len(data))
    operation = Operation.of(bytes(len(data)), len(TEXT))
    stream = call(driver.cuStreamCreate(1))
    hold = world.fault("cuMemcpyHtoDAsync", scope="stream", hold=True)
    call(driver.cuMemcpyHtoDAsync(operation.source, source, len(data), stream))
    assert submit(library, [operation], stream=int(stream))[0] == "SUCCESS"
    hold.wait()
    assert error(driver.cuStreamQuery(stream)) == "NOT_READY"
    hold.release()
    call(driver.cuStreamSynchronize(stream))
    assert operation.result() == TEXT


def test_another_gpus_memory_is_out_of_the_engines_reach(world: SimWorld, library: ctypes.CDLL) -> None:
    first = Operation.of(deflate(TEXT), len(TEXT))
    call(driver.cuCtxSetCurrent(call(driver.cuDevicePrimaryCtxRetain(1))))
    there = put(deflate(TEXT))
    call(driver.cuCtxSetCurrent(call(driver.cuDevicePrimaryCtxRetain(0))))
    assert submit(library, [first.but(source=there)])[0] == "SUCCESS"
    assert error(driver.cuCtxSynchronize()) == "ILLEGAL_ADDRESS"


def test_nvcomps_hardware_backend_uses_it(world: SimWorld, library: ctypes.CDLL) -> None:
    hardware = Format(world.nvcomp, "Deflate", (), (HARDWARE,))
    batch = hardware.decompressing([deflate(TEXT), deflate(b"x")], [len(TEXT), 1])
    assert hardware.decompress(batch) == 0
    assert batch.data() == [TEXT, b"x"]
    pool = call(driver.cuDeviceGetDefaultMemPool(0))
    wrong = hardware.decompressing([deflate(TEXT)], [len(TEXT)])
    wrong.outputs = [int(call(driver.cuMemAllocFromPoolAsync(len(TEXT), pool, 0)))]
    assert hardware.decompress(wrong) == 0
    assert wrong.found() == [(12, 0)]  # memory that is not the engine's
    silent = Format(world.nvcomp, "Deflate")
    assert silent.decompress(wrong) == 0
    assert wrong.data() == [TEXT]  # the kernels take it
    long = hardware.decompressing([deflate(bytes(LONGEST + 1))], [LONGEST + 1])
    assert hardware.decompress(long) == 0
    assert error(driver.cuCtxSynchronize()) == "LAUNCH_FAILED"


def test_the_answers_that_are_compared_with_a_real_gpus() -> None:
    with SimWorld(gpus=1) as world, world.attached() as library:
        hold_contexts(1)
        assert answers.ask(library) == answers.SIMULATED
