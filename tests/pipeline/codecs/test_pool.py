"""Codec threads: leases held until the thread is done, errors, cancellation, closing."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine

import pytest

from ckptpipe.pipeline.codecs import chunk_codec, parse_compress
from ckptpipe.pipeline.codecs.abc import Codec
from ckptpipe.pipeline.codecs.chunk_codec import AS_IT_IS, Encoded
from ckptpipe.pipeline.codecs.encoding import Encoding
from ckptpipe.pipeline.codecs.pool import CodecPool
from ckptpipe.pipeline.image.records import ChunkRecord, PlaneRecord, whole_plane
from ckptpipe.pyx.staging import Lease, StagingRing, leaked, outstanding

ZSTD = Encoding(parse_compress("zstd:3"), 0)
SLOT = 64 << 10
DATA = bytes(random.Random(1).choices(b"abcdefgh", k=SLOT - 100))


def run(
    scenario: Callable[[CodecPool, StagingRing], Coroutine[object, object, None]], threads: int = 2
) -> None:
    """One scenario with a pool and a ring; afterwards no lease, no job and no thread is left."""

    async def main() -> None:
        ring = StagingRing(6, SLOT, huge_pages="off")
        pool = CodecPool(threads)
        try:
            await scenario(pool, ring)
        finally:
            await pool.aclose()
        assert ring.in_use == 0 and pool.inflight == 0
        ring.close()

    before = leaked()
    asyncio.run(main())
    assert outstanding() == 0 and leaked() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ckptpipe-codec")]


async def filled(ring: StagingRing, data: bytes) -> Lease:
    lease = await ring.acquire()
    with memoryview(lease) as view:
        view[: len(data)] = data
    return lease


def content(lease: Lease, nbytes: int) -> bytes:
    with memoryview(lease) as view:
        return bytes(view[:nbytes])


def record(stored: int, raw: int = len(DATA), planes: tuple[PlaneRecord, ...] | None = None) -> ChunkRecord:
    chosen = whole_plane(1, 3, raw, stored) if planes is None else planes
    return ChunkRecord(0, 0, raw, 0, stored_bytes=stored, planes=chosen)


def test_round_trip() -> None:
    async def scenario(pool: CodecPool, ring: StagingRing) -> None:
        with await filled(ring, DATA) as source, await ring.acquire() as stored, await ring.acquire() as back:
            encoded = await pool.compress(ZSTD, source, len(DATA), stored, SLOT)
            count = encoded.stored_bytes
            assert 0 < count < len(DATA)
            assert encoded == Encoded(count, whole_plane(1, 3, len(DATA), count), 0)
            await pool.decompress(record(count), stored, back)
            assert content(back, len(DATA)) == DATA
            assert await pool.compress(ZSTD, source, len(DATA), stored, count - 1) == AS_IT_IS
            assert await pool.compress(Encoding(), source, 10, stored, 10) == AS_IT_IS
        assert pool.jobs == 4 and pool.cpu_seconds > 0

    run(scenario)


def test_damage_is_a_value_error_and_the_pool_goes_on() -> None:
    async def scenario(pool: CodecPool, ring: StagingRing) -> None:
        with await filled(ring, b"no frame") as source, await ring.acquire() as back:
            with pytest.raises(ValueError, match="zstd frame"):
                await pool.decompress(record(8, 100), source, back)
            with pytest.raises(ValueError, match="transform 1 does not make 1 planes"):
                await pool.decompress(record(8, 100)._replace(transform=1), source, back)
            with pytest.raises(ValueError, match="planes hold 8 stored bytes, the chunk 9"):
                await pool.decompress(record(8, 100)._replace(stored_bytes=9), source, back)
            with pytest.raises(ValueError, match="bytes into"):
                await pool.compress(ZSTD, source, SLOT + 1, back, SLOT)
            with pytest.raises(ValueError, match="bytes into"):
                await pool.compress(ZSTD, source, SLOT, back, SLOT + 1)
            assert (await pool.compress(ZSTD, source, len(DATA), back, SLOT)).stored_bytes > 0

    run(scenario)


class Gate(Codec):
    """A codec that waits inside its thread until it is told to go on."""

    name = "gate"
    id = 255
    backend = "cpu"

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()

    def clone(self) -> Codec:
        return self

    def compress_into(self, source: memoryview, destination: memoryview) -> int:
        self.entered.release()
        self.open.wait()
        destination[:3] = source[:3]
        return 3

    def decompress_into(self, source: memoryview, destination: memoryview) -> None:
        raise NotImplementedError


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    made = Gate()
    monkeypatch.setattr(chunk_codec, "make_codec", lambda choice: made)
    return made


async def entered(gate: Gate) -> None:
    await asyncio.to_thread(gate.entered.acquire)


def started(work: Awaitable[Encoded]) -> asyncio.Task[Encoded]:
    return asyncio.ensure_future(work)  # type: ignore[arg-type]


def test_a_cancelled_job_keeps_its_slots_until_the_thread_is_done(gate: Gate) -> None:
    async def scenario(pool: CodecPool, ring: StagingRing) -> None:
        source, destination = await filled(ring, DATA), await ring.acquire()
        task = started(pool.compress(ZSTD, source, len(DATA), destination, SLOT))
        await entered(gate)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        source.release()
        destination.release()
        assert ring.in_use == 2 and pool.inflight == 1
        others = [await ring.acquire() for _ in range(4)]
        assert ring.try_acquire() is None
        waiting = asyncio.ensure_future(ring.acquire())
        await asyncio.sleep(0)
        assert not waiting.done()
        gate.open.set()
        others.append(await waiting)  # the slots come back when the thread has left them, and wake the waiter
        for lease in others:
            lease.release()

    run(scenario)


class Endless(Gate):
    """A codec that would never end, but for its checkpoint."""

    def compress_into(self, source: memoryview, destination: memoryview) -> int:
        self.entered.release()
        while True:
            self.checkpoint()


def test_a_cancelled_job_stops_at_its_next_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = Endless()
    monkeypatch.setattr(chunk_codec, "make_codec", lambda choice: endless)

    async def scenario(pool: CodecPool, ring: StagingRing) -> None:
        with await filled(ring, DATA) as source, await ring.acquire() as destination:
            task = started(pool.compress(ZSTD, source, len(DATA), destination, SLOT))
            await entered(endless)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(pool.aclose(), 60)

    run(scenario, threads=1)


def test_a_queued_job_that_is_cancelled_never_runs(gate: Gate) -> None:
    async def scenario(pool: CodecPool, ring: StagingRing) -> None:
        with (
            await filled(ring, DATA) as source,
            await ring.acquire() as first,
            await ring.acquire() as second,
        ):
            running = started(pool.compress(ZSTD, source, len(DATA), first, SLOT))
            await entered(gate)
            queued = started(pool.compress(ZSTD, source, len(DATA), second, SLOT))
            await asyncio.sleep(0)
            queued.cancel()
            with pytest.raises(asyncio.CancelledError):
                await queued
            gate.open.set()
            assert (await running).stored_bytes == 3
        await pool.aclose()
        assert not gate.entered.acquire(blocking=False)

    run(scenario, threads=1)


def test_closing_waits_for_what_was_queued(gate: Gate) -> None:
    async def scenario(pool: CodecPool, ring: StagingRing) -> None:
        with (
            await filled(ring, DATA) as source,
            await ring.acquire() as first,
            await ring.acquire() as second,
        ):
            jobs = [started(pool.compress(ZSTD, source, len(DATA), room, SLOT)) for room in (first, second)]
            await entered(gate)
            closing = asyncio.ensure_future(pool.aclose())
            await asyncio.sleep(0)
            assert not closing.done()
            gate.open.set()
            assert [each.stored_bytes for each in await asyncio.gather(*jobs)] == [3, 3]
            await closing
            with pytest.raises(RuntimeError, match="closed"):
                await pool.compress(ZSTD, source, len(DATA), first, SLOT)

    run(scenario, threads=1)


def test_jobs_run_side_by_side(gate: Gate) -> None:
    async def scenario(pool: CodecPool, ring: StagingRing) -> None:
        with (
            await filled(ring, DATA) as source,
            await ring.acquire() as first,
            await ring.acquire() as second,
        ):
            jobs = [started(pool.compress(ZSTD, source, len(DATA), room, SLOT)) for room in (first, second)]
            await entered(gate)
            await entered(gate)  # both are inside at once
            gate.open.set()
            await asyncio.gather(*jobs)

    run(scenario, threads=2)


def test_a_look_at_a_lease_is_taken_by_a_codec_thread() -> None:
    async def scenario(pool: CodecPool, ring: StagingRing) -> None:
        pool.nice = 3
        with await filled(ring, DATA) as source:
            here = threading.get_native_id()

            def work(codec: chunk_codec.ChunkCodec, view: memoryview) -> tuple[bytes, int, int]:
                thread = threading.get_native_id()
                return bytes(view), thread, os.getpriority(os.PRIO_PROCESS, thread)

            data, thread, nice = await pool.look(work, source, 100)
            assert data == DATA[:100] and thread != here
            assert nice == os.getpriority(os.PRIO_PROCESS, here) + 3

    run(scenario)
