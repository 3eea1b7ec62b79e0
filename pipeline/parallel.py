"""Tasks of one kind side by side, and the error that matters of those that a group of tasks had."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


async def in_parallel(count: int, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run ``count`` tasks of the coroutine function ``work``; the first error is raised as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that matters of a group: the first that is not itself a group."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
