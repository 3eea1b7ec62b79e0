"""Cancelled operations: the kernel still has their memory, so nobody else may get it."""

from __future__ import annotations

import asyncio
import os

import pytest

from ckptpipe.pyx.errors import CkptpipeError, StuckIo
from ckptpipe.pyx.io_engine import EngineName
from ckptpipe.pyx.staging import lease_buffer, outstanding
from tests.pyx.engines import ENGINES, LOOPS, REFUSED, content, engine, pipe, ring, run


@pytest.fixture(params=ENGINES)
def kind(request: pytest.FixtureRequest) -> EngineName:
    name: EngineName = request.param
    if name in REFUSED:
        pytest.skip(f"{name} does not run here: {REFUSED[name]}")
    return name


@pytest.fixture(params=sorted(LOOPS))
def loop(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def turns(count: int = 3) -> None:
    """Let the loop run what is ready."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_slot_stays_in_use_until_the_kernel_answers(kind: EngineName, loop: str) -> None:
    async def main() -> None:
        async with engine(kind, depth=2) as io:
            with ring(1) as staging, pipe() as (source, sink):
                lease = await staging.acquire()
                reading = asyncio.ensure_future(_read(io, source, lease))
                await turns()
                assert io.running == 1
                reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
                lease.release()
                assert staging.try_acquire() is None
                assert (io.running, outstanding()) == (1, 1)
                asked = asyncio.ensure_future(staging.acquire())
                await turns()
                assert not asked.done()
                os.write(sink, b"late")
                with await asked as again:
                    assert content(again, 4) == b"late"
                assert io.inflight == 0

    run(main(), loop)


async def _read(io: object, fd: int, lease: object) -> int:
    return await io.read(fd, lease, 100, -1, "pipe")  # type: ignore[attr-defined,no-any-return]


def test_cancelled_while_it_waits_for_a_slot(kind: EngineName, loop: str) -> None:
    """The kernel never saw it: its memory is free at once, though the slot's owner stays stuck."""

    async def main() -> None:
        async with engine(kind, depth=1) as io:
            with ring(3) as staging, pipe() as (source, sink):
                leases = [await staging.acquire() for _ in range(3)]
                reads = [io.read(source, lease, 1, -1, "pipe") for lease in leases]
                for lease in leases:
                    lease.release()
                assert (io.inflight, io.running, staging.free) == (3, 1, 0)
                reads[1].cancel()
                await turns()
                assert (io.inflight, io.running, staging.free) == (2, 1, 1)
                os.write(sink, b"ab")
                assert [await reads[i] for i in (0, 2)] == [1, 1]
                assert staging.free == 3

    run(main(), loop)


def test_cancelled_before_the_turn_ends_is_never_started(kind: EngineName) -> None:
    async def main() -> None:
        async with engine(kind, depth=4) as io:
            with lease_buffer(bytearray(4)) as lease, pipe() as (source, sink):
                os.write(sink, b"kept")
                io.read(source, lease, 4, -1, "pipe").cancel()
                await io.drain()
                assert os.read(source, 4) == b"kept"

    run(main())


def test_cancelled_transfer_is_not_continued(kind: EngineName) -> None:
    async def main() -> None:
        async with engine(kind) as io:
            with lease_buffer(bytearray(100)) as lease, pipe() as (source, sink):
                reading = io.read(source, lease, 100, -1, "pipe")
                await turns()
                reading.cancel()
                os.write(sink, b"x")
                await io.drain(source)
                assert io.inflight == 0

    run(main())


def test_drain_waits_for_one_file_and_is_shielded(kind: EngineName, loop: str) -> None:
    async def main() -> None:
        async with engine(kind) as io:
            with lease_buffer(bytearray(2)) as lease, pipe() as (source, sink), pipe() as (other, other_sink):
                reading = io.read(source, lease, 1, -1, "pipe")
                also = io.read(other, lease, 1, -1, "other")
                await io.drain(sink)  # nothing runs on it
                draining = asyncio.ensure_future(io.drain(source))
                await turns()
                draining.cancel()
                await turns()
                draining.cancel()
                await turns()
                assert not draining.done()
                os.write(sink, b"1")
                with pytest.raises(asyncio.CancelledError):
                    await draining
                assert reading.done()
                assert not also.done()
                os.write(other_sink, b"2")
                await io.drain()
                assert also.result() == 1

    run(main(), loop)


def test_drain_under_a_time_out(kind: EngineName) -> None:
    """The time-out is reported as such, after the operation has ended."""

    async def main() -> None:
        async with engine(kind) as io:
            with lease_buffer(bytearray(1)) as lease, pipe() as (source, sink):
                reading = io.read(source, lease, 1, -1, "pipe")
                loop = asyncio.get_running_loop()
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(None) as limit:
                        limit.reschedule(loop.time())
                        loop.call_later(0.01, os.write, sink, b"1")
                        await io.drain()
                assert reading.result() == 1

    run(main())


def test_close_waits_and_refuses(kind: EngineName, loop: str) -> None:
    async def main() -> None:
        async with engine(kind, depth=1) as io:
            with lease_buffer(bytearray(2)) as lease, pipe() as (source, sink):
                reads = [io.read(source, lease, 1, -1, "pipe") for _ in range(2)]
                await turns()
                closing = [asyncio.ensure_future(io.aclose()) for _ in range(2)]
                await turns()
                assert not closing[0].done()
                with pytest.raises(CkptpipeError, match="the I/O engine is closed"):
                    io.read(source, lease, 1, -1, "pipe")
                closing[0].cancel()
                await turns()
                os.write(sink, b"12")
                assert await asyncio.gather(*reads) == [1, 1]
                with pytest.raises(asyncio.CancelledError):
                    await closing[0]
                await closing[1]
                await io.aclose()
                with pytest.raises(CkptpipeError, match="closed"):
                    io.fsync(source, "pipe")

    run(main(), loop)


def test_a_read_that_never_ends(kind: EngineName, loop: str) -> None:
    """`aclose` gives up with a clear error, frees nothing that the kernel has, and can be called again."""

    async def main() -> None:
        async with engine(kind) as io:
            with ring(1) as staging, pipe() as (source, sink):
                with await staging.acquire() as lease:
                    reading = io.read(source, lease, 1, -1, "/mnt/hung/pipe")
                await turns()
                io.patience = 0.05
                with pytest.raises(StuckIo, match=r"1 I/O operations \(read /mnt/hung/pipe\)") as caught:
                    await io.aclose()
                assert "kernel's log" in caught.value.cure
                assert (io.inflight, staging.in_use) == (1, 1)
                with pytest.raises(StuckIo):
                    await io.drain(source)
                os.write(sink, b"x")
                assert await reading == 1
                await io.aclose()

    run(main(), loop)


def test_group_of_tasks_is_cancelled_in_the_middle(kind: EngineName, loop: str) -> None:
    """One task fails; the rest are cancelled with operations in the kernel and in the queue."""

    async def main() -> None:
        async with engine(kind, depth=2) as io:
            with ring(6) as staging, pipe() as (source, sink):

                async def one() -> None:
                    with await staging.acquire() as lease:
                        await io.read(source, lease, 1, -1, "pipe")

                async def fail() -> None:
                    await turns()
                    raise ZeroDivisionError

                with pytest.raises(ExceptionGroup) as caught:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(6):
                            group.create_task(one())
                        group.create_task(fail())
                assert caught.group_contains(ZeroDivisionError)
                assert (io.inflight, staging.in_use) == (2, 2)
                os.write(sink, b"12")
                await io.drain(source)
                assert staging.in_use == 0

    run(main(), loop)
