"""Files read by workers through the page cache, straight into shared memory with holes; workers of the idle class."""

from __future__ import annotations

import asyncio
import errno
import os
from functools import partial
from pathlib import Path

import crc32c as independent
import pytest

from ckptpipe.pyx.pool_mapping import PoolMapping
from ckptpipe.pyx.staging import Lease, lease_buffer, lease_range, outstanding
from ckptpipe.pyx.workers import Scan, WorkerPool
from tests.counted_file import CountedFile

MIB = 1 << 20
PIECE = 2 * MIB


def memory(nbytes: int) -> int:
    descriptor = os.memfd_create("pool")
    os.ftruncate(descriptor, nbytes)
    return descriptor


def lent(mapping: PoolMapping, at: int, nbytes: int) -> Lease:
    return lease_range(mapping.address + at, nbytes, mapping)


@pytest.mark.parametrize("huge", [False, True])
@pytest.mark.parametrize("nbytes", [1, 4096, 5 * MIB + 123, 8 * MIB])
def test_contents_and_checksum(tmp_path: Path, huge: bool, nbytes: int) -> None:
    data = os.urandom(nbytes + 777)
    (tmp_path / "file").write_bytes(data)
    pool = memory(16 * MIB)
    os.pwrite(pool, b"x" * 100, PIECE + nbytes)  # what lies behind stays

    async def main() -> None:
        file = CountedFile(tmp_path / "file")
        mapping = PoolMapping(pool, 16 * MIB, writable=True)
        assert mapping.address % PIECE == 0
        async with WorkerPool(3) as workers:
            with lent(mapping, PIECE, nbytes) as lease:
                found = await workers.read_file(file, 777, lease, nbytes, huge=huge)
        assert found == independent.crc32c(data[777:])
        assert file.holds == 1
        file.release()
        mapping.close()
        mapping.close()
        assert mapping.address == 0

    asyncio.run(main())
    assert os.pread(pool, nbytes, PIECE) == data[777:]
    assert os.pread(pool, 100, PIECE + nbytes) == b"x" * 100
    assert os.pread(pool, PIECE, 0) == bytes(PIECE)
    os.close(pool)
    assert outstanding() == 0


@pytest.mark.parametrize("part", [4096, 100_000, 256 << 10, 64 * MIB])
@pytest.mark.parametrize("nbytes", [0, 1, 256 << 10, 5 * MIB + 123])
def test_threads_read_a_range_together_in_parts(tmp_path: Path, nbytes: int, part: int) -> None:
    data = os.urandom(nbytes + 777)
    (tmp_path / "file").write_bytes(data)
    rooms = [bytearray(b"x" * (nbytes + 10)) for _ in range(5)]

    async def main() -> None:
        file = CountedFile(tmp_path / "file")
        async with WorkerPool(3) as workers:
            leases = [lease_buffer(room) for room in rooms]
            futures = [workers.read_file(file, 777, lease, nbytes, part=part) for lease in leases]
            futures.append(workers.crc32c(leases[0], 0))
            assert await asyncio.gather(*futures) == [independent.crc32c(data[777:])] * 5 + [0]
            assert workers.inflight == 0 and workers.jobs == 6
            for lease in leases:
                lease.release()
        assert file.holds == 1
        file.release()

    asyncio.run(main())
    assert all(room == data[777:] + b"x" * 10 for room in rooms)
    assert outstanding() == 0


def test_what_is_first_in_the_queue_is_complete_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(8 * MIB))
    order: list[int] = []

    def done(number: int, _: asyncio.Future[int]) -> None:
        order.append(number)

    async def main() -> None:
        file = CountedFile(tmp_path / "file")
        async with WorkerPool(1) as workers:
            rooms = [lease_buffer(bytearray(8 * MIB)) for _ in range(4)]
            for number, lease in enumerate(rooms):
                future = workers.read_file(file, 0, lease, 8 * MIB, part=MIB)
                future.add_done_callback(partial(done, number))
                lease.release()
        await asyncio.sleep(0)
        file.release()

    asyncio.run(main())
    assert order == [0, 1, 2, 3] and outstanding() == 0


def test_a_part_in_the_middle_that_cannot_be_read(tmp_path: Path) -> None:
    """The place that is named is the first one that is missing; what is queued behind is read."""
    (tmp_path / "file").write_bytes(os.urandom(5 * MIB + 5))

    async def main() -> None:
        file = CountedFile(tmp_path / "file")
        async with WorkerPool(3) as workers:
            with lease_buffer(bytearray(8 * MIB)) as one, lease_buffer(bytearray(MIB)) as two:
                bad = workers.read_file(file, 0, one, 8 * MIB, part=256 << 10)
                good = workers.read_file(file, MIB, two, MIB, part=256 << 10)
                with pytest.raises(OSError, match=rf"read {tmp_path}/file at byte {5 * MIB + 5}:") as caught:
                    await bad
                assert caught.value.errno == errno.ENODATA
                assert await good == independent.crc32c((tmp_path / "file").read_bytes()[MIB : 2 * MIB])
                with pytest.raises(ValueError, match="parts of -1"):
                    workers.read_file(file, 0, one, MIB, part=-1)
        assert file.holds == 1
        file.release()

    asyncio.run(main())
    assert outstanding() == 0


