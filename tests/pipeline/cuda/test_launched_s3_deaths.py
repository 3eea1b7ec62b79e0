"""Launched processes and a real S3 server: deaths on either side while one is saved or restored, and cycles over a bad network."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptpipe
from ckptpipe.pipeline.cuda.launched_pool import LaunchedPool
from ckptpipe.pyx.staging import leaked, outstanding
from tests.pipeline.cuda.early import CHECKPOINT
from tests.pipeline.cuda.launched import Launch, launch
from tests.pipeline.cuda.launched_s3 import (
    ALWAYS,
    ROOMY,
    UNLOCK,
    Bucket,
    before_chunk,
    bucket,
    nothing_is_held,
    proxy,
    reading,
    restore,
    same,
)
from tests.pipeline.cuda.runs import recover, runs, save, saving
from tests.pipeline.cuda.test_early_start import ENDED, RESTORE
from tests.pipeline.runs import run
from tests.preload.launched import MIB, Launched
from tests.services.fault_proxy import Fault, FaultProxy
from tests.simcuda import SimWorld

__all__ = ["bucket", "launch", "proxy"]

pytestmark = pytest.mark.s3


PRELUDE = """
import asyncio, sys, ckptpipe
from ckptpipe.pipeline.spec import SinkSpec
pid, url, endpoint = int(sys.argv[1]), sys.argv[2], sys.argv[3]
settings = ckptpipe.Settings(chunk_bytes=256 << 10, ring_bytes=16 << 20, workers=2)
options = {"part_bytes": 5 << 20, "endpoint_url": endpoint, "stall_timeout": 600.0}
"""
SAVE = """
to = SinkSpec(url, options=options)
asyncio.run(ckptpipe.save(pid=pid, to=to, name="a", evict=True, capture="launch", settings=settings))
"""
BACK = """
asyncio.run(ckptpipe.restore(url + "/a", pid=pid, early_start=True, options=options, settings=settings))
"""


@contextlib.contextmanager
def started(
    world: SimWorld, script: str, it: Launched, bucket: Bucket, proxy: FaultProxy
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own that saves or restores; killed at the end."""
    command = [sys.executable, "-c", PRELUDE + script, str(it.pid), bucket.url, proxy.endpoint_url]
    with subprocess.Popen(command, env=world.environment()) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize("at", ["the driver works", "the driver is done"])
def test_a_saver_that_is_killed(
    world: SimWorld, launch: Launch, bucket: Bucket, proxy: FaultProxy, runtime: Path, at: str
) -> None:
    it = launch()
    point = "middle" if at == "the driver works" else "after"
    held = world.fault(CHECKPOINT, point=point, hold=True, target=it.pid)
    part = proxy.add(Fault(b"partNumber=2", stall_request_after=MIB, times=ALWAYS))
    with started(world, SAVE, it, bucket, proxy) as saver:
        held.wait()
        assert part.struck.wait(60)
        if at == "the driver is done":
            held.release()
            it.until(lambda _: not it.page.pool().armed)
        saver.send_signal(signal.SIGKILL)
        saver.wait()
    held.release()
    it.until(lambda _: world.process(it.pid).state == "CHECKPOINTED")
    nothing_is_held(it)
    found = run(ckptpipe.target_state(it.pid))
    assert (found.state, found.capture, found.worker, found.images) == ("CHECKPOINTED", "launch", None, [])
    assert "recover" in found.way_back
    assert recover(it.target).actions == ["restored it from its own memory"]
    runs(world, it.target, runtime)
    assert bucket.uploads(), "what it left"
    run(ckptpipe.gc(bucket.url, older_than=0.0))
    assert (bucket.keys(), bucket.uploads()) == ([], [])
    save(it.pid, bucket.sink(), capture="launch", evict=True, settings=ROOMY)
    restore(bucket, it)
    runs(world, it.target, runtime)


def test_a_restorer_that_is_killed_while_the_driver_waits(
    world: SimWorld, launch: Launch, bucket: Bucket, proxy: FaultProxy
) -> None:
    """Nobody feeds the driver any more: it ends its process, which says why, rather than wait for ever."""
    it = launch(errors=subprocess.DEVNULL)
    save(it.pid, bucket.sink(), capture="launch", evict=True, settings=ROOMY)
    proxy.add(Fault(b"Range: bytes=8388608-", stall_answer_after=1000, times=ALWAYS))
    unlocks = world.calls(UNLOCK)
    with started(world, BACK, it, bucket, proxy) as restorer:
        it.until(lambda pool: pool.gate_waiters > 0 and it.page.images()[0].read > 0)
        restorer.send_signal(signal.SIGKILL)
        restorer.wait()
    it.page.deadlines(still=60, orphaned=0.2)
    assert it.target.wait() == ENDED and "nobody feeds it" in it.page.pool().failure
    assert world.calls(UNLOCK) == unlocks
    with pytest.raises(ckptpipe.TargetGone):
        restore(bucket, it)
    run(ckptpipe.verify(f"{bucket.url}/a", settings=ROOMY))


