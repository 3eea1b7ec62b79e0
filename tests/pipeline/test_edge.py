"""Edges: bounds, order, ends, drops, and cancelled waiters."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ckptpipe.pipeline.chunk import Chunk
from ckptpipe.pipeline.edge import Edge, EdgeDropped, Outlet
from ckptpipe.pyx.staging import StagingRing, outstanding
from tests.pipeline.runs import run


def zero(number: int) -> Chunk:
    return Chunk(0, number, 4096, 0, None)


async def until_waiting(*tasks: asyncio.Task[Any]) -> None:
    """Let every task run until it waits for something."""
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)


def test_chunks_come_out_in_the_order_they_went_in() -> None:
    async def main() -> list[int]:
        edge = Edge(2)

        async def send() -> None:
            for number in range(100):
                await edge.put(zero(number))
            edge.end()

        got = []
        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            while (chunk := await edge.get()) is not None:
                got.append(chunk.number)
        return got

    assert run(main()) == list(range(100))


def test_a_full_edge_holds_its_sender() -> None:
    async def main() -> None:
        edge = Edge(2)
        await edge.put(zero(0))
        await edge.put(zero(1))
        assert edge.full
        third = asyncio.create_task(edge.put(zero(2)))
        await until_waiting(third)
        chunk = await edge.get()
        assert chunk is not None and chunk.number == 0
        await third
        assert edge.full

    run(main())


def test_end_lets_every_receiver_finish_what_is_queued() -> None:
    async def main() -> None:
        edge = Edge(4)
        getters = [asyncio.create_task(edge.get()) for _ in range(3)]
        await until_waiting(*getters)
        await edge.put(zero(7))
        edge.end()
        got = await asyncio.gather(*getters)
        assert sorted(chunk.number if chunk else -1 for chunk in got) == [-1, -1, 7]
        assert await edge.get() is None

    run(main())


def test_drop_releases_what_is_queued_and_refuses_what_comes() -> None:
    async def main() -> None:
        ring = StagingRing(2, 4096)
        edge = Edge(1)
        await edge.put(Chunk(0, 0, 4096, 0, await ring.acquire()))
        chunk = Chunk(0, 1, 4096, 0, await ring.acquire())
        sender = asyncio.create_task(edge.put(chunk))
        await until_waiting(sender)
        edge.drop()
        with pytest.raises(EdgeDropped):
            await sender
        assert edge.dropped
        assert ring.in_use == 1, "the refused chunk stays with its sender"
        chunk.release()
        assert await edge.get() is None
        ring.close()

    run(main())


def test_a_cancelled_receiver_passes_its_wake_up_on() -> None:
    async def main() -> None:
        edge = Edge(1)
        first = asyncio.create_task(edge.get())
        second = asyncio.create_task(edge.get())
        await until_waiting(first, second)
        await edge.put(zero(3))  # wakes the first, which is cancelled before it runs
        first.cancel()
        chunk = await asyncio.wait_for(second, 5)
        assert chunk is not None and chunk.number == 3
        assert first.cancelled()

    run(main())


def test_a_cancelled_sender_passes_its_wake_up_on() -> None:
    async def main() -> None:
        edge = Edge(1)
        await edge.put(zero(0))
        first = asyncio.create_task(edge.put(zero(1)))
        second = asyncio.create_task(edge.put(zero(2)))
        await until_waiting(first, second)
        await edge.get()
        first.cancel()
        await asyncio.wait_for(second, 5)
        chunk = await edge.get()
        assert chunk is not None and chunk.number == 2

    run(main())


def test_a_fan_out_gives_each_edge_a_lease_of_its_own() -> None:
    async def main() -> None:
        ring = StagingRing(1, 4096)
        edges = [Edge(1), Edge(1), Edge(1)]
        edges[1].drop()
        outlet = Outlet(edges)
        await outlet.emit(Chunk(0, 0, 4096, 0, await ring.acquire()))
        left, right = await edges[0].get(), await edges[2].get()
        assert left is not None and right is not None
        left.release()
        assert ring.try_acquire() is None, "the other branch still has the slot"
        right.release()
        slot = ring.try_acquire()
        assert slot is not None
        slot.release()
        ring.close()

    run(main())


@pytest.mark.parametrize("blocked", [0, 1])
def test_a_cancelled_emit_leaves_no_lease(blocked: int) -> None:
    async def main() -> None:
        before = outstanding()
        ring = StagingRing(2, 4096)
        edges = [Edge(1), Edge(1)]
        await edges[blocked].put(zero(0))
        task = asyncio.create_task(Outlet(edges).emit(Chunk(0, 1, 4096, 0, await ring.acquire())))
        await until_waiting(task)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for edge in edges:
            edge.drop()
        assert ring.in_use == 0 and outstanding() == before
        ring.close()

    run(main())


def test_an_outlet_is_dropped_when_all_of_its_edges_are() -> None:
    edges = [Edge(1), Edge(1)]
    outlet = Outlet(edges)
    edges[0].drop()
    assert not outlet.dropped
    edges[1].drop()
    assert outlet.dropped
