"""What Ctrl-C and SIGTERM do before there is an event loop that cancels its work for them.

While modules are imported nothing has begun, so that there is nothing to undo: the process ends at once and without a
word. An exception would do worse: importlib prints those that reach its weak references, and goes on. Until `end_at_once`
has run the interpreter answers, with a traceback: so this module imports next to nothing.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

HEARD = (signal.SIGINT, signal.SIGTERM)


def end_at_once() -> None:
    """From now on these signals end the process, with the exit code that they have in a shell. One that is ignored
    (``nohup``, a job in the background) stays so."""
    for number in HEARD:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


class Raised:
    """Within, those of ``numbers`` that would end the process at once are exceptions: a terminal is put back first."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers = numbers
        self._taken: list[signal.Signals] = []

    def __enter__(self) -> None:
        for number in self._numbers:
            if signal.getsignal(number) is _end:
                # asyncio puts its own handler in place of Python's, and of no other.
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else _raise)
                self._taken.append(number)

    def __exit__(self, *_: object) -> None:
        for number in self._taken:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as a loop leaves it behind the last result
                signal.signal(number, _end)


def _end(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)


def _raise(number: int, _: FrameType | None) -> None:
    from ckptpipe.pipeline.interrupted import Interrupted

    raise Interrupted(number)
