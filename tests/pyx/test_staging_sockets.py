"""A slot that a socket still has to send is not free, whoever released what and whichever task was cancelled."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator

import pytest

from ckptpipe.pyx.staging import Lease, StagingRing, outstanding
from tests.pyx.loops import LoopFactory, each_loop, run, turns, until

SLOT = 4 << 20  # far more than a socket's buffers take
PATTERN = bytes(range(251))


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
    yield ours, theirs
    ours.close()
    theirs.close()


def filled(lease: Lease) -> bytes:
    data = (PATTERN * (SLOT // len(PATTERN) + 1))[:SLOT]
    memoryview(lease)[:] = data
    return data


async def drained(theirs: socket.socket, nbytes: int) -> bytes:
    received = bytearray()
    while len(received) < nbytes:
        piece = await asyncio.get_running_loop().sock_recv(theirs, 1 << 20)
        assert piece, "the sender went away"
        received += piece
    return bytes(received)


@each_loop
def test_a_transport_that_still_queues_a_view_keeps_the_slot(
    loop_factory: LoopFactory, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair

    async def main() -> None:
        loop = asyncio.get_running_loop()
        ring = StagingRing(1, SLOT)
        lease = await ring.acquire()
        expected = filled(lease)
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
        writing = asyncio.Event()

        async def send() -> None:
            with lease:
                transport.write(memoryview(lease))
                writing.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(send())
        await writing.wait()
        task.cancel()  # the task that leased the slot is gone, and its lease with it
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        assert lease.released
        assert transport.get_write_buffer_size() > 0
        # asyncio before 3.12 copies what it queues, so that the slot may go; everybody else keeps the view.
        if type(loop).__module__.startswith("uvloop") or sys.version_info >= (3, 12):
            assert ring.free == 0
        taker = asyncio.create_task(ring.acquire())
        await turns()
        if taker.done():
            memoryview(taker.result())[:] = b"\xff" * SLOT
        assert await drained(theirs, SLOT) == expected
        again = await asyncio.wait_for(taker, 30)
        again.release()
        transport.close()
        await turns()
        assert ring.free == 1
        ring.close()

    before = outstanding()
    run(main(), loop_factory)
    assert outstanding() == before


@each_loop
def test_a_send_in_flight_keeps_the_slot_until_the_peer_has_read(
    loop_factory: LoopFactory, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair

    async def main() -> None:
        loop = asyncio.get_running_loop()
        ring = StagingRing(1, SLOT)
        lease = await ring.acquire()
        expected = filled(lease)
        sending = asyncio.ensure_future(loop.sock_sendall(ours, memoryview(lease)))
        await turns()
        lease.release()
        taker = asyncio.create_task(ring.acquire())
        await turns()
        assert not taker.done()
        assert ring.free == 0
        assert await drained(theirs, SLOT) == expected
        await sending
        del sending
        (await asyncio.wait_for(taker, 30)).release()
        ring.close()

    before = outstanding()
    run(main(), loop_factory)
    assert outstanding() == before


@each_loop
def test_a_cancelled_send_lets_the_slot_go(
    loop_factory: LoopFactory, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, _ = pair

    async def main() -> None:
        loop = asyncio.get_running_loop()
        ring = StagingRing(1, SLOT)

        async def send() -> None:
            with await ring.acquire() as lease:
                await loop.sock_sendall(ours, memoryview(lease))

        task = asyncio.create_task(send())
        await until(lambda: ring.free == 0)
        await turns()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        await turns()
        assert ring.free == 1
        ring.close()

    before = outstanding()
    run(main(), loop_factory)
    assert outstanding() == before
