"""Streams, events and links: order of completion, never how long it took."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest

from tests.simcuda import STALLED, SimWorld
from tests.simcuda.driver import call, driver, error

MIB = 1 << 20
NON_BLOCKING = 1


@pytest.fixture
def address(library: ctypes.CDLL) -> Any:
    return call(driver.cuMemAlloc(4 * MIB))


@pytest.fixture
def pinned(library: ctypes.CDLL) -> Any:
    return call(driver.cuMemHostAlloc(4 * MIB, 0))


def _event(stream: Any) -> Any:
    event = call(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_BLOCKING_SYNC))
    call(driver.cuEventRecord(event, stream))
    return event


def test_a_fast_link_overtakes_a_slow_one(world: SimWorld, address: Any, pinned: Any) -> None:
    world.link(0, to_host=STALLED)
    slow, fast = (call(driver.cuStreamCreate(NON_BLOCKING)) for _ in range(2))
    call(driver.cuMemcpyDtoHAsync(pinned, address, MIB, slow))
    first = _event(slow)
    call(driver.cuMemcpyHtoDAsync(int(address) + MIB, int(pinned) + MIB, MIB, fast))
    second = _event(fast)
    call(driver.cuEventSynchronize(second))
    assert error(driver.cuEventQuery(first)) == "NOT_READY"
    assert error(driver.cuStreamQuery(slow)) == "NOT_READY"
    world.link(0, to_host=0)
    call(driver.cuEventSynchronize(first))
    assert error(driver.cuStreamQuery(slow)) == "SUCCESS"
    assert world.moved(0) == (MIB, MIB)


def test_links_of_two_gpus_are_apart(world: SimWorld, library: ctypes.CDLL) -> None:
    world.link(0, to_host=STALLED)
    events = []
    for gpu in range(2):
        call(driver.cuCtxSetCurrent(call(driver.cuDevicePrimaryCtxRetain(gpu))))
        stream = call(driver.cuStreamCreate(NON_BLOCKING))
        buffer, host = call(driver.cuMemAlloc(MIB)), call(driver.cuMemHostAlloc(MIB, 0))
        call(driver.cuMemcpyDtoHAsync(host, buffer, MIB, stream))
        events.append(_event(stream))
    call(driver.cuEventSynchronize(events[1]))
    assert error(driver.cuEventQuery(events[0])) == "NOT_READY"
    world.link(0, to_host=1 << 40)
    call(driver.cuEventSynchronize(events[0]))


def test_copies_share_their_link(world: SimWorld, address: Any, pinned: Any) -> None:
    rate = 64 * MIB
    streams = [call(driver.cuStreamCreate(NON_BLOCKING)) for _ in range(2)]
    start = call(driver.cuEventCreate(0))
    call(driver.cuEventRecord(start, streams[0]))
    call(driver.cuEventSynchronize(start))
    world.link(0, to_host=rate)
    for k, stream in enumerate(streams):
        call(driver.cuMemcpyDtoHAsync(int(pinned) + k * MIB, address, MIB, stream))
    ends = [call(driver.cuEventCreate(0)) for _ in streams]
    for end, stream in zip(ends, streams, strict=True):
        call(driver.cuEventRecord(end, stream))
        call(driver.cuEventSynchronize(end))
    # A lower bound: however slow the machine is, the later of the two had to wait for both.
    assert max(call(driver.cuEventElapsedTime(start, end)) for end in ends) >= 2 * MIB / rate * 1000


def test_work_on_a_stream_runs_in_order(world: SimWorld, address: Any, pinned: Any) -> None:
    stream = call(driver.cuStreamCreate(NON_BLOCKING))
    for value in range(50):
        call(driver.cuMemsetD8Async(address, value, MIB, stream))
        call(driver.cuMemcpyDtoHAsync(int(pinned) + value * 4096, address, 4096, stream))
    call(driver.cuStreamSynchronize(stream))
    assert ctypes.string_at(pinned, 50 * 4096) == b"".join(bytes([value]) * 4096 for value in range(50))


def test_a_stream_waits_for_an_event_of_another(world: SimWorld, address: Any, pinned: Any) -> None:
    first, second = (call(driver.cuStreamCreate(NON_BLOCKING)) for _ in range(2))
    ctypes.memset(int(pinned), 5, MIB)
    world.link(0, to_device=STALLED)
    call(driver.cuMemcpyHtoDAsync(address, pinned, MIB, first))
    call(driver.cuStreamWaitEvent(second, _event(first), 0))
    call(driver.cuMemcpyDtoHAsync(int(pinned) + MIB, address, MIB, second))
    done = _event(second)
    assert error(driver.cuEventQuery(done)) == "NOT_READY"
    world.link(0, to_device=0)
    call(driver.cuEventSynchronize(done))
    assert ctypes.string_at(int(pinned) + MIB, MIB) == b"\5" * MIB


def test_the_legacy_stream_waits_for_blocking_streams_alone(
    world: SimWorld, address: Any, pinned: Any
) -> None:
    blocking, free = call(driver.cuStreamCreate(0)), call(driver.cuStreamCreate(NON_BLOCKING))
    world.link(0, to_host=STALLED)
    call(driver.cuMemcpyDtoHAsync(pinned, address, MIB, free))
    call(driver.cuMemsetD8(address, 1, MIB))  # on the legacy stream: does not wait for `free`
    call(driver.cuMemcpyDtoHAsync(pinned, address, MIB, blocking))
    call(driver.cuMemsetD8Async(address, 2, MIB, 0))
    legacy = _event(0)
    assert error(driver.cuEventQuery(legacy)) == "NOT_READY"
    world.link(0, to_host=0)
    call(driver.cuEventSynchronize(legacy))
    assert error(driver.cuStreamQuery(blocking)) == "SUCCESS"


def test_bytes_move_when_the_copy_completes(world: SimWorld, address: Any, pinned: Any) -> None:
    stream = call(driver.cuStreamCreate(NON_BLOCKING))
    call(driver.cuMemsetD8(address, 9, MIB))
    ctypes.memset(int(pinned), 1, MIB)
    world.link(0, to_host=STALLED)
    call(driver.cuMemcpyDtoHAsync(pinned, address, MIB, stream))
    assert ctypes.string_at(pinned, MIB) == b"\1" * MIB
    world.link(0, to_host=0)
    call(driver.cuStreamSynchronize(stream))
    assert ctypes.string_at(pinned, MIB) == b"\11" * MIB


def test_memory_that_is_not_registered_is_copied_at_once(world: SimWorld, address: Any) -> None:
    stream = call(driver.cuStreamCreate(NON_BLOCKING))
    call(driver.cuMemsetD8(address, 3, MIB))
    data = bytearray(MIB)
    call(driver.cuMemcpyDtoHAsync(data, address, MIB, stream))
    assert data == b"\3" * MIB
    call(driver.cuMemsetD8Async(address, 4, MIB, stream))
    raw = (ctypes.c_char * MIB).from_buffer(data)
    call(driver.cuMemHostRegister(ctypes.addressof(raw), MIB, 1))
    world.link(0, to_host=STALLED)
    call(driver.cuMemcpyDtoHAsync(ctypes.addressof(raw), address, MIB, stream))
    assert error(driver.cuStreamQuery(stream)) == "NOT_READY"
    assert data == b"\3" * MIB
    world.link(0, to_host=0)
    call(driver.cuStreamSynchronize(stream))
    assert data == b"\4" * MIB
    call(driver.cuMemHostUnregister(ctypes.addressof(raw)))


def test_an_event_answers_for_its_last_record(world: SimWorld, address: Any, pinned: Any) -> None:
    stream = call(driver.cuStreamCreate(NON_BLOCKING))
    event = call(driver.cuEventCreate(0))
    assert error(driver.cuEventQuery(event)) == "SUCCESS", "never recorded"
    call(driver.cuEventRecord(event, stream))
    call(driver.cuEventSynchronize(event))
    world.link(0, to_host=STALLED)
    call(driver.cuMemcpyDtoHAsync(pinned, address, MIB, stream))
    call(driver.cuEventRecord(event, stream))
    assert error(driver.cuEventQuery(event)) == "NOT_READY"
    world.link(0, to_host=0)
    call(driver.cuEventSynchronize(event))


def test_elapsed_time_needs_timing_and_completion(world: SimWorld, address: Any, pinned: Any) -> None:
    stream = call(driver.cuStreamCreate(NON_BLOCKING))
    first, second = _event(stream), call(driver.cuEventCreate(0))
    world.link(0, to_host=STALLED)
    call(driver.cuMemcpyDtoHAsync(pinned, address, MIB, stream))
    call(driver.cuEventRecord(second, stream))
    assert error(driver.cuEventElapsedTime(first, second)) == "NOT_READY"
    world.link(0, to_host=0)
    call(driver.cuEventSynchronize(second))
    assert call(driver.cuEventElapsedTime(first, second)) >= 0
    untimed = call(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
    call(driver.cuEventRecord(untimed, stream))
    assert error(driver.cuEventElapsedTime(first, untimed)) == "INVALID_HANDLE"


def test_handles_that_are_gone_are_refused(world: SimWorld, address: Any, pinned: Any) -> None:
    stream = call(driver.cuStreamCreate(NON_BLOCKING))
    event = _event(stream)
    other = call(driver.cuDevicePrimaryCtxRetain(1))
    call(driver.cuCtxPushCurrent(other))
    foreign = call(driver.cuEventCreate(0))
    call(driver.cuCtxPopCurrent())
    assert error(driver.cuEventRecord(foreign, stream)) == "INVALID_HANDLE", "of another context"
    call(driver.cuEventDestroy(event))
    assert error(driver.cuEventQuery(event)) == "INVALID_HANDLE"
    call(driver.cuStreamDestroy(stream))
    assert error(driver.cuStreamQuery(stream)) == "INVALID_HANDLE"
    assert error(driver.cuMemcpyDtoHAsync(pinned, address, 16, stream)) == "INVALID_HANDLE"


def test_a_destroyed_stream_still_does_its_work(world: SimWorld, address: Any, pinned: Any) -> None:
    stream = call(driver.cuStreamCreate(NON_BLOCKING))
    ctypes.memset(int(pinned), 0, MIB)
    call(driver.cuMemsetD8(address, 8, MIB))
    world.link(0, to_host=STALLED)
    call(driver.cuMemcpyDtoHAsync(pinned, address, MIB, stream))
    event = _event(stream)
    call(driver.cuStreamDestroy(stream))
    world.link(0, to_host=0)
    call(driver.cuEventSynchronize(event))
    assert ctypes.string_at(pinned, MIB) == b"\10" * MIB


def test_a_host_function_runs_in_order_and_may_not_call_the_driver(
    world: SimWorld, library: ctypes.CDLL
) -> None:
    stream = call(driver.cuStreamCreate(NON_BLOCKING))
    seen: list[int] = []
    count = ctypes.c_int()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
        lambda _: seen.append(library.cuDeviceGetCount(ctypes.byref(count)))
    )
    call(driver.cuLaunchHostFunc(stream, ctypes.cast(function, ctypes.c_void_p).value, 0))
    call(driver.cuStreamSynchronize(stream))
    assert [error(code) for code in seen] == ["NOT_PERMITTED"]


def test_capturing_streams_do_nothing_and_cannot_be_waited_for(world: SimWorld, address: Any) -> None:
    stream = call(driver.cuStreamCreate(NON_BLOCKING))
    call(driver.cuMemsetD8(address, 1, 16))
    call(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    active = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    assert call(driver.cuStreamIsCapturing(stream)) == active
    call(driver.cuMemsetD8Async(address, 2, 16, stream))
    assert error(driver.cuStreamSynchronize(stream)) == "STREAM_CAPTURE_UNSUPPORTED"
    call(driver.cuStreamEndCapture(stream))
    call(driver.cuStreamSynchronize(stream))
    data = bytearray(16)
    call(driver.cuMemcpyDtoH(data, address, 16))
    assert data == b"\1" * 16


def test_host_memory_that_went_away_is_an_error_and_no_crash(world: SimWorld, address: Any) -> None:
    import mmap

    stream = call(driver.cuStreamCreate(NON_BLOCKING))
    memory = mmap.mmap(-1, MIB)
    place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    call(driver.cuMemHostRegister(place, MIB, 0))
    world.link(0, to_host=STALLED)
    call(driver.cuMemcpyDtoHAsync(place, address, MIB, stream))
    assert ctypes.CDLL(None).munmap(ctypes.c_void_p(place), ctypes.c_size_t(MIB)) == 0
    world.link(0, to_host=0)
    assert error(driver.cuStreamSynchronize(stream)) == "ILLEGAL_ADDRESS"
    # Python still means to unmap it: give it something there.
    remap = ctypes.CDLL(None).mmap
    remap.restype = ctypes.c_void_p
    fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10
    assert remap(ctypes.c_void_p(place), ctypes.c_size_t(MIB), 3, fixed, -1, ctypes.c_long(0)) == place
    assert os.getpid()
