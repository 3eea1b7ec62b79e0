"""A request that changes the store, once sent, is waited for also when its task is cancelled.

Its outcome would be unknown otherwise: a PUT that the server has in hand can land after the DELETE that was
to undo it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from ckptpipe.storage_backends.shielded import shielded

T = TypeVar("T")
_GRACE = 10.0  # seconds; a store that does not answer must not hold a cancellation up for long


async def see_through(work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.get_running_loop().create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await shielded(_end(task))
        raise


async def _end(task: asyncio.Task[Any]) -> None:
    await asyncio.wait({task}, timeout=_GRACE)
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # seen: the cancellation is what is raised
