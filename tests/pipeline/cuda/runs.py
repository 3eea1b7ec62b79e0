"""What the capture tests share: settings, saves and restores, and how a test looks at a target afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ckptpipe
from ckptpipe.pipeline.cuda import open_operations
from ckptpipe.pipeline.cuda.driver import CudaDriver
from tests.simcuda import Fault, SimWorld, Target

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
