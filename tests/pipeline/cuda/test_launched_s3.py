"""Launched processes and a real S3 server: saved while the driver checkpoints, restored while the image arrives, with
connections cut and stores that stay bad."""

from __future__ import annotations

import asyncio
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckptpipe
from ckptpipe.pipeline.cuda import early_start
from ckptpipe.pipeline.spec import SinkSpec
from ckptpipe.storage_backends.errors import StorageError
from tests.pipeline.cuda.early import CHUNKS, Arrived, again, in_the_middle
from tests.pipeline.cuda.launched import Launch, launch, record
from tests.pipeline.cuda.launched_s3 import (
    ALWAYS,
    ROOMY,
    Bucket,
    before_chunk,
    bucket,
    ended,
    nothing_is_held,
    proxy,
    reading,
    restore,
    same,
)
from tests.pipeline.cuda.runs import SETTINGS, runs, save
from tests.pipeline.cuda.test_early_start import RESTORE
from tests.pipeline.runs import run
from tests.preload.launched import MIB
from tests.services.fault_proxy import Fault, FaultProxy, answer
from tests.simcuda import SimWorld

__all__ = ["bucket", "launch", "proxy"]

pytestmark = pytest.mark.s3


# -- saving while the driver works ----------------------------------------------------------------------


@pytest.mark.parametrize("compress", ["none", "zstd:1"])
def test_parts_go_out_while_the_driver_works_and_late_writes_again(
    world: SimWorld,
    launch: Launch,
    bucket: Bucket,
    proxy: FaultProxy,
    workdir: Path,
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
    compress: str,
) -> None:
    it = launch(SIMCUDA_REWRITES="3")
    begun = proxy.add(Fault(b"partNumber=2"))  # nothing goes wrong with it

    async def part_is_on_its_way() -> None:
        await asyncio.to_thread(begun.struck.wait, 60)

    arrived = Arrived(monkeypatch, 72)
    waited = arrived.enough.wait

    async def enough() -> bool:
        await waited()
        await part_is_on_its_way()
        return True

    monkeypatch.setattr(arrived.enough, "wait", enough)
    options: dict[str, Any] = {"compress": compress, "leave": "checkpointed", "settings": ROOMY}
    result = asyncio.run(in_the_middle(world, it, bucket.sink(proxy), arrived, **options))
    early, late = again(result)
    twice = [number for piece in (0, 2, 4) for number in range(piece * 8, piece * 8 + 8)]
    assert sorted(number for number, version in arrived.chunks if version) == twice
    assert late == len(twice) and early >= 72 and result.chunks == CHUNKS
    run(ckptpipe.verify(f"{bucket.url}/a", settings=ROOMY))
    same(bucket.fetch(workdir), it)
    assert bucket.uploads() == []
    restore(bucket, it)
    runs(world, it.target, runtime)
    nothing_is_held(it)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(b"partNumber=2", cut_request_after=MIB),
        Fault(b"partNumber=1", answer=answer("503 Slow Down")),
        Fault(b"partNumber=2", stall_request_after=MIB),
    ],
    ids=["cut", "slow-down", "stall"],
)
def test_a_part_that_has_to_be_sent_twice(
    world: SimWorld,
    launch: Launch,
    bucket: Bucket,
    proxy: FaultProxy,
    workdir: Path,
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
) -> None:
    it = launch(SIMCUDA_REWRITES="2")
    struck = proxy.add(replace(fault, seen=0))
    to = bucket.sink(proxy, stall_timeout=2.0 if fault.stall_request_after else 30.0)
    result = asyncio.run(in_the_middle(world, it, to, Arrived(monkeypatch, 20), settings=ROOMY))
    assert struck.seen == 1 and result.sinks[0].retries >= 1
    same(bucket.fetch(workdir), it)
    runs(world, it.target, runtime)
    nothing_is_held(it)


@pytest.mark.parametrize(
    ("how", "evict"), [("fails", False), ("fails", True), ("stalls", True), ("refuses the manifest", True)]
)
def test_a_store_that_ends_a_save_leaves_the_process_running(
    world: SimWorld,
    launch: Launch,
    bucket: Bucket,
    proxy: FaultProxy,
    workdir: Path,
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    evict: bool,
) -> None:
    it = launch()
    failed = answer("500 Internal Server Error")
    proxy.add(
        {
            "fails": Fault(b"partNumber=2", answer=failed, times=ALWAYS),
            "stalls": Fault(b"partNumber=2", stall_request_after=MIB, times=ALWAYS),
            "refuses the manifest": Fault(
                b"PUT /%s/x/a/manifest.json" % bucket.name.encode(),
                answer=answer("403 Forbidden"),
                times=ALWAYS,
            ),
        }[how]
    )
    to = bucket.sink(proxy, attempts=2, stall_timeout=1.0)
    options: dict[str, Any] = {"settings": ROOMY, "evict": evict}
    with pytest.raises(StorageError) as caught:
        asyncio.run(in_the_middle(world, it, to, Arrived(monkeypatch, 20), **options))
    assert any("RUNNING again" in note for note in caught.value.__notes__)
    runs(world, it.target, runtime)
    assert (bucket.keys(), bucket.uploads()) == ([], [])
    nothing_is_held(it)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime.parent))
    save(it.pid, workdir, capture="launch", evict=True)
    assert record(runtime, it)["evicted"] is True
    run(ckptpipe.restore(str(workdir / "a"), pid=it.pid, early_start=True, settings=SETTINGS))
    runs(world, it.target, runtime)


