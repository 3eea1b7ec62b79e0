"""One event loop for one blocking call: uvloop where present, signals turned into one cancellation.

`run` is what the command line and the blocking twins share. Ctrl-C, SIGTERM and SIGHUP cancel the call's
task once and wait for its clean-up; a second signal only says that the clean-up is under way.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.interrupted import Interrupted
from ckptpipe.storage_backends.open_limit import open_error

T = TypeVar("T")
Notice = Callable[[str], None]

LOOP_FILES = 12
"""Descriptors that a loop takes at most, its signal handlers and the first import of a module within it included."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A uvloop loop, or asyncio's own where uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def run(function: Callable[[], Awaitable[T]], *, notice: Notice | None = None, last: bool = False) -> T:
    """Call ``function`` on a new loop of this thread and give back what it returns.

    Raises Interrupted where a signal cancelled it, and UsageError where a loop runs in this thread already.
    Signals are caught in the main thread only, and not those that the process ignores (``nohup``).
    ``notice`` gets one line for the user at each signal (default: standard error). ``last``: the process ends after
    this, so once there is a result, signals are ignored: what was done is not to be told as an interruption.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise UsageError(
            "a blocking call was made inside a running event loop",
            cure="await the asynchronous function of the same name instead",
        )
    catcher = _SignalCatcher(notice or _to_stderr)
    _open_standard_descriptors()
    _require_descriptors()
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            try:
                result = runner.run(_watched(function, catcher))
            except BaseException:
                catcher.unwatch()
                raise
            catcher.unwatch(ignore=last)
            return result
    except (asyncio.CancelledError, KeyboardInterrupt) as error:
        if catcher.first is not None:
            raise Interrupted(catcher.first, error) from error
        if isinstance(error, Interrupted) or not isinstance(error, KeyboardInterrupt):
            raise
        raise Interrupted(signal.SIGINT, error) from error  # Ctrl-C before the first step of the task
    except Exception as error:
        # An error of the clean-up itself: the signal stays the reason, the error its cause.
        if catcher.first is not None:
            raise Interrupted(catcher.first, error) from error
        raise


def _open_standard_descriptors() -> None:
    """Where a daemon was started with 0, 1 or 2 closed, /dev/null takes their place: libuv aborts the process
    when its own files get these numbers, and whatever we open would be written to as an error message."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _require_descriptors() -> None:
    """IoError where a loop would find too few: libuv aborts the process, or leaves a loop that cannot be closed."""
    taken: list[int] = []
    try:
        while len(taken) < LOOP_FILES:
            taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise open_error(error, "make", "an event loop") from error
    finally:
        for descriptor in taken:
            os.close(descriptor)


async def _watched(function: Callable[[], Awaitable[T]], catcher: _SignalCatcher) -> T:
    task = asyncio.current_task()
    assert task is not None
    catcher.watch(asyncio.get_running_loop(), task)
    return await function()


class _SignalCatcher:
    """First signal: cancel the task. Later ones: say that the clean-up is under way."""

    def __init__(self, notice: Notice) -> None:
        self.first: signal.Signals | None = None
        self._notice = notice
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._watched: list[signal.Signals] = []
        # Taken before asyncio.Runner puts its own SIGINT callback in. None: set by code outside Python,
        # which could not be put back, so such a signal is left alone; so is one that is ignored.
        self._previous = {}
        if threading.current_thread() is threading.main_thread():
            found = {number: signal.getsignal(number) for number in SIGNALS}
            self._previous = {
                number: what for number, what in found.items() if what not in (None, signal.SIG_IGN)
            }

    def watch(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
        self._loop, self._task = loop, task
        for number in self._previous:
            loop.add_signal_handler(number, self._arrived, number)
            self._watched.append(number)

    def unwatch(self, *, ignore: bool = False) -> None:
        if self._loop is not None:
            # Between the two calls a signal would find the system's default.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, self._watched)
            for number in self._watched:
                self._loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN if ignore else self._previous[number])
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._watched.clear()
        self._loop = self._task = None

    def _arrived(self, number: signal.Signals) -> None:
        again = self.first is not None
        if not again:
            self.first = number
            if self._task is not None:
                self._task.cancel(f"{number.name} received")
        self._notice(
            "still cleaning up, please wait" if again else f"{number.name} received: cleaning up, please wait"
        )


def _to_stderr(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:  # a closed terminal must not stop the clean-up
        pass
