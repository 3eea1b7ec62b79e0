"""I/O engines: each one, buffered and direct, against what plain Python reads and writes."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptpipe.pyx.errors import CkptpipeError, IoError
from ckptpipe.pyx.files import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE
from ckptpipe.pyx.io_engine import EngineName, live_engines, open_engine
from ckptpipe.pyx.staging import lease_buffer
from ckptpipe.pyx.threads import ThreadsEngine
from ckptpipe.pyx.uring import UringEngine
from tests.pyx.engines import ENGINES, LOOPS, REFUSED, content, descriptor, engine, fill, pipe, ring, run
from tests.pyx.loop_disk import NoLoopDisk, loop_disk

DISK_BYTES = 24 << 20
RW = os.O_RDWR | os.O_CREAT


@pytest.fixture(params=ENGINES)
def kind(request: pytest.FixtureRequest) -> EngineName:
    name: EngineName = request.param
    if name in REFUSED:
        pytest.skip(f"{name} does not run here: {REFUSED[name]}")
    return name


@pytest.fixture(params=sorted(LOOPS))
def loop(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """ext4 with 4 KiB sectors and little space."""
    try:
        with loop_disk(tmp_path_factory.mktemp("loop"), nbytes=DISK_BYTES) as mount:
            yield mount
    except NoLoopDisk as error:
        pytest.skip(f"no loop device: {error}")


@pytest.fixture(params=["buffered", "direct", "direct-4k"])
def medium(request: pytest.FixtureRequest, workdir: Path) -> Iterator[tuple[Path, int]]:
    """(a file's path, flags to open it with) on the real disk, or on the one with 4 KiB sectors."""
    if request.param == "direct-4k":
        path = request.getfixturevalue("small_disk") / "file"
        yield path, os.O_DIRECT
        path.unlink(missing_ok=True)
    else:
        yield workdir / "file", os.O_DIRECT if request.param == "direct" else 0


def noise(nbytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(nbytes)


# -- round trips -----------------------------------------------------------------------------------------


def test_write_then_read(kind: EngineName, loop: str, medium: tuple[Path, int]) -> None:
    path, flags = medium
    data = noise(6 << 16)

    async def main() -> None:
        async with engine(kind, depth=4) as io:
            assert (io.name, io.requested, io.why) == (kind, kind, "")
            with ring() as staging, descriptor(path, RW | flags) as fd:
                for offset in range(0, len(data), 1 << 16):
                    with await staging.acquire() as lease:
                        fill(lease, data[offset : offset + (1 << 16)])
                        assert await io.write(fd, lease, 1 << 16, offset, str(path)) == 1 << 16
                await io.fsync(fd, str(path))
                await io.fsync(fd, str(path), data_only=True)
                assert path.read_bytes() == data
                for offset in range(0, len(data), 1 << 16):
                    with await staging.acquire() as lease:
                        assert await io.read(fd, lease, 1 << 16, offset, str(path)) == 1 << 16
                        assert content(lease, 1 << 16) == data[offset : offset + (1 << 16)]

    run(main(), loop)


def test_fallocate_reserves_and_punches(kind: EngineName, medium: tuple[Path, int]) -> None:
    path, flags = medium

    async def main() -> None:
        async with engine(kind) as io:
            with descriptor(path, RW | flags) as fd:
                await io.fallocate(fd, 0, 0, 1 << 20, str(path))
                assert os.fstat(fd).st_size == 1 << 20
                before = os.fstat(fd).st_blocks
                await io.fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 0, 1 << 19, str(path))
                assert os.fstat(fd).st_size == 1 << 20
                assert os.fstat(fd).st_blocks <= before - 1000  # 512 KiB in units of 512 bytes are 1024

    run(main())


@pytest.mark.parametrize("size", [1, 512 * 3, 4096, 10_000, 65_536 + 512])
def test_end_of_file_shortens_a_read(kind: EngineName, medium: tuple[Path, int], size: int) -> None:
    path, flags = medium
    path.write_bytes(noise(size))

    async def main(limit: int) -> None:
        async with engine(kind) as io:
            io._limit_transfer = limit
            with ring(1, 1 << 17) as staging, descriptor(path, os.O_RDONLY | flags) as fd:
                with await staging.acquire() as lease:
                    fill(lease, b"\xff" * (1 << 17))
                    assert await io.read(fd, lease, 1 << 17, 0, str(path)) == size
                    assert content(lease, size) == path.read_bytes()
                    past = -(-size // 4096) * 4096
                    assert await io.read(fd, lease, 4096, past, str(path)) == 0

    run(main(1 << 30))
    run(main(4096))


def test_short_transfers_are_continued(kind: EngineName, medium: tuple[Path, int]) -> None:
    path, flags = medium
    data = noise(1 << 16)

    async def main() -> None:
        async with engine(kind, depth=2) as io:
            io._limit_transfer = 4096
            with ring(2) as staging, descriptor(path, RW | flags) as fd:
                with await staging.acquire() as out, await staging.acquire() as back:
                    fill(out, data)
                    assert await io.write(fd, out, len(data), 8192, str(path)) == len(data)
                    assert path.read_bytes() == bytes(8192) + data
                    assert await io.read(fd, back, len(data), 8192, str(path)) == len(data)
                    assert content(back, len(data)) == data

    run(main())


@pytest.mark.parametrize("blocking", [True, False])
def test_pipe_larger_than_its_buffer(kind: EngineName, loop: str, blocking: bool) -> None:
    """A pipe gives and takes 64 KiB at most, and EAGAIN where it does not block: every transfer is short."""
    data = noise(1 << 18)

    async def main() -> None:
        async with engine(kind) as io:
            with ring(2, len(data)) as staging, pipe() as (source, sink):
                os.set_blocking(source, blocking)
                os.set_blocking(sink, blocking)
                with await staging.acquire() as out, await staging.acquire() as back:
                    fill(out, data)
                    reading = io.read(source, back, len(data), -1, "pipe")
                    assert await io.write(sink, out, len(data), -1, "pipe") == len(data)
                    assert await reading == len(data)
                    assert content(back, len(data)) == data

    run(main(), loop)


def test_many_operations_wait_for_depth(kind: EngineName, loop: str, medium: tuple[Path, int]) -> None:
    path, flags = medium
    data = noise(200 * 4096)
    path.write_bytes(data)

    async def main() -> None:
        async with engine(kind, depth=8) as io:
            with ring(200, 4096) as staging, descriptor(path, os.O_RDONLY | flags) as fd:
                leases = [await staging.acquire() for _ in range(200)]
                reads = [io.read(fd, lease, 4096, i * 4096, str(path)) for i, lease in enumerate(leases)]
                assert io.inflight == 200
                assert io.running == 8
                assert await asyncio.gather(*reads) == [4096] * 200
                assert (io.inflight, io.running) == (0, 0)
                assert b"".join(content(lease, 4096) for lease in leases) == data
                for lease in leases:
                    lease.release()

    run(main(), loop)


def test_operations_of_one_turn_are_started_together(kind: EngineName, workdir: Path) -> None:
    (workdir / "file").write_bytes(noise(4096 * 3))

    async def main() -> None:
        async with engine(kind, depth=8) as io:
            with ring(3, 4096) as staging, descriptor(workdir / "file", os.O_RDONLY) as fd:
                leases = [await staging.acquire() for _ in range(3)]
                reads = [io.read(fd, lease, 4096, i * 4096, "file") for i, lease in enumerate(leases)]
                assert (io.inflight, io.running) == (3, 0)
                assert await asyncio.gather(*reads) == [4096] * 3
                for lease in leases:
                    lease.release()

    run(main())


def test_nothing_to_transfer(kind: EngineName) -> None:
    async def main() -> None:
        async with engine(kind) as io:
            with lease_buffer(bytearray(1)) as lease:
                assert await io.read(0, lease, 0, 0, "file") == 0
                assert await io.write(0, lease, 0, 0, "file") == 0

    run(main())


# -- io_uring's own --------------------------------------------------------------------------------------


@pytest.mark.skipif("io_uring" in REFUSED, reason=f"io_uring does not run here: {REFUSED.get('io_uring')}")
@pytest.mark.parametrize("deferred", [True, False])
def test_registered_and_foreign_memory(workdir: Path, deferred: bool) -> None:
    path = workdir / "file"
    data = noise(1 << 16)

    async def main() -> None:
        registered = bytearray(1 << 16)
        with ring(2) as staging, descriptor(path, RW) as fd:
            io = UringEngine(4, buffers=[staging, registered], deferred=deferred)
            try:
                if not io.registered_bytes:
                    pytest.skip(f"no registered buffers here: {io.notes}")
                assert io.registered_bytes == staging.nbytes + len(registered)
                with await staging.acquire() as out, lease_buffer(registered) as second:
                    fill(out, data)
                    assert await io.write(fd, out, len(data), 0, str(path)) == len(data)
                    assert path.read_bytes() == data
                    assert await io.read(fd, second, 1000, 77, str(path)) == 1000
                    with lease_buffer(bytearray(1000)) as foreign:
                        assert await io.read(fd, foreign, 1000, 77, str(path)) == 1000
                        assert content(foreign, 1000) == content(second, 1000) == data[77:1077]
            finally:
                await io.aclose()

    run(main())


@pytest.mark.skipif("io_uring" in REFUSED, reason=f"io_uring does not run here: {REFUSED.get('io_uring')}")
def test_read_only_buffer_is_not_registered() -> None:
    async def main() -> None:
        io = UringEngine(1, buffers=[b"constant"])
        try:
            assert io.registered_bytes == 0
            assert io.notes == ["io_uring: a read-only buffer was not registered"]
            with pytest.raises(TypeError, match="int is neither a staging ring nor a buffer"):
                UringEngine(1, buffers=[7])
        finally:
            await io.aclose()

    run(main())


# -- errors ----------------------------------------------------------------------------------------------


def test_unaligned_direct_write_names_the_cure(kind: EngineName, small_disk: Path) -> None:
    path = small_disk / "unaligned"

    async def main() -> None:
        async with engine(kind) as io:
            with ring(1) as staging, descriptor(path, RW | os.O_DIRECT) as fd:
                with await staging.acquire() as lease:
                    with pytest.raises(IoError, match="align") as caught:
                        await io.write(fd, lease, 512, 0, str(path))
        assert caught.value.errno == errno.EINVAL
        assert caught.value.operation == "write"
        assert str(caught.value).startswith(f"write {path}: Invalid argument; direct I/O wants")
        assert "length 512" in caught.value.cure

    run(main())


def test_full_disk(kind: EngineName, small_disk: Path) -> None:
    path = small_disk / "full"

    async def main() -> None:
        async with engine(kind) as io:
            with ring(1, 1 << 20) as staging, descriptor(path, RW) as fd:
                with pytest.raises(IoError, match="make room") as caught:
                    await io.fallocate(fd, 0, 0, 1 << 30, str(path))
                assert (caught.value.errno, caught.value.operation) == (errno.ENOSPC, "fallocate")
                with await staging.acquire() as lease:
                    with pytest.raises(IoError, match=r"write .*full: No space left") as caught:
                        for i in range(DISK_BYTES >> 20):
                            await io.write(fd, lease, 1 << 20, i << 20, str(path))
                            await io.fsync(fd, str(path))
                assert caught.value.errno == errno.ENOSPC

    try:
        run(main())
    finally:
        path.unlink(missing_ok=True)


def test_closed_descriptor_directory_and_broken_pipe(kind: EngineName, tmp_path: Path) -> None:
    async def main() -> None:
        async with engine(kind) as io:
            with lease_buffer(bytearray(10)) as lease, pipe() as (source, sink):
                with descriptor(tmp_path, os.O_RDONLY | os.O_DIRECTORY) as folder:
                    with pytest.raises(IsADirectoryError, match="name a file"):
                        await io.read(folder, lease, 10, 0, str(tmp_path))
                with pytest.raises(IoError, match="Bad file descriptor") as caught:
                    await io.read(folder, lease, 10, 0, "gone")
                assert caught.value.errno == errno.EBADF
                assert caught.value.filename == "gone"
                for call in (io.fsync(folder, "gone"), io.fallocate(folder, 0, 0, 1, "gone")):
                    with pytest.raises(IoError) as caught:
                        await call
                    assert caught.value.errno == errno.EBADF
                os.close(source)
                with pytest.raises(BrokenPipeError, match="write pipe: Broken pipe"):
                    await io.write(sink, lease, 10, -1, "pipe")

    run(main())


def test_arguments_are_checked_before_anything_is_held(kind: EngineName) -> None:
    async def main() -> None:
        async with engine(kind) as io:
            with lease_buffer(bytearray(10)) as lease, lease_buffer(b"0123456789") as constant:
                with pytest.raises(ValueError):
                    io.read(0, lease, 11, 0, "file")
                with pytest.raises(ValueError):
                    io.write(0, lease, -1, 0, "file")
                with pytest.raises(ValueError, match="offset -2"):
                    io.read(0, lease, 1, -2, "file")
                with pytest.raises(ValueError):
                    io.read(0, constant, 1, 0, "file")
            with pytest.raises(RuntimeError):
                io.read(0, lease, 10, 0, "file")
            assert io.inflight == 0

    run(main())
    with pytest.raises(ValueError, match="none of auto, io_uring"):
        open_engine("aio")  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [0, 100_000])
def test_depth_is_bounded(kind: EngineName, depth: int) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="depth"):
            open_engine(kind, depth=depth)

    run(main())


