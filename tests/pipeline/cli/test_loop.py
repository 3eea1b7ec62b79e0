"""`pipeline.loop.run`: one loop a call; signals cancel once and wait for the clean-up."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.interrupted import Interrupted
from ckptpipe.pipeline.loop import SIGNALS, run


def dispositions() -> list[Any]:
    return [signal.getsignal(number) for number in SIGNALS]


def test_gives_back_the_result_and_the_signals() -> None:
    before = dispositions()

    async def work() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert run(work) == "uvloop"
    assert dispositions() == before


def test_asyncio_where_uvloop_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "uvloop", None)

    async def work() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert run(work).startswith("asyncio")


def test_errors_come_through() -> None:
    async def work() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run(work)


@pytest.mark.usefixtures("hangup_heeded")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_cancels_once_and_waits(number: signal.Signals) -> None:
    before = dispositions()
    steps: list[str] = []
    notices: list[str] = []

    second = asyncio.Event()

    def notice(text: str) -> None:
        notices.append(text)
        if len(notices) == 2:
            second.set()

    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        finally:
            steps.append("clean-up begun")
            os.kill(os.getpid(), number)
            await second.wait()  # the second signal reaches us through the loop
            steps.append("clean-up done")

    with pytest.raises(Interrupted) as caught:
        run(work, notice=notice)
    assert steps == ["clean-up begun", "clean-up done"]
    assert notices == [
        f"{number.name} received: cleaning up, please wait",
        "still cleaning up, please wait",
    ]
    assert (caught.value.signal, caught.value.exit_code) == (number, 128 + number)
    assert isinstance(caught.value, KeyboardInterrupt)
    assert dispositions() == before


def test_a_failing_clean_up_does_not_hide_the_signal() -> None:
    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            raise OSError("could not be removed")

    with pytest.raises(Interrupted) as caught:
        run(work, notice=lambda _: None)
    assert isinstance(caught.value.__cause__, OSError)


def test_work_that_is_done_in_spite_of_a_signal_is_done() -> None:
    async def work() -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "committed"
        raise AssertionError

    assert run(work, notice=lambda _: None) == "committed"


def test_an_ignored_signal_stays_ignored() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:

        async def work() -> str:
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0)
            return "went on"

        assert run(work) == "went on"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_after_the_last_result_signals_are_ignored() -> None:
    before = dispositions()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])

    async def work() -> str:
        return "done"

    async def fails() -> None:
        raise ValueError("mine")

    try:
        with pytest.raises(ValueError, match="mine"):
            run(fails, last=True)
        assert dispositions() == before
        assert run(work, last=True) == "done"
        assert dispositions() == [signal.SIG_IGN] * len(SIGNALS)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
        for number in SIGNALS:
            os.kill(os.getpid(), number)
    finally:
        for number, what in zip(SIGNALS, before, strict=True):
            signal.signal(number, what)


def test_other_threads_may_run_too() -> None:
    def in_thread(work: Callable[[], Any]) -> Any:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(run(work)))
        thread.start()
        thread.join()
        return results[0]

    async def work() -> int:
        return 7

    assert in_thread(work) == 7


def test_inside_a_loop_it_says_what_to_do() -> None:
    async def inner() -> None:
        return None

    async def outer() -> None:
        run(inner)

    with pytest.raises(UsageError, match="await the asynchronous function"):
        run(outer)
