"""Work that must end once it has begun."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ckptpipe.storage_backends.shielded import in_thread, shielded


def test_a_result_and_an_error_pass() -> None:
    async def work(fail: bool) -> int:
        if fail:
            raise KeyError("x")
        return 7

    assert asyncio.run(shielded(work(False))) == 7
    with pytest.raises(KeyError):
        asyncio.run(shielded(work(True)))


def test_a_cancelled_caller_waits_for_the_end_however_often_it_is_cancelled() -> None:
    async def main() -> None:
        gate, ended = asyncio.Event(), False

        async def work() -> None:
            nonlocal ended
            await gate.wait()
            ended = True

        task = asyncio.create_task(shielded(work()))
        for _ in range(3):
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended

    asyncio.run(main())


def test_an_error_after_a_cancellation_is_its_cause() -> None:
    async def main() -> None:
        gate = asyncio.Event()

        async def work() -> None:
            await gate.wait()
            raise KeyError("x")

        task = asyncio.create_task(shielded(work()))
        await asyncio.sleep(0)
        task.cancel()
        gate.set()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert isinstance(caught.value.__cause__, KeyError)

    asyncio.run(main())


def test_a_time_out_still_is_one() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await shielded(asyncio.sleep(0.01))

    asyncio.run(main())


def test_what_a_cancelled_caller_never_sees_is_given_back() -> None:
    async def main() -> list[str]:
        gate = threading.Event()
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()
        undone: list[str] = []

        def open_thing() -> str:
            loop.call_soon_threadsafe(begun.set)
            gate.wait()
            return "descriptor"

        task = asyncio.create_task(in_thread(open_thing, undo=undone.append))
        await begun.wait()
        task.cancel()
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await in_thread(lambda: 3, undo=lambda _: undone.append("no")) == 3
        return undone

    assert asyncio.run(main()) == ["descriptor"]
