"""Work that leaves CPUs and disks to others: on a thread of its own, the nicest and in the idle I/O class.

Niceness and I/O class belong to threads on Linux and are inherited by the threads that they start (nptl(7),
ioprio_set(2)). So everything that an operation starts is as modest as its thread, and the caller's process stays as it is.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ckptpipe.pipeline.loop import new_event_loop
from ckptpipe.storage_backends.shielded import shielded

T = TypeVar("T")

NICEST = 19
IDLE = 3 << 13  # IOPRIO_PRIO_VALUE(IOPRIO_CLASS_IDLE, 0)
_SYS_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_WHO_PROCESS = 1  # a thread, where the number is a thread's; 0 is the calling one


async def at_leisure(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``work()`` on a loop and a thread of its own, which yield to everything else. Cancellation reaches it."""
    caller = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = caller.create_future()
    started: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []
    cancelled = threading.Event()

    async def body() -> T:
        task = asyncio.current_task()
        assert task is not None
        started.append((asyncio.get_running_loop(), task))
        if cancelled.is_set():
            raise asyncio.CancelledError
        return await work()

    def settle(set_outcome: Callable[[], object]) -> None:
        if not outcome.done():
            set_outcome()

    def thread() -> None:
        yield_to_all()
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                result = runner.run(body())
        except asyncio.CancelledError:
            caller.call_soon_threadsafe(settle, outcome.cancel)
        except BaseException as error:
            failed = error
            caller.call_soon_threadsafe(settle, lambda: outcome.set_exception(failed))
        else:
            caller.call_soon_threadsafe(settle, lambda: outcome.set_result(result))

    def stop() -> None:
        cancelled.set()
        for loop, task in started:
            try:
                loop.call_soon_threadsafe(task.cancel)
            except RuntimeError:
                pass  # it has just ended

    async def wait() -> None:
        await asyncio.wait({outcome})

    own = threading.Thread(target=thread, name="ckptpipe-leisure")
    own.start()
    try:
        try:
            await asyncio.wait({outcome})
        except asyncio.CancelledError:
            stop()
            await shielded(wait())  # its clean-up is waited for
            raise
    finally:
        own.join()  # it has given its outcome, and only ends
        if outcome.done() and not outcome.cancelled():
            outcome.exception()  # seen, also where the cancellation goes on in its place
    return outcome.result()


def yield_to_all() -> None:
    """Make the calling thread, and all that it will start, the nicest and idle in I/O."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICEST)
    number = _SYS_IOPRIO_SET.get(platform.machine())
    if number is not None:
        # Refused where a container forbids it: the thread is nice all the same.
        ctypes.CDLL(None, use_errno=True).syscall(number, _WHO_PROCESS, 0, IDLE)