def test_a_best_effort_store_that_fails_does_not_keep_it_from_being_evicted(
    world: SimWorld, launch: Launch, bucket: Bucket, proxy: FaultProxy, workdir: Path, runtime: Path
) -> None:
    it = launch()
    proxy.add(Fault(b"partNumber=2", answer=answer("500 Internal Server Error"), times=ALWAYS))
    other = replace(bucket.sink(proxy, attempts=2), policy="best-effort")
    result = save(it.pid, [SinkSpec(str(workdir)), other], capture="launch", evict=True, settings=ROOMY)
    assert [sink.ok for sink in result.sinks] == [True, False]
    assert record(runtime, it)["images"] == [f"nvme:{workdir}/a"] and bucket.uploads() == []
    run(ckptpipe.restore(str(workdir / "a"), pid=it.pid, early_start=True, settings=SETTINGS))
    runs(world, it.target, runtime)


# -- restoring while the image arrives ------------------------------------------------------------------


@pytest.mark.parametrize("compress", ["none", "zstd:1"])
def test_connections_cut_while_the_driver_reads(
    world: SimWorld,
    launch: Launch,
    bucket: Bucket,
    proxy: FaultProxy,
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
    compress: str,
) -> None:
    it = launch()
    result = save(it.pid, bucket.sink(), capture="launch", evict=True, compress=compress, settings=ROOMY)
    cuts: list[Fault] = []

    def cut() -> None:
        reading(it)
        cuts.append(proxy.add(Fault(b"Range: bytes=", cut_answer_after=100_000, times=3)))

    before_chunk(monkeypatch, 20, cut)
    back = restore(bucket, it, proxy)
    assert cuts[0].seen == 3 and back.retries >= 3 and back.chunks == result.chunks
    runs(world, it.target, runtime)
    nothing_is_held(it)


def test_a_store_that_fails_for_good_ends_the_process(
    world: SimWorld, launch: Launch, bucket: Bucket, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = launch(errors=subprocess.DEVNULL)
    save(it.pid, bucket.sink(), capture="launch", evict=True, settings=ROOMY)
    failed = Fault(b"Range: bytes=", answer=answer("500 Internal Server Error"), times=ALWAYS)
    before_chunk(monkeypatch, 30, lambda: (reading(it), proxy.add(failed)))
    said = ended(world, bucket, it, proxy, attempts=2)
    assert "did not come" in said and "500" in said and bucket.url in said


def test_a_store_that_stands_still_until_the_deadline_ends_the_process(
    world: SimWorld, launch: Launch, bucket: Bucket, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = launch(errors=subprocess.DEVNULL)
    save(it.pid, bucket.sink(), capture="launch", evict=True, settings=ROOMY)
    monkeypatch.setattr(early_start, "STILL", 1.0)
    stalled = Fault(b"Range: bytes=", stall_answer_after=50_000, times=ALWAYS)
    before_chunk(monkeypatch, 30, lambda: (reading(it), proxy.add(stalled)))
    assert "nothing more came for 1000 ms" in ended(world, bucket, it, proxy, stall_timeout=600.0)


def test_bytes_that_stay_bad_end_the_process(world: SimWorld, launch: Launch, bucket: Bucket) -> None:
    it = launch(errors=subprocess.DEVNULL)
    save(it.pid, bucket.sink(), capture="launch", evict=True, settings=ROOMY)
    bucket.damage()
    said = ended(world, bucket, it)
    assert "chunk" in said and "checksum" in said


def test_a_store_that_fails_before_anything_came_leaves_the_process_evicted(
    world: SimWorld, launch: Launch, bucket: Bucket, proxy: FaultProxy, runtime: Path
) -> None:
    it = launch()
    save(it.pid, bucket.sink(), capture="launch", evict=True, settings=ROOMY)
    failed = answer("500 Internal Server Error")
    data = proxy.add(Fault(b"/data-", answer=failed, times=ALWAYS))
    with pytest.raises(ckptpipe.CaptureFailed, match=r"stays CHECKPOINTED.*restore URL --pid"):
        restore(bucket, it, proxy, attempts=2)
    assert world.calls(RESTORE) == 0 and record(runtime, it)["evicted"] is True
    data.times = 0
    restore(bucket, it, proxy)
    runs(world, it.target, runtime)
    nothing_is_held(it)