@pytest.mark.parametrize("how", ["early", "late", "recover"])
def test_another_restorer_takes_over(
    world: SimWorld, launch: Launch, bucket: Bucket, proxy: FaultProxy, runtime: Path, how: str
) -> None:
    """The driver still waits: what is missing comes from somebody else."""
    it = launch()
    save(it.pid, bucket.sink(), capture="launch", evict=True, settings=ROOMY)
    proxy.add(Fault(b"Range: bytes=8388608-", stall_answer_after=1000))
    with started(world, BACK, it, bucket, proxy) as restorer:
        it.until(lambda pool: pool.gate_waiters > 0 and it.page.images()[0].read > 0)
        it.page.deadlines(still=60, orphaned=60)
        restorer.send_signal(signal.SIGKILL)
        restorer.wait()
    it.until(lambda pool: pool.feeders == 0)
    assert it.page.images()[0].phase == "reading"
    if how == "recover":
        recover(it.target)
    else:
        restore(bucket, it, early=how == "early")
    runs(world, it.target, runtime)
    nothing_is_held(it)


def test_a_restorer_that_is_killed_before_it_asks_the_driver(
    world: SimWorld, launch: Launch, bucket: Bucket, proxy: FaultProxy, runtime: Path
) -> None:
    it = launch()
    save(it.pid, bucket.sink(), capture="launch", evict=True, settings=ROOMY)
    stalled = proxy.add(Fault(b"Range: bytes=0-", stall_answer_after=1000))
    with started(world, BACK, it, bucket, proxy) as restorer:
        assert stalled.struck.wait(60)
        restorer.send_signal(signal.SIGKILL)
        restorer.wait()
    nothing_is_held(it)
    assert world.calls(RESTORE) == 0
    found = run(ckptpipe.target_state(it.pid))
    assert (found.state, found.images) == ("CHECKPOINTED", [f"{bucket.url}/a"])
    restore(bucket, it)
    runs(world, it.target, runtime)


def test_a_target_that_is_killed_while_it_is_saved(
    world: SimWorld, launch: Launch, bucket: Bucket, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = launch()
    part = proxy.add(Fault(b"partNumber=2"))

    async def main() -> None:
        fault = world.fault(CHECKPOINT, point="middle", hold=True, target=it.pid)
        task = asyncio.create_task(
            saving(it.pid, bucket.sink(proxy), capture="launch", evict=True, settings=ROOMY)
        )
        await asyncio.to_thread(fault.wait)
        assert await asyncio.to_thread(part.struck.wait, 60)
        os.kill(it.pid, signal.SIGKILL)
        with pytest.raises(ckptpipe.TargetGone, match="ended"):
            await task

    asyncio.run(main())
    assert (bucket.keys(), bucket.uploads()) == ([], [])
    assert outstanding() == 0 and leaked() == 0


def test_a_target_that_is_killed_while_its_image_arrives(
    world: SimWorld, launch: Launch, bucket: Bucket, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = launch()
    save(it.pid, bucket.sink(), capture="launch", evict=True, settings=ROOMY)
    before_chunk(monkeypatch, 30, lambda: (reading(it), os.kill(it.pid, signal.SIGKILL)))
    with pytest.raises(ckptpipe.TargetGone):
        restore(bucket, it, proxy)
    assert outstanding() == 0 and leaked() == 0
    assert bucket.keys() and bucket.uploads() == []


def test_a_target_that_is_killed_while_it_is_evicted(
    world: SimWorld, launch: Launch, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image is durable by then, and stays."""
    it = launch()
    evicted = LaunchedPool.evict

    def killed(self: LaunchedPool, *arguments: Any) -> int:
        os.kill(it.pid, signal.SIGKILL)
        it.target.wait()
        return evicted(self, *arguments)

    monkeypatch.setattr(LaunchedPool, "evict", killed)
    with contextlib.suppress(ckptpipe.TargetGone):
        save(it.pid, bucket.sink(), capture="launch", evict=True, settings=ROOMY)
    run(ckptpipe.verify(f"{bucket.url}/a", settings=ROOMY))
    assert outstanding() == 0 and leaked() == 0


def test_cycles_over_a_network_that_breaks(
    world: SimWorld, launch: Launch, bucket: Bucket, proxy: FaultProxy, workdir: Path, runtime: Path
) -> None:
    it = launch(SIMCUDA_REWRITES="4")
    for cycle in range(4):
        proxy.add(Fault(b"partNumber=2", cut_request_after=MIB))
        options: dict[str, Any] = {"compress": "zstd:1" if cycle == 1 else "none", "settings": ROOMY}
        save(it.pid, bucket.sink(proxy), capture="launch", evict=True, overwrite=True, **options)
        same(bucket.fetch(workdir / f"{cycle}"), it)
        proxy.add(Fault(b"Range: bytes=", cut_answer_after=100_000, times=3))
        restore(bucket, it, proxy)
        runs(world, it.target, runtime)
        nothing_is_held(it)
    state = it.page.pool()
    assert (state.served, state.returned, state.fallbacks) == (4, 4, 0)
    assert all(fault.seen == fault.times for fault in proxy.faults)
