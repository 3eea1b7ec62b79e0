"""What the capture tests share: settings, saves and restores, and how a test looks at a target afterwards."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import ckptpipe
from ckptpipe.pipeline.cuda import open_operations
from ckptpipe.pipeline.cuda.driver import CudaDriver
from tests.simcuda import STALLED, Fault, SimWorld, Target

KIB = 1 << 10
SETTINGS = ckptpipe.Settings(chunk_bytes=256 * KIB, ring_bytes=4 << 20, workers=2)
Spawn = Callable[..., Target]


def save(target: Target | int, to: object, **options: Any) -> ckptpipe.SaveResult:
    """Save one target as the image "a"."""
    return asyncio.run(saving(target, to, **options))


async def saving(target: Target | int, to: object, **options: Any) -> ckptpipe.SaveResult:
    pid = target if isinstance(target, int) else target.pid
    options = {"name": "a", "settings": SETTINGS} | options
    return await ckptpipe.save(pid=pid, to=to, **options)  # type: ignore[arg-type]


def restore(url: object, target: Target, **options: Any) -> ckptpipe.ReadResult:
    return asyncio.run(ckptpipe.restore(str(url), pid=target.pid, **({"settings": SETTINGS} | options)))


def recover(target: Target, **options: Any) -> ckptpipe.RecoverResult:
    return asyncio.run(ckptpipe.recover(target.pid, **({"settings": SETTINGS} | options)))


def abandon(pid: int) -> None:
    async def main() -> None:
        async with await CudaDriver.open() as driver:
            await open_operations.abandon(driver, pid)

    asyncio.run(main())


def runs(world: SimWorld, target: Target, runtime: Path) -> None:
    """The target is RUNNING with its memory as it was, and nothing is kept of it."""
    assert world.process(target.pid).state == "RUNNING"
    target.check()
    assert target.pid not in open_operations.pids()
    folder = runtime / "targets"
    assert not folder.is_dir() or list(folder.iterdir()) == []


def images(*places: Path) -> list[Path]:
    """Files that saves have left in these folders."""
    return [path for place in places if place.exists() for path in place.rglob("*") if path.is_file()]


async def until_held(fault: Fault) -> None:
    await asyncio.to_thread(fault.wait)


async def cancelled_while_the_gpu_fetches(world: SimWorld, work: Coroutine[Any, Any, object]) -> None:
    """Cancel a restore while GPU 0 reads its host buffers: it stays until the GPU has done with them."""
    copies = world.calls("cuMemcpyHtoDAsync")
    world.link(0, to_device=STALLED)
    task = asyncio.ensure_future(work)
    while world.calls("cuMemcpyHtoDAsync") < copies + 2:
        await asyncio.to_thread(os.sched_yield)
        assert not task.done()
    task.cancel()
    for _ in range(20):
        await asyncio.to_thread(os.sched_yield)
    assert not task.done(), "the GPU still reads the buffers"
    world.link(0, to_device=0)
    with pytest.raises(asyncio.CancelledError):
        await task
