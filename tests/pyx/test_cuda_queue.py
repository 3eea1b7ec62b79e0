"""Copy queue on the simulated driver: right bytes, right sums, order, bounds, two GPUs, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import crc32c as reference
import pytest

from ckptpipe.pyx import cuda
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.pyx.staging import StagingRing, lease_buffer, outstanding
from ckptpipe.pyx.workers import Scan
from tests.pyx.gpu import MIB, Machine, addresses, done, machine, pattern
from tests.pyx.loops import LoopFactory, each_loop, run, turns, until

SIZES = [1, 15, 16, 63, 64, 4096, 65537, MIB - 1, MIB, 3 * MIB + 5]
each_checksum = pytest.mark.parametrize("checksum", ["device", "host"])


def queue_threads() -> list[str]:
    names = []
    for entry in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            names.append(Path(f"/proc/self/task/{entry}/comm").read_text(encoding="ascii").strip())
    return sorted(name for name in names if name.startswith("ckpt-"))


@each_loop
@each_checksum
def test_bytes_and_sums_of_every_size(loop_factory: LoopFactory, checksum: str) -> None:
    data = pattern(sum(SIZES))

    async def main(gpus: Machine) -> None:
        base = gpus.allocate(0, data)
        target = gpus.allocate(0, len(data))
        ring = StagingRing(2, 4 * MIB)
        async with cuda.CopyQueue(0, gpus.context(0), checksum=checksum) as queue:
            assert (queue.checksum, queue.requested, queue.why) == (checksum, checksum, "")
            with await ring.acquire() as lease:
                view = memoryview(lease)
                for nbytes, address in zip(SIZES, addresses(base, SIZES), strict=True):
                    part = data[address - base : address - base + nbytes]
                    view[:] = b"\xee" * len(view)
                    expected = Scan(reference.crc32c(part), zero=False)
                    assert await queue.fetch(lease, nbytes, address) == expected
                    assert view[:nbytes] == part
                    assert view[nbytes : nbytes + 64] == b"\xee" * 64
                    assert await queue.scan(address, nbytes) == expected
                    assert await queue.store(target + address - base, lease, nbytes) is None
                view.release()
            assert queue.copied == 2 * len(data)
            assert (queue.inflight, queue.running) == (0, 0)
        assert gpus.read(0, target, len(data)) == data
        ring.close()

    with machine() as gpus:
        run(main(gpus), loop_factory)


@each_checksum
def test_zeros_are_seen(checksum: str) -> None:
    nbytes = 2 * MIB + 3
    almost = bytearray(nbytes)
    almost[-1] = 1

    async def main(gpus: Machine) -> None:
        zeros, other = gpus.allocate(0, bytes(nbytes)), gpus.allocate(0, bytes(almost))
        memory = bytearray(nbytes)
        async with cuda.CopyQueue(0, gpus.context(0), checksum=checksum) as queue:
            with lease_buffer(memory) as lease:
                assert await queue.fetch(lease, nbytes, zeros) == (reference.crc32c(bytes(nbytes)), True)
                assert await queue.scan(zeros, nbytes) == (reference.crc32c(bytes(nbytes)), True)
                assert await queue.fetch(lease, nbytes, other) == (reference.crc32c(bytes(almost)), False)
                assert await queue.fetch(lease, 0, other) == Scan(0, zero=True)
                assert await queue.store(other, lease, 0) is None
                assert await queue.scan(other, 0) == (0, True)
                assert lease.holds == 1

    with machine() as gpus:
        run(main(gpus))


@each_loop
def test_elided_zeros_do_not_cross_the_link(loop_factory: LoopFactory) -> None:
    data = pattern(MIB)

    async def main(gpus: Machine) -> None:
        zeros, other = gpus.allocate(0, bytes(MIB)), gpus.allocate(0, data)
        memory = [bytearray(b"\xee" * MIB) for _ in range(8)]
        async with cuda.CopyQueue(0, gpus.context(0), elide_zeros=True, depth=3) as queue:
            assert queue.elide_zeros
            before = gpus.world.moved(0)[0]
            leases = [lease_buffer(part) for part in memory]
            answers = await asyncio.gather(
                *(queue.fetch(leases[i], MIB, zeros if i % 2 else other) for i in range(8))
            )
            assert answers == [
                (reference.crc32c(bytes(MIB)), True) if i % 2 else (reference.crc32c(data), False)
                for i in range(8)
            ]
            assert (queue.copied, queue.elided) == (4 * MIB, 4 * MIB)
            assert gpus.world.moved(0)[0] - before == 4 * MIB
            for lease in leases:
                lease.release()
        assert memory == [b"\xee" * MIB if i % 2 else data for i in range(8)]

    with machine() as gpus:
        run(main(gpus), loop_factory)


@each_loop
def test_depth_bounds_what_the_driver_has_and_the_rest_waits_in_order(loop_factory: LoopFactory) -> None:
    nbytes, count = 65536, 16

    async def main(gpus: Machine) -> None:
        data = pattern(count * nbytes)
        base = gpus.allocate(0, data)
        order: list[int] = []
        copies = gpus.world.calls("cuMemcpyDtoHAsync")
        with gpus.pinned(count, nbytes) as ring:
            async with cuda.CopyQueue(0, gpus.context(0), depth=3) as queue:
                leases = [await ring.acquire() for _ in range(count)]
                with gpus.stalled(0):
                    futures = [queue.fetch(leases[i], nbytes, base + nbytes * i) for i in range(count)]
                    for i, future in enumerate(futures):
                        future.add_done_callback(lambda _, i=i: order.append(i))
                    await until(lambda: gpus.world.calls("cuMemcpyDtoHAsync") == copies + 3)
                    await turns(20)
                    assert (queue.inflight, queue.running) == (count, 3)
                    assert gpus.world.calls("cuMemcpyDtoHAsync") == copies + 3
                    assert [lease.holds for lease in leases] == [2] * count
                await asyncio.gather(*futures)
                await turns()
                assert order == list(range(count))
            assert b"".join(bytes(memoryview(lease)) for lease in leases) == data
            for lease in leases:
                lease.release()

    with machine() as gpus:
        run(main(gpus), loop_factory)


@each_loop
def test_both_directions_and_both_gpus_go_on_when_one_link_stands(loop_factory: LoopFactory) -> None:
    async def main(gpus: Machine) -> None:
        data = pattern(MIB)
        sources = [gpus.allocate(gpu, data) for gpu in (0, 1)]
        targets = [gpus.allocate(gpu, MIB) for gpu in (0, 1)]
        with gpus.pinned(3) as ring:
            first = cuda.CopyQueue(0, gpus.context(0))
            second = cuda.CopyQueue(1, gpus.context(1))
            assert cuda.live_queues() == 2
            up, down, other = [await ring.acquire() for _ in range(3)]
            memoryview(up)[:] = data
            moved = gpus.world.moved(0)[1]
            with gpus.stalled(0):
                stuck = first.fetch(down, MIB, sources[0])
                stored = first.store(targets[0], up, MIB)
                assert await second.fetch(other, MIB, sources[1]) == (reference.crc32c(data), False)
                await second.store(targets[1], up, MIB)
                await until(
                    lambda: gpus.world.moved(0)[1] == moved + MIB
                )  # behind the stuck one, not held by it
                assert not stuck.done()
            await stored
            assert await stuck == (reference.crc32c(data), False)
            await first.aclose()
            await second.aclose()
            assert bytes(memoryview(down)) == bytes(memoryview(other)) == data
            for lease in (up, down, other):
                lease.release()
        assert gpus.read(1, targets[1], MIB) == data

    with machine() as gpus:
        run(main(gpus), loop_factory)


def test_a_given_stream_orders_the_copies_behind_its_work() -> None:
    data = pattern(MIB)

    async def main(gpus: Machine) -> None:
        driver = gpus.driver
        address = gpus.allocate(0, bytes(MIB))
        host = bytearray(data)
        with gpus.current(0):
            stream = done(driver.cuStreamCreate(1))
        async with cuda.CopyQueue(0, gpus.context(0), stream=int(stream)) as queue:
            with lease_buffer(bytearray(MIB)) as lease, lease_buffer(host) as source:
                gpus.world.link(0, to_device=64 << 20)  # slow: the copy up is still under way
                with gpus.current(0):
                    done(driver.cuMemcpyHtoDAsync(address, source.address, MIB, stream))
                assert await queue.fetch(lease, MIB, address) == (reference.crc32c(data), False)
                assert memoryview(lease) == data
        with gpus.current(0):
            done(driver.cuStreamSynchronize(stream))  # it is not the queue's to destroy
            done(driver.cuStreamDestroy(stream))

    with machine() as gpus:
        run(main(gpus))


@each_checksum
def test_everything_of_the_driver_is_given_back(checksum: str) -> None:
    async def main(gpus: Machine) -> None:
        world = gpus.world
        # Of the other GPU: the context of a copy is not that of its memory (a kernel would need peer access).
        address = gpus.allocate(1 if checksum == "host" else 0, MIB)
        used = world.used(0)
        made = {name: world.calls(name) for name in ("cuStreamCreate", "cuEventCreate", "cuMemHostAlloc")}
        threads, holds = queue_threads(), outstanding()
        memory = bytearray(MIB)
        queue = cuda.CopyQueue(0, gpus.context(0), checksum=checksum, depth=5, host_threads=2)
        assert cuda.live_queues() == 1
        assert {"ckpt-cuda-issue", "ckpt-cuda-wait"} <= set(queue_threads())
        with lease_buffer(memory) as lease:
            await queue.fetch(lease, MIB, address)
            await queue.scan(address, MIB)
        await queue.aclose()
        await queue.aclose()
        assert queue.closed
        assert (cuda.live_queues(), outstanding()) == (0, holds)
        await until(lambda: queue_threads() == threads)  # a joined thread is listed for a moment longer
        assert world.used(0) == used
        for make, end in (
            ("cuStreamCreate", "cuStreamDestroy"),
            ("cuEventCreate", "cuEventDestroy"),
            ("cuMemHostAlloc", "cuMemFreeHost"),
        ):
            count = world.calls(make) - made[make]
            assert count == world.calls(end), (make, end)
        with pytest.raises(RuntimeError, match="closed"):
            queue.scan(address, MIB)

    with machine() as gpus:
        run(main(gpus))


def test_no_driver_call_on_the_loops_thread_can_block_it() -> None:
    """A driver that stands in cuMemcpyDtoHAsync (a full command buffer) does not stand in the loop's way."""

    async def main(gpus: Machine) -> None:
        address = gpus.allocate(0, pattern(MIB))
        async with cuda.CopyQueue(0, gpus.context(0)) as queue:
            with lease_buffer(bytearray(MIB)) as lease:
                fault = gpus.world.fault("cuMemcpyDtoHAsync", hold=True)
                future = queue.fetch(lease, MIB, address)
                await asyncio.to_thread(fault.wait)
                await turns(10)
                assert not future.done()
                fault.release()
                await future

    with machine() as gpus:
        run(main(gpus))