def test_a_file_that_ends_before_and_one_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(3 * MIB))
    room = bytearray(4 * MIB)

    async def main() -> None:
        async with WorkerPool(1) as workers:
            with lease_buffer(room) as lease:
                file = CountedFile(tmp_path / "file")
                with pytest.raises(OSError, match=rf"read {tmp_path}/file at byte {3 * MIB}") as caught:
                    await workers.read_file(file, MIB, lease, 4 * MIB)
                assert caught.value.errno == errno.ENODATA
                file.release()
                folder = CountedFile(tmp_path)
                with pytest.raises(IsADirectoryError):
                    await workers.read_file(folder, 0, lease, 4096)
                with pytest.raises(ValueError, match="no file has a byte"):
                    await workers.read_file(folder, 1 << 63, lease, 4096)
                assert folder.holds == 1
                folder.release()
            with pytest.raises((ValueError, BufferError)), lease_buffer(bytes(4096)) as lease:
                await workers.read_file(folder, 0, lease, 4096)

    asyncio.run(main())
    assert outstanding() == 0


def test_the_job_holds_the_file_though_nobody_waits_any_more(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(8 * MIB))
    room = bytearray(8 * MIB)

    async def main() -> None:
        file = CountedFile(tmp_path / "file")
        async with WorkerPool(1) as workers:
            futures = []
            with lease_buffer(room) as lease:
                for _ in range(4):
                    futures.append(workers.read_file(file, 0, lease, 8 * MIB))
                    futures[-1].cancel()
            assert file.holds == 5
        assert file.holds == 1
        file.release()

    asyncio.run(main())
    assert room == (tmp_path / "file").read_bytes() and outstanding() == 0


def test_holes_become_huge_pages_where_the_kernel_gives_them() -> None:
    pool = memory(16 * MIB)
    source = bytearray(os.urandom(8 * MIB))

    async def main() -> Scan:
        mapping = PoolMapping(pool, 16 * MIB, writable=True)
        async with WorkerPool(2) as workers:
            with lent(mapping, 4 * MIB, 8 * MIB) as to, lease_buffer(source) as lease:
                scan = await workers.copy(to, lease, 8 * MIB, huge=True)
        mapping.close()
        return scan

    assert asyncio.run(main()) == Scan(independent.crc32c(source), zero=False)
    assert os.pread(pool, 8 * MIB, 4 * MIB) == source
    assert os.fstat(pool).st_blocks * 512 == 8 * MIB, "nothing beyond it"
    os.close(pool)


def test_idle_workers_are_of_the_idle_class() -> None:
    """The thread sets its class before it takes its first piece."""

    async def main() -> int:
        before = set(os.listdir("/proc/self/task"))
        async with WorkerPool(1, idle=True) as workers:
            room = bytearray(MIB)
            with lease_buffer(room) as lease:
                assert await workers.scan(lease, MIB) == Scan(independent.crc32c(room), zero=True)
            (made,) = set(os.listdir("/proc/self/task")) - before
            return os.sched_getscheduler(int(made))

    assert asyncio.run(main()) == os.SCHED_IDLE


def test_what_cannot_be_mapped() -> None:
    pool = memory(PIECE)
    with pytest.raises(ValueError, match="nothing to map"):
        PoolMapping(pool, 0)
    reading = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(OSError, match="mmap pool"):
        PoolMapping(reading, PIECE, writable=True)
    os.close(reading)
    os.close(pool)


@pytest.mark.parametrize("nbytes", [0, 1, 65536, 5 * MIB + 123])
def test_looking_at_a_file_without_keeping_it(tmp_path: Path, nbytes: int) -> None:
    data = os.urandom(777) + (b"\1" + os.urandom(nbytes))[:nbytes]  # not all zero, however short
    (tmp_path / "file").write_bytes(data + bytes(3 * MIB))

    async def main() -> None:
        file = CountedFile(tmp_path / "file")
        async with WorkerPool(3) as workers:
            assert await workers.scan_file(file, 777, nbytes) == Scan(
                independent.crc32c(data[777:]), nbytes == 0
            )
            zeros = await workers.scan_file(file, len(data), 3 * MIB)
            assert zeros == Scan(independent.crc32c(bytes(3 * MIB)), True)
            with pytest.raises(OSError, match=f"at byte {len(data) + 3 * MIB}") as caught:
                await workers.scan_file(file, len(data), 3 * MIB + 1)
            assert caught.value.errno == errno.ENODATA
            with pytest.raises(ValueError, match="bytes of a file"):
                await workers.scan_file(file, 0, -1)
        assert file.holds == 1
        file.release()

    asyncio.run(main())