def test_engine_belongs_to_its_thread(kind: EngineName) -> None:
    async def main() -> None:
        async with engine(kind) as io:
            caught: list[BaseException] = []

            def other() -> None:
                try:
                    io.fsync(0, "file")
                except CkptpipeError as error:
                    caught.append(error)

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            assert "belongs to another thread" in str(caught[0])

    run(main())


# -- life ------------------------------------------------------------------------------------------------


def test_two_engines_and_a_second_loop(kind: EngineName, loop: str, workdir: Path) -> None:
    path = workdir / "file"
    path.write_bytes(noise(4096))

    async def main() -> None:
        async with engine(kind) as first, engine("threads") as second:
            assert live_engines() == 2
            with ring(2) as staging, descriptor(path, os.O_RDONLY) as fd:
                with await staging.acquire() as one, await staging.acquire() as two:
                    reads = [first.read(fd, one, 4096, 0, "file"), second.read(fd, two, 4096, 0, "file")]
                    assert await asyncio.gather(*reads) == [4096, 4096]
                    assert content(one, 4096) == content(two, 4096)

    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        run(main(), loop)
        assert live_engines() == 0
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert not [name for name in thread_names() if name.startswith("ckpt-io")]


def thread_names() -> list[str]:
    return [Path(f"/proc/self/task/{tid}/comm").read_text().strip() for tid in os.listdir("/proc/self/task")]


def test_threads_start_as_they_are_needed() -> None:
    async def main() -> None:
        io = ThreadsEngine(8, threads=3)
        with pipe() as (source, sink):
            leases = [lease_buffer(bytearray(1)) for _ in range(5)]
            assert io.threads == 1
            reads = [io.read(source, lease, 1, -1, "pipe") for lease in leases]
            await asyncio.sleep(0)
            assert io.threads == 3
            os.write(sink, b"12345")
            assert await asyncio.gather(*reads) == [1] * 5
            assert sorted(content(lease, 1) for lease in leases) == [b"1", b"2", b"3", b"4", b"5"]
            for lease in leases:
                lease.release()
        await io.aclose()
        assert io.threads == 0

    run(main())