def test_an_idle_queue_does_not_wake() -> None:
    def switches() -> dict[str, str]:
        found = {}
        for entry in os.listdir("/proc/self/task"):
            name = Path(f"/proc/self/task/{entry}/comm").read_text(encoding="ascii").strip()
            if name.startswith("ckpt-cuda"):
                status = Path(f"/proc/self/task/{entry}/status").read_text(encoding="ascii").splitlines()
                found[name] = next(line for line in status if line.startswith("voluntary_ctxt"))
        return found

    async def main(gpus: Machine) -> None:
        address = gpus.allocate(0, pattern(MIB))
        async with cuda.CopyQueue(0, gpus.context(0)) as queue:
            with lease_buffer(bytearray(MIB)) as lease:
                await queue.fetch(lease, MIB, address)
            before = switches()
            assert len(before) == 2
            for _ in range(50):  # the threads settle on their conditions; then nothing moves any more
                await asyncio.to_thread(os.sched_yield)
                if switches() == before:
                    break
                before = switches()
            for _ in range(200):
                await asyncio.to_thread(os.sched_yield)
            assert switches() == before

    with machine() as gpus:
        run(main(gpus))


def test_a_queue_that_was_not_closed_warns_and_frees() -> None:
    async def main(gpus: Machine) -> cuda.CopyQueue:
        address = gpus.allocate(0, pattern(MIB))
        queue = cuda.CopyQueue(0, gpus.context(0))
        with lease_buffer(bytearray(MIB)) as lease:
            queue.fetch(lease, MIB, address)
        return queue

    with machine() as gpus:
        before = outstanding()
        queue = run(main(gpus))
        with pytest.warns(ResourceWarning, match="CopyQueue of GPU 0 was not closed"):
            del queue
            gc.collect()
        assert cuda.live_queues() == 0
        assert outstanding() == before


