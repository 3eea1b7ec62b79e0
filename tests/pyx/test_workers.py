"""Worker pool: right answers, memory held while in flight, nothing left after closing, no work while idle."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import crc32c as reference
import pytest

from ckptpipe.pyx import checksum, copy, workers
from ckptpipe.pyx.staging import StagingRing, lease_buffer, outstanding
from ckptpipe.pyx.workers import Scan, WorkerPool
from tests.pyx.loops import LoopFactory, each_loop, run, turns, until

SLOT = 8 << 20
SIZES = [
    0,
    1,
    100,
    100_001,
    128 << 10,
    (128 << 10) + 1,
    (1 << 20) + 7,
    (2 << 20) + 1,
    (3 << 20) + 4097,
    SLOT - 3,
    SLOT,
]


def worker_threads() -> list[int]:
    found = []
    for entry in os.listdir("/proc/self/task"):
        try:
            name = Path(f"/proc/self/task/{entry}/comm").read_text(encoding="ascii").strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if name == "ckpt-worker":
            found.append(int(entry))
    return found


def asleep(thread: int) -> bool:
    return (
        Path(f"/proc/self/task/{thread}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
        == "S"
    )


def switches(thread: int) -> str:
    status = Path(f"/proc/self/task/{thread}/status").read_text(encoding="ascii").splitlines()
    return next(line for line in status if line.startswith("voluntary_ctxt_switches"))


def descriptors() -> list[str]:
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{entry}"))
        except FileNotFoundError:
            continue
    return sorted(found)


@each_loop
@pytest.mark.parametrize("threads", [1, 4])
def test_answers_at_every_size(loop_factory: LoopFactory, threads: int) -> None:
    data = random.Random(5).randbytes(SLOT)

    async def main() -> None:
        ring = StagingRing(2, SLOT)
        async with WorkerPool(threads) as pool:
            assert pool.threads == threads
            with await ring.acquire() as source, await ring.acquire() as target:
                memoryview(source)[:] = data
                for done, nbytes in enumerate(SIZES):
                    assert pool.jobs == 3 * done
                    crc = reference.crc32c(data[:nbytes])
                    assert await pool.crc32c(source, nbytes) == crc
                    assert await pool.scan(source, nbytes) == Scan(crc, zero=nbytes == 0)
                    view = memoryview(target)
                    view[:] = b"\xee" * SLOT
                    assert await pool.copy(target, source, nbytes) == (crc, nbytes == 0)
                    assert view[:nbytes] == data[:nbytes]
                    assert bytes(view[nbytes:]).count(0xEE) == SLOT - nbytes
                    view.release()
                assert pool.inflight == 0
        ring.close()

    run(main(), loop_factory)


@pytest.mark.parametrize("position", [0, 1, (1 << 20) - 1, 1 << 20, (4 << 20) + 5, SLOT - 1])
def test_one_bit_anywhere_is_no_zero(position: int) -> None:
    async def main() -> None:
        data = bytearray(SLOT)
        async with WorkerPool(3) as pool:
            with lease_buffer(data) as lease:
                assert await pool.scan(lease, SLOT) == (checksum.crc32c_zeros(SLOT), True)
                memoryview(lease)[position] = 4
                assert await pool.scan(lease, SLOT) == (reference.crc32c(data), False)
                gc.collect()

    run(main())


@each_loop
def test_many_jobs_at_once_each_get_their_own_answer(loop_factory: LoopFactory) -> None:
    data = random.Random(6).randbytes(1 << 20)

    async def main() -> None:
        rng = random.Random(7)
        async with WorkerPool(4) as pool:
            with lease_buffer(data) as lease:
                spans = [(rng.randrange(1 << 19), rng.randrange(1 << 18)) for _ in range(400)]
                parts = [lease.slice(*span) for span in spans]
                answers = await asyncio.gather(*(pool.crc32c(part, part.nbytes) for part in parts))
                assert answers == [reference.crc32c(data[start : start + n]) for start, n in spans]
                for part in parts:
                    part.release()
            assert pool.jobs == 400

    run(main(), loop_factory)


@each_loop
def test_a_job_holds_its_ranges_when_the_task_was_cancelled(loop_factory: LoopFactory) -> None:
    async def main() -> None:
        ring = StagingRing(2, SLOT)
        async with WorkerPool(1) as pool:

            async def work() -> None:
                with await ring.acquire() as source, await ring.acquire() as target:
                    await pool.copy(target, source, SLOT)

            task = asyncio.create_task(work())
            await turns(1)
            assert pool.inflight == 1
            task.cancel()
            taker = asyncio.create_task(ring.acquire())
            # The thread may have finished; but only the loop reaps, and it has not come to that yet.
            assert ring.free == 0
            with pytest.raises(asyncio.CancelledError):
                await task
            assert ring.free == 0 or pool.inflight == 0
            (await taker).release()
            await until(lambda: pool.inflight == 0)
            assert ring.free == 2
        ring.close()

    before = outstanding()
    run(main(), loop_factory)
    assert outstanding() == before


@each_loop
def test_released_and_cancelled_before_the_answer(loop_factory: LoopFactory) -> None:
    async def main() -> None:
        ring = StagingRing(2, SLOT)
        async with WorkerPool(2) as pool:
            source, target = await ring.acquire(), await ring.acquire()
            memoryview(source)[:3] = b"abc"
            future = pool.copy(target, source, SLOT)
            unheard = pool.scan(source, SLOT)
            source.release()
            target.release()
            unheard.cancel()
            assert (ring.free, pool.inflight) == (0, 2)
            assert (await future).zero is False
            await until(lambda: pool.inflight == 0)
            assert ring.free == 2
        ring.close()

    run(main(), loop_factory)


def test_what_a_job_refuses_holds_nothing() -> None:
    async def main() -> None:
        before = outstanding()
        data = bytearray(100_000)
        async with WorkerPool(1) as pool:
            with lease_buffer(data) as lease, lease_buffer(bytes(100_000)) as frozen:
                with pytest.raises(ValueError, match="100001 bytes asked of a lease of 100000"):
                    pool.scan(lease, 100_001)
                with pytest.raises(ValueError, match="-1 bytes"):
                    pool.crc32c(lease, -1)
                with pytest.raises(ValueError, match="read-only"):
                    pool.copy(frozen, lease, 10)
                with pytest.raises(ValueError, match="overlap"):
                    pool.copy(lease, lease, 10)
                with lease.slice(0, 60_000) as low, lease.slice(40_000, 60_000) as high:
                    with pytest.raises(ValueError, match="overlap"):
                        pool.copy(low, high, 40_001)
                    assert (await pool.copy(low, high, 40_000)).zero
                with pytest.raises(TypeError):
                    pool.scan(data, 10)  # type: ignore[arg-type]
            with pytest.raises(RuntimeError, match="released"):
                pool.scan(lease, 10)
            assert outstanding() == before

    run(main())


@each_loop
def test_closing_leaves_no_thread_and_no_descriptor(loop_factory: LoopFactory) -> None:
    async def main() -> None:
        threads, files, pools = worker_threads(), descriptors(), workers.live_pools()
        pool = WorkerPool(5)
        assert len(worker_threads()) == len(threads) + 5
        assert workers.live_pools() == pools + 1
        data = bytes(4 << 20)
        with lease_buffer(data) as lease:
            futures = [pool.scan(lease, len(data)) for _ in range(10)]
            await pool.aclose()
            assert [future.result().zero for future in futures] == [True] * 10
        assert (pool.threads, pool.inflight, pool.jobs) == (0, 0, 10)
        assert pool.cpu_seconds > 0
        await pool.aclose()
        assert worker_threads() == threads
        assert workers.live_pools() == pools
        assert [name for name in descriptors() if "eventfd" in name] == [
            name for name in files if "eventfd" in name
        ]
        with pytest.raises(RuntimeError, match="closed"):
            pool.scan(lease, 1)

    run(main(), loop_factory)


@each_loop
def test_closing_goes_on_when_cancelled(loop_factory: LoopFactory) -> None:
    async def main() -> None:
        ring = StagingRing(2, SLOT)
        pool = WorkerPool(1)
        source, target = await ring.acquire(), await ring.acquire()
        futures = [pool.copy(target, source, SLOT) for _ in range(5)]
        source.release()
        target.release()
        closings = [asyncio.create_task(pool.aclose()) for _ in range(2)]
        await turns(1)
        with pytest.raises(RuntimeError, match="closed"):
            pool.scan(source, 1)
        closings[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await closings[0]
        await closings[1]
        assert all(future.done() for future in futures)
        assert (ring.free, pool.inflight, pool.threads) == (2, 0, 0)
        ring.close()

    run(main(), loop_factory)


def test_a_pool_that_was_not_closed_warns_and_frees() -> None:
    async def main() -> WorkerPool:
        ring = StagingRing(1, SLOT)
        pool = WorkerPool(2)
        with await ring.acquire() as lease:
            pool.scan(lease, SLOT)
            return pool

    before = outstanding()
    pool = run(main())
    assert workers.live_pools() == 1
    with pytest.warns(ResourceWarning, match="2 threads was not closed"):
        del pool
        gc.collect()
    assert workers.live_pools() == 0
    assert worker_threads() == []
    assert outstanding() == before


@each_loop
def test_an_idle_pool_uses_no_cpu_and_never_wakes(loop_factory: LoopFactory) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with WorkerPool(3) as pool:
            data = bytes(4 << 20)
            with lease_buffer(data) as lease:
                await pool.scan(lease, len(data))
            threads = worker_threads()
            assert len(threads) == 3
            # Asleep for good: not only for the moment in which it waits for the pool's lock.
            seen: list[object] = []

            def settled() -> bool:
                seen.append((pool.cpu_seconds, [switches(thread) for thread in threads]))
                return all(asleep(thread) for thread in threads) and seen[-20:].count(seen[-1]) == 20

            await until(settled)
            before = pool.cpu_seconds, [switches(thread) for thread in threads]
            assert before[0] > 0
            event = asyncio.Event()

            def busy_elsewhere() -> None:
                start = time.thread_time()
                while time.thread_time() - start < 0.05:
                    pass
                loop.call_soon_threadsafe(event.set)

            other = threading.Thread(target=busy_elsewhere)
            other.start()
            await event.wait()
            other.join()
            assert (pool.cpu_seconds, [switches(thread) for thread in threads]) == before

    run(main(), loop_factory)


def test_pinning() -> None:
    async def main() -> None:
        cpus = sorted(os.sched_getaffinity(0))
        async with WorkerPool(cpus=cpus[:1]) as pool:
            assert pool.threads == 1
            assert [os.sched_getaffinity(thread) for thread in worker_threads()] == [{cpus[0]}]
        async with WorkerPool(3, cpus=cpus):
            expected = sorted([cpus[i % len(cpus)]] for i in range(3))
            assert sorted(sorted(os.sched_getaffinity(thread)) for thread in worker_threads()) == expected
        with pytest.raises(ValueError, match=r"cannot pin to CPUs \[9999\]"):
            WorkerPool(1, cpus=[9999])

    run(main())


def test_defaults_and_impossible_counts() -> None:
    async def main() -> None:
        async with WorkerPool() as pool:
            assert pool.threads == len(os.sched_getaffinity(0))
            assert workers.implementations() == (checksum.implementation(), copy.implementation())
        for count in (-1, 100_000):
            with pytest.raises(ValueError, match="threads is 0"):
                WorkerPool(count)

    run(main())
    with pytest.raises(RuntimeError, match="running event loop"):
        WorkerPool(1)


def test_no_threads_to_be_had_is_an_error_with_a_cure_and_leaves_nothing() -> None:
    done = script("""
        import asyncio, os, resource
        from ckptpipe.pyx import workers
        from ckptpipe.pyx.errors import CkptpipeError
        async def main():
            files = os.listdir("/proc/self/fd")
            if os.geteuid() == 0:
                os.setresuid(65533, 65533, 65533)  # root is not bound by RLIMIT_NPROC
            resource.setrlimit(resource.RLIMIT_NPROC, (3, 3))
            try:
                workers.WorkerPool(50)
            except CkptpipeError as error:
                assert "cannot start 50 worker threads" in str(error) and "ulimit -u" in str(error), error
            else:
                raise SystemExit("50 threads started")
            assert len(os.listdir("/proc/self/task")) == 1
            assert os.listdir("/proc/self/fd") == files
            assert workers.live_pools() == 0
        asyncio.run(main())
    """)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_forked_child_drops_the_pool_without_waiting() -> None:
    done = script("""
        import asyncio, os
        from ckptpipe.pyx import workers
        async def main():
            pool = workers.WorkerPool(2)
            child = os.fork()
            if child == 0:
                pool.__del__()
                assert workers.live_pools() == 0
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            await pool.aclose()
        asyncio.run(main())
    """)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("crc", checksum.implementations())
@pytest.mark.parametrize("width", copy.implementations())
def test_every_implementation_in_the_threads(crc: str, width: str) -> None:
    done = script(
        """
        import asyncio, random
        import crc32c as reference
        from ckptpipe.pyx import workers
        from ckptpipe.pyx.staging import lease_buffer
        data = random.Random(9).randbytes((3 << 20) + 77)
        async def main():
            async with workers.WorkerPool(2) as pool:
                target = bytearray(len(data))
                with lease_buffer(data) as source, lease_buffer(target) as destination:
                    assert await pool.copy(destination, source, len(data)) == (reference.crc32c(data), False)
                    assert target == data
                    print(*workers.implementations())
        asyncio.run(main())
        """,
        CKPTPIPE_CRC32C=crc,
        CKPTPIPE_COPY=width,
    )
    assert done.stdout.split() == [crc, width], done.stderr


def script(text: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
