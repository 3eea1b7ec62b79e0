"""Files into device memory on the simulated driver: right bytes, right sums, bounds, errors."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import crc32c as reference
import pytest

from ckptpipe.pyx import cuda
from ckptpipe.pyx.workers import Scan
from tests.counted_file import CountedFile, held
from tests.pyx.gpu import MIB, Machine, done, machine, pattern
from tests.pyx.loads import PIECE, Loading
from tests.pyx.loops import LoopFactory, each_loop, run, turns, until

SIZES = [1, 63, 4096, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, MIB + 5]
each_checksum = pytest.mark.parametrize("checksum", ["device", "host"])


@each_loop
@each_checksum
@pytest.mark.parametrize("part", [4096, PIECE // 4, 3 * PIECE // 4, MIB])
def test_bytes_and_sums_of_every_size(
    tmp_path: Path, loop_factory: LoopFactory, checksum: str, part: int
) -> None:
    data = pattern(2 * MIB + 100)
    (tmp_path / "f").write_bytes(data)
    plan = cuda.LoadPlan(threads=3, buffers=2, copy_bytes=PIECE, part_bytes=part)

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, len(data) + 64)
        async with Loading(gpus, plan, checksum=checksum) as queue:
            with held(tmp_path / "f") as file:
                for nbytes in SIZES:
                    for offset in (0, 1, 4096, 77777):
                        answer = await queue.load(file, offset, nbytes, target)
                        part = data[offset : offset + nbytes]
                        assert answer == Scan(reference.crc32c(part), zero=False), (nbytes, offset)
                        assert gpus.read(0, target, nbytes) == part
                assert await queue.load(file, 0, 0, target) == Scan(0, zero=True)
            assert queue.copied == 4 * sum(SIZES)
            assert queue.inflight == 0

    with machine() as gpus:
        run(main(gpus), loop_factory)


@each_checksum
def test_nothing_is_summed_that_nobody_asks_for(tmp_path: Path, checksum: str) -> None:
    data = pattern(3 * PIECE + 5)
    (tmp_path / "f").write_bytes(data)

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, len(data))
        async with Loading(gpus, checksum=checksum) as queue:
            scans = gpus.world.calls("cuLaunchKernel")
            with held(tmp_path / "f") as file:
                assert await queue.load(file, 0, len(data), target, scan=False) is None
                assert gpus.read(0, target, len(data)) == data
                assert await queue.load(file, 0, 0, target, scan=False) is None
                with pytest.raises(EOFError):
                    await queue.load(file, 1, len(data), target, scan=False)
            assert gpus.world.calls("cuLaunchKernel") == scans

    with machine() as gpus:
        run(main(gpus))


@each_checksum
def test_zeros_are_seen(tmp_path: Path, checksum: str) -> None:
    (tmp_path / "zeros").write_bytes(bytes(5 * PIECE))
    (tmp_path / "other").write_bytes(bytes(5 * PIECE - 1) + b"\1")

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, 5 * PIECE)
        async with Loading(gpus, checksum=checksum) as queue:
            for name, zero in (("zeros", True), ("other", False)):
                with held(tmp_path / name) as file:
                    expected = Scan(reference.crc32c((tmp_path / name).read_bytes()), zero)
                    assert await queue.load(file, 0, 5 * PIECE, target) == expected

    with machine() as gpus:
        run(main(gpus))


@each_loop
def test_many_at_once_from_several_files(tmp_path: Path, loop_factory: LoopFactory) -> None:
    nbytes = 3 * PIECE + 17
    parts = [pattern(nbytes, seed) for seed in range(24)]
    for number in range(3):
        (tmp_path / f"f{number}").write_bytes(b"".join(parts[number::3]))

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, 24 * nbytes)
        files = [CountedFile(tmp_path / f"f{number}") for number in range(3)]
        async with Loading(gpus, cuda.LoadPlan(4, 12, PIECE, PIECE // 2), depth=5) as queue:
            answers = await asyncio.gather(
                *(queue.load(files[k % 3], k // 3 * nbytes, nbytes, target + k * nbytes) for k in range(24))
            )
        assert answers == [(reference.crc32c(part), False) for part in parts]
        assert gpus.read(0, target, 24 * nbytes) == b"".join(parts)
        for file in files:
            assert (file.holds, file.most) == (1, 9)
            file.release()

    with machine() as gpus:
        run(main(gpus), loop_factory)


def test_reads_that_come_up_short_are_gone_on_with() -> None:
    """A file of /proc gives a page or so a call."""
    path = Path("/proc/kallsyms")
    if not path.exists():
        pytest.skip("no /proc/kallsyms here")
    with open(path, "rb") as file:
        data = file.read(3 * PIECE)
    if len(data) < 3 * PIECE:
        pytest.skip("/proc/kallsyms is not readable here")
    probe = os.open(path, os.O_RDONLY)
    assert 0 < len(os.pread(probe, PIECE, 0)) < PIECE, "this test needs a file that is read in parts"
    os.close(probe)

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, 3 * PIECE)
        async with Loading(gpus, cuda.LoadPlan(1, 1, PIECE, PIECE)) as queue:
            with held(path) as file:
                assert (await queue.load(file, 0, 3 * PIECE, target)).crc32c == reference.crc32c(data)

    with machine() as gpus:
        run(main(gpus))


@each_loop
def test_a_file_that_ends_early_fails_alone(tmp_path: Path, loop_factory: LoopFactory) -> None:
    data = pattern(4 * PIECE)
    (tmp_path / "f").write_bytes(data)

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, 16 * PIECE)
        async with Loading(gpus) as queue:
            with held(tmp_path / "f") as file:
                late, beyond, good = await asyncio.gather(
                    queue.load(file, PIECE, 3 * PIECE + 1, target),
                    queue.load(file, 9 * PIECE, PIECE, target + 8 * PIECE),
                    queue.load(file, 0, 4 * PIECE, target + 4 * PIECE),
                    return_exceptions=True,
                )
            assert isinstance(late, EOFError)
            assert str(late) == f"ends at byte {4 * PIECE}, {4 * PIECE + 1} were to be read"
            assert isinstance(beyond, EOFError)
            assert good == (reference.crc32c(data), False)
            assert queue.copied == 4 * PIECE

    with machine() as gpus:
        run(main(gpus), loop_factory)


def test_what_pread_answers_is_the_error(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(pattern(4 * PIECE))

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, 4 * PIECE)
        async with Loading(gpus) as queue:
            with held(tmp_path / "f", os.O_WRONLY) as file:
                with pytest.raises(OSError, match="Bad file descriptor") as caught:
                    await queue.load(file, 0, 4 * PIECE, target)
                assert caught.value.errno == 9
            with held(tmp_path, os.O_RDONLY | os.O_DIRECTORY) as file:
                with pytest.raises(IsADirectoryError):
                    await queue.load(file, 0, 4 * PIECE, target)
            with held(tmp_path / "f") as file:
                assert not (await queue.load(file, 0, 4 * PIECE, target)).zero

    with machine() as gpus:
        run(main(gpus))


@each_loop
@pytest.mark.parametrize("point", ["before", "after"])
@pytest.mark.parametrize(
    "call", ["cuMemcpyHtoDAsync", "cuEventRecord", "cuEventQuery", "cuLaunchKernel", "cuEventSynchronize"]
)
def test_each_call_of_the_driver_can_fail(
    tmp_path: Path, loop_factory: LoopFactory, call: str, point: str
) -> None:
    data = pattern(6 * PIECE)
    (tmp_path / "f").write_bytes(data)

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, len(data))
        async with Loading(gpus) as queue:
            with held(tmp_path / "f") as file:
                fault = gpus.world.fault(call, nth=1, error="CUDA_ERROR_LAUNCH_FAILED", point=point)
                with pytest.raises(cuda.CudaError, match="CUDA_ERROR_LAUNCH_FAILED") as caught:
                    await queue.load(file, 0, len(data), target)
                assert fault.fired == 1
                assert caught.value.call == call
                assert "GPU 0" in str(caught.value)
                fault.cancel()
                assert await queue.load(file, 0, len(data), target) == (reference.crc32c(data), False)

    with machine() as gpus:
        run(main(gpus), loop_factory)


def test_work_that_fails_on_the_device_fails_its_load(tmp_path: Path) -> None:
    data = pattern(6 * PIECE)
    (tmp_path / "f").write_bytes(data)

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, len(data))
        async with Loading(gpus, cuda.LoadPlan(2, 4, PIECE, PIECE // 4)) as queue:
            with held(tmp_path / "f") as file:
                error = "CUDA_ERROR_ECC_UNCORRECTABLE"
                gpus.world.fault("cuMemcpyHtoDAsync", nth=3, error=error, scope="stream")
                for _ in range(2):  # the stream is lost
                    with pytest.raises(cuda.CudaError, match=error):
                        await queue.load(file, 0, len(data), target)

    with machine() as gpus:
        run(main(gpus))


@each_loop
def test_a_link_that_stands_still_holds_up_the_reading(tmp_path: Path, loop_factory: LoopFactory) -> None:
    """Each buffer is read into once, and no further before the GPU has fetched it."""
    data = pattern(12 * PIECE)
    (tmp_path / "f").write_bytes(data)

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, len(data))
        async with Loading(gpus, cuda.LoadPlan(2, 6, PIECE, PIECE // 4)) as queue:
            with held(tmp_path / "f") as file:
                copies = gpus.world.calls("cuMemcpyHtoDAsync")
                gpus.world.link(0, to_device=-1)
                future = queue.load(file, 0, len(data), target)
                await until(lambda: gpus.world.calls("cuMemcpyHtoDAsync") == copies + 6)
                await turns(50)
                assert gpus.world.calls("cuMemcpyHtoDAsync") == copies + 6
                gpus.world.link(0, to_device=0)
                assert await future == (reference.crc32c(data), False)

    with machine() as gpus:
        run(main(gpus), loop_factory)


def test_the_callers_stream_orders_the_pieces(tmp_path: Path) -> None:
    data = pattern(4 * PIECE)
    (tmp_path / "f").write_bytes(data)

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, len(data))
        with gpus.current(0):
            stream = done(gpus.driver.cuStreamCreate(1))
        async with Loading(gpus, stream=int(stream)) as queue:
            with held(tmp_path / "f") as file:
                with gpus.current(0):
                    done(gpus.driver.cuMemsetD8Async(target, 7, len(data), stream))
                assert await queue.load(file, 0, len(data), target) == (reference.crc32c(data), False)
        with gpus.current(0):
            done(gpus.driver.cuStreamSynchronize(stream))
            done(gpus.driver.cuStreamDestroy(stream))
        assert gpus.read(0, target, len(data)) == data

    with machine() as gpus:
        run(main(gpus))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")

    async def main(gpus: Machine) -> None:
        context = gpus.context(0)
        target = gpus.allocate(0, MIB)
        async with cuda.CopyQueue(0, context) as queue:
            for plan in (cuda.LoadPlan(1, 1, 1000, 4096), cuda.LoadPlan(1, 1, 4096, 5000)):
                with pytest.raises(ValueError, match="multiples of 4096"):
                    await cuda.FileLoader.open(queue, context, plan)
            for plan in (
                cuda.LoadPlan(1, 257, 4096, 4096),
                cuda.LoadPlan(257, 1, 4096, 4096),
            ):
                with pytest.raises(ValueError, match="out of range"):
                    await cuda.FileLoader.open(queue, context, plan)
        async with Loading(gpus) as queue:
            with held(tmp_path / "f") as file:
                with pytest.raises(ValueError, match="-1 bytes"):
                    queue.load(file, 0, -1, target)
                with pytest.raises(ValueError, match="no file offset"):
                    queue.load(file, 1 << 63, 1, target)
                with pytest.raises(ValueError, match="no device memory range"):
                    queue.load(file, 0, 1, 0)

    with machine() as gpus:
        run(main(gpus))
