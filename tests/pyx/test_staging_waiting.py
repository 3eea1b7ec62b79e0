"""An exhausted ring: who waits, who is woken, and that no slot is ever lost."""

from __future__ import annotations

import asyncio
import gc
import random
import threading

import pytest

from ckptpipe.pyx.staging import Lease, StagingRing, outstanding
from tests.pyx.loops import LoopFactory, each_loop, run, turns, until

SLOT = 4096


@each_loop
def test_an_exhausted_ring_suspends_and_serves_in_order(loop_factory: LoopFactory) -> None:
    async def main() -> None:
        ring = StagingRing(2, SLOT)
        held = [await ring.acquire(), await ring.acquire()]
        order: list[int] = []

        async def ask(number: int) -> None:
            with await ring.acquire():
                order.append(number)

        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(ask(number))
            await turns()
            assert ring.waiting == 20
            assert order == []
            assert ring.try_acquire() is None
            held.pop().release()
            assert ring.try_acquire() is None  # it belongs to the first who waits
            await until(lambda: len(order) == 20)
        assert order == list(range(20))
        assert (ring.free, ring.waiting) == (1, 0)
        held.pop().release()
        ring.close()

    run(main(), loop_factory)


@each_loop
def test_a_cancelled_waiter_gives_its_place_up(loop_factory: LoopFactory) -> None:
    async def main() -> None:
        ring = StagingRing(1, SLOT)
        lease = await ring.acquire()
        first, second, third = (asyncio.create_task(ring.acquire()) for _ in range(3))
        await turns()
        second.cancel()
        await turns()
        assert ring.waiting == 2
        lease.release()
        got = await first
        assert ring.waiting == 1
        got.release()
        (await third).release()
        assert second.cancelled()
        assert ring.free == 1
        ring.close()

    run(main(), loop_factory)


@each_loop
def test_cancelled_in_the_moment_the_slot_was_handed_over(loop_factory: LoopFactory) -> None:
    async def main() -> None:
        ring = StagingRing(1, SLOT)
        lease = await ring.acquire()
        first = asyncio.create_task(ring.acquire())
        second = asyncio.create_task(ring.acquire())
        await turns()
        lease.release()  # the first one's future is set now
        first.cancel()  # and it never gets to see it
        got = await second
        assert first.cancelled()
        got.release()

        # The same with nobody behind: the slot is free again.
        lease = await ring.acquire()
        alone = asyncio.create_task(ring.acquire())
        await turns()
        lease.release()
        alone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await alone
        assert ring.free == 1

        # The other way round: cancelled first, and released before the task has run.
        lease = await ring.acquire()
        alone = asyncio.create_task(ring.acquire())
        behind = asyncio.create_task(ring.acquire())
        await turns()
        alone.cancel()
        lease.release()
        (await behind).release()
        assert ring.free == 1
        ring.close()

    run(main(), loop_factory)


@each_loop
def test_a_timeout_around_acquire(loop_factory: LoopFactory) -> None:
    async def main() -> None:
        ring = StagingRing(1, SLOT)
        lease = await ring.acquire()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await ring.acquire()
        assert ring.waiting == 0
        lease.release()
        assert ring.free == 1
        ring.close()

    run(main(), loop_factory)


@each_loop
def test_a_release_in_another_thread_wakes_the_loop(loop_factory: LoopFactory) -> None:
    async def main() -> None:
        ring = StagingRing(1, SLOT)
        lease = await ring.acquire()
        waiter = asyncio.create_task(ring.acquire())
        await turns()
        thread = threading.Thread(target=lease.release)
        thread.start()
        got = await asyncio.wait_for(waiter, 30)  # nothing else would wake this loop
        thread.join()
        assert got.slot == 0
        view = memoryview(got)
        got.release()
        waiter = asyncio.create_task(ring.acquire())
        await turns()
        thread = threading.Thread(target=view.release)
        thread.start()
        (await asyncio.wait_for(waiter, 30)).release()
        thread.join()
        ring.close()

    run(main(), loop_factory)


@each_loop
def test_two_loops_share_a_ring(loop_factory: LoopFactory) -> None:
    ring = StagingRing(2, SLOT)
    before = outstanding()

    async def take_turns(count: int) -> int:
        done = 0
        for _ in range(count):
            with await ring.acquire() as lease:
                view = memoryview(lease)
                view[:8] = threading.get_ident().to_bytes(8, "little")
                await asyncio.sleep(0)
                assert bytes(view[:8]) == threading.get_ident().to_bytes(8, "little")
                view.release()
                done += 1
        return done

    async def main() -> list[int]:
        return list(await asyncio.gather(*(take_turns(100) for _ in range(4))))

    results: list[list[int]] = []
    threads = [threading.Thread(target=lambda: results.append(run(main(), loop_factory))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[100] * 4] * 3
    assert (ring.free, ring.waiting, outstanding()) == (2, 0, before)
    ring.close()


@each_loop
def test_a_closed_loop_loses_no_slot(loop_factory: LoopFactory) -> None:
    ring = StagingRing(1, SLOT)
    lease = ring.try_acquire()
    assert lease is not None
    loop = loop_factory()
    task = loop.create_task(ring.acquire())
    loop.run_until_complete(turns())
    assert ring.waiting == 1
    loop.close()  # without cancelling: as a crashed program would
    lease.release()
    assert ring.free == 1
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    del task
    gc.collect()
    assert (ring.free, ring.waiting) == (1, 0)

    # And a slot that was handed over, to a task that never ran again.
    lease = ring.try_acquire()
    assert lease is not None
    loop = loop_factory()
    task = loop.create_task(ring.acquire())
    loop.run_until_complete(turns())
    lease.release()
    assert ring.free == 0
    loop.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    del task, loop
    gc.collect()
    assert ring.free == 1
    ring.close()


@each_loop
def test_random_cancellation_loses_nothing(loop_factory: LoopFactory) -> None:
    async def main() -> None:
        rng = random.Random(7)
        ring = StagingRing(3, SLOT)
        owners: dict[int, int] = {}

        async def use(number: int) -> None:
            lease: Lease = await ring.acquire()
            assert lease.slot not in owners
            owners[lease.slot] = number
            try:
                for _ in range(rng.randrange(3)):
                    await asyncio.sleep(0)
            finally:
                assert owners.pop(lease.slot) == number
                lease.release()

        tasks: list[asyncio.Task[None]] = []
        for number in range(600):
            tasks.append(asyncio.create_task(use(number)))
            if rng.random() < 0.5:
                rng.choice(tasks[-20:]).cancel()
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert 0 < sum(isinstance(error, asyncio.CancelledError) for error in results) < 600
        assert not [error for error in results if isinstance(error, Exception)]
        assert (ring.free, ring.waiting) == (3, 0)
        ring.close()

    before = outstanding()
    run(main(), loop_factory)
    assert outstanding() == before


def test_acquire_on_a_closed_ring() -> None:
    ring = StagingRing(1, SLOT)
    ring.close()
    with pytest.raises(RuntimeError, match="closed"):
        run(ring.acquire())
