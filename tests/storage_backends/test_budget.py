"""The byte budget: order, exactness, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptpipe.storage_backends.budget import ByteBudget


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def call() -> None:
        await main()

    asyncio.run(call())


def test_first_come_first_served() -> None:
    async def main() -> None:
        budget = ByteBudget(10)
        await budget.acquire(6)
        order: list[int] = []

        async def take(nbytes: int) -> None:
            await budget.acquire(nbytes)
            order.append(nbytes)

        async with asyncio.TaskGroup() as group:
            for nbytes in (5, 1, 4):  # 1 would fit, and waits for its turn
                group.create_task(take(nbytes))
            await asyncio.sleep(0)
            assert (budget.held, budget.waiting, order) == (6, 3, [])
            budget.release(6)
        assert order == [5, 1, 4]
        assert (budget.held, budget.peak) == (10, 10)
        budget.release(10)

    run(main)


def test_more_than_the_whole_budget_passes_alone() -> None:
    async def main() -> None:
        budget = ByteBudget(10)
        await budget.acquire(1)
        large = asyncio.create_task(budget.acquire(25))
        await asyncio.sleep(0)
        assert not large.done()
        budget.release(1)
        await large
        small = asyncio.create_task(budget.acquire(1))
        await asyncio.sleep(0)
        assert not small.done()
        budget.release(25)
        await small
        assert budget.held == 1

    run(main)


def test_a_cancelled_waiter_lets_the_next_pass() -> None:
    async def main() -> None:
        budget = ByteBudget(10)
        await budget.acquire(8)
        large, small = (asyncio.create_task(budget.acquire(nbytes)) for nbytes in (9, 2))
        await asyncio.sleep(0)
        large.cancel()
        await small
        assert (budget.held, budget.waiting) == (10, 0)
        assert large.cancelled()

    run(main)


def test_bytes_granted_to_a_task_cancelled_in_that_moment_go_back() -> None:
    async def main() -> None:
        budget = ByteBudget(10)
        await budget.acquire(10)
        waiter = asyncio.create_task(budget.acquire(4))
        await asyncio.sleep(0)
        budget.release(10)  # granted, and the task has not run yet
        assert budget.held == 4
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert budget.held == 0

    run(main)


def test_eviction_fails_only_the_owner() -> None:
    async def main() -> None:
        budget = ByteBudget(10)
        await budget.acquire(10)
        mine, theirs = object(), object()
        tasks = [asyncio.create_task(budget.acquire(1, owner)) for owner in (mine, theirs, mine)]
        await asyncio.sleep(0)
        budget.evict(mine, RuntimeError("aborted"))
        results = await asyncio.gather(tasks[0], tasks[2], return_exceptions=True)
        assert [str(result) for result in results] == ["aborted", "aborted"]
        budget.release(10)
        await tasks[1]
        assert budget.held == 1

    run(main)


def test_misuse_is_found() -> None:
    with pytest.raises(ValueError, match="lets nothing pass"):
        ByteBudget(0)
    with pytest.raises(RuntimeError, match="given back"):
        ByteBudget(1).release(1)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3), st.booleans()), min_size=1, max_size=30),
    st.integers(1, 20),
)
def test_whatever_happens_the_budget_ends_empty(steps: list[tuple[int, int, bool]], limit: int) -> None:
    async def main() -> None:
        budget = ByteBudget(limit)

        async def use(nbytes: int, turns: int) -> None:
            await budget.acquire(nbytes)
            try:
                assert budget.held <= max(limit, nbytes)
                for _ in range(turns):
                    await asyncio.sleep(0)
            finally:
                budget.release(nbytes)

        tasks = []
        for nbytes, turns, cancelled in steps:
            tasks.append(asyncio.create_task(use(nbytes, turns)))
            await asyncio.sleep(0)
            if cancelled:
                tasks[len(tasks) // 2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (budget.held, budget.waiting) == (0, 0)

    run(main)
