"""Work that must end once it has begun, whatever happens to the task that waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end. A cancellation that comes meanwhile is raised afterwards."""
    task = asyncio.get_running_loop().create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    return task.result()


async def in_thread(
    function: Callable[..., T], *arguments: object, undo: Callable[[T], object] | None = None
) -> T:
    """``function(*arguments)`` on a thread, waited for also when cancelled: its outcome is always known.

    ``undo(result)`` then gives back what a cancelled caller will never see (a descriptor, a file).
    """
    result: list[T] = []

    async def call() -> T:
        result.append(await asyncio.to_thread(function, *arguments))
        return result[0]

    try:
        return await shielded(call())
    except asyncio.CancelledError:
        if undo is not None and result:
            await shielded(asyncio.to_thread(undo, result[0]))
        raise
