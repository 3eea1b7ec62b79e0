"""Launched processes and a real S3 server: saved while the driver checkpoints, restored while the image arrives, with
connections cut, stores that stay bad, and deaths on either side."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ckptpipe
from ckptpipe.pipeline.cuda import early_start
from ckptpipe.pipeline.cuda.launched_pool import LaunchedPool
from ckptpipe.pipeline.sinks.pool import PoolSink
from ckptpipe.pipeline.spec import SinkSpec
from ckptpipe.pyx.staging import leaked, outstanding
from ckptpipe.storage_backends.errors import StorageError
from tests.pipeline.cuda.runs import SETTINGS, recover, runs, save, saving
from tests.pipeline.cuda.test_early_send import CHECKPOINT, CHUNKS, Arrived, again, everything, in_the_middle
from tests.pipeline.cuda.test_early_start import ENDED, RESTORE
from tests.pipeline.cuda.test_launch import record
from tests.pipeline.image import second_reader
from tests.pipeline.image.test_second_reader import fast
from tests.pipeline.runs import run
from tests.preload.launched import FIXED, MANY, MIB, Launched
from tests.services.fault_proxy import Fault, FaultProxy, answer
from tests.services.s3_server import S3Server
from tests.simcuda import SimWorld

pytestmark = pytest.mark.s3

Launch = Callable[..., Launched]
PARTS: dict[str, Any] = {"part_bytes": 5 * MIB, "attempts": 3}
ROOMY = replace(SETTINGS, ring_bytes=16 * MIB)  # three parts
ALWAYS = 1 << 30
UNLOCK = "cuCheckpointProcessUnlock"


@pytest.fixture
def launch(launch: Launch) -> Launch:
    """``launch(**environment)``: a launched target of 46 MiB in many pieces that ends with the test."""
    return partial(launch, FIXED, MANY)


@pytest.fixture
def proxy(s3_environment: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3_environment.port) as made:
        yield made


class Bucket:
    """A fresh bucket: ``url`` of images in it, ``sink`` as a save wants it, and what lies there."""

    def __init__(self, name: str, client: Any) -> None:
        self.name, self.client = name, client
        self.url = f"s3://{name}/x"

    def sink(self, proxy: FaultProxy | None = None, **options: Any) -> SinkSpec:
        return SinkSpec(self.url, options=self.options(proxy, **options))

    def options(self, proxy: FaultProxy | None = None, **options: Any) -> dict[str, Any]:
        through = {"endpoint_url": proxy.endpoint_url} if proxy is not None else {}
        return PARTS | through | options

    def keys(self) -> list[str]:
        return [each["Key"] for each in self.client.list_objects_v2(Bucket=self.name).get("Contents", ())]

    def uploads(self) -> list[str]:
        found = self.client.list_multipart_uploads(Bucket=self.name)
        return [each["Key"] for each in found.get("Uploads", ())]

    def fetch(self, to: Path, name: str = "a") -> Path:
        """The image as files: the same bytes on every backend."""
        (to / name).mkdir(parents=True)
        for key in self.keys():
            if key.startswith(f"x/{name}/"):
                self.client.download_file(self.name, key, str(to / name / key.rpartition("/")[2]))
        return to / name

    def damage(self) -> None:
        """One bit of the last byte of the largest object."""
        found = self.client.list_objects_v2(Bucket=self.name)["Contents"]
        key = max(found, key=lambda each: each["Size"])["Key"]
        data = bytearray(self.client.get_object(Bucket=self.name, Key=key)["Body"].read())
        data[-1] ^= 1
        self.client.put_object(Bucket=self.name, Key=key, Body=bytes(data))


@pytest.fixture
def bucket(s3_bucket: str) -> Iterator[Bucket]:
    import boto3

    client = boto3.client("s3")
    yield Bucket(s3_bucket, client)
    client.close()


def restore(
    bucket: Bucket, it: Launched, proxy: FaultProxy | None = None, *, early: bool = True, **options: Any
) -> Any:
    """Through ``proxy`` where one is given; ``options`` are the store's."""
    back = ckptpipe.restore(
        f"{bucket.url}/a",
        pid=it.pid,
        early_start=early,
        settings=ROOMY,
        options=bucket.options(proxy, **options),
    )
    return run(back)


def nothing_is_held(it: Launched) -> None:
    it.until(lambda pool: not pool.armed and not pool.feeders and not pool.gate_waiters)
    assert outstanding() == 0 and leaked() == 0


def same(image: Path, it: Launched) -> None:
    """A reader that knows FORMAT.md alone finds the process's memory in the image."""
    data = second_reader.read_image(image, crc=fast)["proc/0/driver/0"]
    assert all(each in data for each in everything(it))


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


def before_chunk(monkeypatch: pytest.MonkeyPatch, number: int, then: Callable[[], object]) -> None:
    """Call ``then`` before the ``number``-th chunk is put into the pool."""
    put, count = PoolSink._put, 0

    async def counted(self: PoolSink, chunk: Any, to: Any) -> None:
        nonlocal count
        count += 1
        if count == number:
            await asyncio.to_thread(then)
        await put(self, chunk, to)

    monkeypatch.setattr(PoolSink, "_put", counted)


def reading(it: Launched) -> None:
    """Wait until the driver reads, though not everything is there."""
    it.until(lambda _: it.page.images()[0].phase == "reading")
    (image,) = it.page.images()
    assert image.gate == "closed" and image.ready < image.nbytes


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


def ended(world: SimWorld, bucket: Bucket, it: Launched, *arguments: Any, **options: Any) -> str:
    """A restore that ends the process, without an Unlock; what is said."""
    unlocks = world.calls(UNLOCK)
    with pytest.raises(ckptpipe.TargetGone) as caught:
        restore(bucket, it, *arguments, **options)
    assert it.target.wait() == ENDED
    assert world.calls(UNLOCK) == unlocks, "never on unverified bytes"
    assert it.page.pool().ended
    assert outstanding() == 0 and leaked() == 0
    return str(caught.value)


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


# -- deaths ---------------------------------------------------------------------------------------------

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
