"""The event loops that the engine must run under, and a way to run one coroutine on one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
import uvloop

T = TypeVar("T")
LoopFactory = Callable[[], asyncio.AbstractEventLoop]

each_loop = pytest.mark.parametrize(
    "loop_factory",
    [pytest.param(asyncio.new_event_loop, id="asyncio"), pytest.param(uvloop.new_event_loop, id="uvloop")],
)


def run(coroutine: Coroutine[Any, Any, T], loop_factory: LoopFactory | None = None) -> T:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(coroutine)


async def turns(count: int = 3) -> None:
    """Let everything that is ready run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool], within: float = 30.0) -> None:
    """Let the loop run until ``condition`` holds; a failure after ``within`` seconds."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0)