def test_what_cannot_be_is_refused() -> None:
    async def main(gpus: Machine) -> None:
        context = gpus.context(0)
        for options, message in (
            ({"checksum": "md5"}, "checksum is device or host"),
            ({"depth": 0}, "depth is 1 to"),
            ({"host_threads": -1}, "host_threads is 0"),
        ):
            with pytest.raises(ValueError, match=message):
                cuda.CopyQueue(0, context, **options)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="needs a CUDA context"):
            cuda.CopyQueue(0, 0)
        async with cuda.CopyQueue(0, context) as queue:
            with lease_buffer(bytes(16)) as lease:
                with pytest.raises(ValueError, match="read-only"):
                    queue.fetch(lease, 16, 1 << 40)
                with pytest.raises(ValueError, match="17 bytes asked of a lease of 16"):
                    queue.store(1 << 40, lease, 17)
                for address in (0, (1 << 64) - 8):
                    with pytest.raises(ValueError, match="no device memory range"):
                        queue.store(address, lease, 16)
                assert lease.holds == 1
            with pytest.raises(ValueError, match="-1 bytes"):
                queue.scan(1 << 40, -1)
            with pytest.raises(RuntimeError, match="initialised already"):
                queue.__init__(0, context)  # type: ignore[misc]

            def elsewhere() -> None:
                with pytest.raises(CkptpipeError, match="belongs to another thread"):
                    queue.scan(1 << 40, 16)

            await asyncio.to_thread(elsewhere)
            assert queue.inflight == 0

    with machine() as gpus:
        run(main(gpus))
        with pytest.raises(RuntimeError, match="running event loop"):
            cuda.CopyQueue(0, gpus.context(0))


def test_a_forked_child_is_refused_and_drops_the_queue() -> None:
    text = """
        import asyncio, os
        from ckptpipe.pyx import cuda
        from ckptpipe.pyx.errors import CkptpipeError
        from tests.pyx.gpu import machine

        async def main(gpus):
            queue = cuda.CopyQueue(0, gpus.context(0))
            child = os.fork()
            if child == 0:
                try:
                    queue.scan(1 << 40, 16)
                except CkptpipeError as error:
                    assert "belongs to process" in str(error) and "spawn" in str(error), error
                    queue.__del__()
                    os._exit(0 if cuda.live_queues() == 0 and queue.closed else 2)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            await queue.aclose()

        with machine() as gpus:
            asyncio.run(main(gpus))
    """
    ended = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
