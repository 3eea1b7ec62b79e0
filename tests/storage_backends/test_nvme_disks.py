"""The nvme backend and its disks: direct I/O, reservations, too little space."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptpipe.pyx.checksum import crc32c
from ckptpipe.pyx.staging import lease_buffer
from ckptpipe.storage_backends import nvme
from ckptpipe.storage_backends.abc import Extent
from ckptpipe.storage_backends.errors import (
    NoSpace,
    StorageError,
)
from ckptpipe.storage_backends.testing.bench import data_of
from tests.pyx.loop_disk import NoLoopDisk, loop_disk
from tests.storage_backends.lent import SLOT, Lent, run

PAGE = 4096


@pytest.fixture
def tiny_disk(workdir: Path) -> Iterator[Path]:
    """32 MiB of ext4."""
    try:
        with loop_disk(workdir, nbytes=32 << 20) as mount:
            yield mount
    except NoLoopDisk as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("direct", ["on", "off"])
def test_the_report_says_whether_direct_io_was_used(workdir: Path, direct: str) -> None:
    async def main(lent: Lent) -> None:
        backend = await lent.open(workdir / "store", {"direct": direct})
        assert backend.report().direct == ""
        await lent.write(backend, "data", data_of(1, 4 * SLOT))
        report = backend.report()
        assert (report.backend, report.engine) == ("nvme", lent.context.io.name)
        assert report.direct == ("on" if direct == "on" else "off (as asked)")
        await backend.aclose()

    run(main)


def test_the_file_has_its_true_size_and_bytes_after_a_reservation(workdir: Path) -> None:
    data = data_of(1, 3 * SLOT)

    async def main(lent: Lent) -> None:
        backend = await lent.open(workdir / "store", {"preallocate": "64MiB"})
        info = await lent.write(backend, "data", data)
        assert (info.size, info.crc32c) == (len(data), crc32c(data))
        assert backend.report().notes == []
        await backend.aclose()

    run(main)
    path = workdir / "store" / "data"
    assert path.read_bytes() == data
    assert path.stat().st_blocks * 512 < len(data) + (1 << 20)


def test_memory_that_direct_io_cannot_take_is_written_through_the_cache(workdir: Path) -> None:
    """A foreign buffer at an odd address, in the middle of aligned ones; with direct=on it is an error."""
    parts = [data_of(1, SLOT), data_of(2, 2 * PAGE), data_of(3, SLOT)]
    odd = bytearray(3 * PAGE)  # of bytearrays, addresses are even
    odd[1 : 1 + len(parts[1])] = parts[1]

    async def main(lent: Lent, direct: str) -> str:
        backend = await lent.open(workdir / direct, {"direct": direct})
        writer = await backend.create("data")
        await lent.append(writer, parts[0])
        try:
            with lease_buffer(odd) as whole, whole.slice(1, len(parts[1])) as lease:
                await writer.append([Extent(lease, len(parts[1]), crc32c(parts[1]))])
            await lent.append(writer, parts[2])
            await writer.finish()
        except BaseException:
            await writer.abort()
            raise
        finally:
            report = backend.report()
            await backend.aclose()
        return report.direct

    direct = run(lambda lent: main(lent, "auto"))
    assert direct.startswith("off (memory at a multiple of")
    assert (workdir / "auto" / "data").read_bytes() == b"".join(parts)
    with pytest.raises(StorageError, match=r"direct I/O is on, but memory at a multiple"):
        run(lambda lent: main(lent, "on"))
    assert os.listdir(workdir / "on") == []


def test_direct_on_where_there_is_none_says_what_to_do(tmp_path_factory: pytest.TempPathFactory) -> None:
    """/proc has no direct I/O and no files to make; a file of it stands for such a file system."""

    async def main(lent: Lent) -> None:
        backend = await nvme.NvmeBackend.open("nvme:/proc/self", lent.context, {"direct": "on"})
        with pytest.raises(StorageError, match=r"direct I/O is on, but .*; set direct: auto or off"):
            await lent.read(backend, "status", 0)
        await backend.aclose()

    run(main)


def test_auto_reads_through_the_cache_what_lies_there(workdir: Path) -> None:
    data = data_of(1, 4 * SLOT)

    async def main(lent: Lent) -> tuple[str, str]:
        backend = await lent.open(workdir / "store")
        await lent.write(backend, "data", data)  # direct: nothing of it is cached
        assert backend.report().direct == "on"
        cold = await lent.open(workdir / "store")
        assert await lent.read(cold, "data", SLOT, SLOT) == data[SLOT : 2 * SLOT]
        (workdir / "store" / "data").read_bytes()
        warm = await lent.open(workdir / "store")
        assert await lent.read(warm, "data", SLOT, SLOT) == data[SLOT : 2 * SLOT]
        reports = cold.report().direct, warm.report().direct
        for opened in (backend, cold, warm):
            await opened.aclose()
        return reports

    assert run(main) == ("on", "off (in the page cache)")


def test_too_little_space_is_found_before_the_copy(tiny_disk: Path, workdir: Path) -> None:
    async def main(lent: Lent) -> None:
        backend = await lent.open(tiny_disk / "a")
        await backend.check(writing=True, need_bytes=8 << 20)
        with pytest.raises(NoSpace, match=r"/a: 1\.0 GiB are needed, .* MiB are free"):
            await backend.check(writing=True, need_bytes=1 << 30)
        # Two stripes of one file system share its space.
        striped = await lent.open(f"nvme:{tiny_disk}/a,{tiny_disk}/b")
        await striped.check(writing=True, need_bytes=16 << 20)
        with pytest.raises(NoSpace, match=r"/a, .*/b: 40\.0 MiB are needed"):
            await striped.check(writing=True, need_bytes=40 << 20)
        for opened in (backend, striped):
            await opened.aclose()

    run(main)


@pytest.mark.parametrize("options", [{"direct": "on"}, {"direct": "off"}, {"preallocate": 0}], ids=str)
def test_a_disk_that_gets_full_in_the_middle(tiny_disk: Path, options: dict[str, object]) -> None:
    data = data_of(1, SLOT)

    async def main(lent: Lent) -> None:
        backend = await lent.open(tiny_disk / "store", options)
        writer = await backend.create("data")
        with pytest.raises(NoSpace, match=r"write .*/store/data: .*store is full.*save elsewhere"):
            for _ in range(40 << 20 >> 18):
                await lent.append(writer, data)
            await writer.finish()
        with pytest.raises(NoSpace):
            await writer.finish()
        await writer.abort()
        # Everything is given back: what fits is stored now.
        await lent.write(backend, "small", data)
        assert [info.name async for info in backend.list()] == ["small"]
        assert lent.ring.in_use == 0
        await backend.aclose()

    run(main)


def test_a_nearly_full_disk_takes_what_fits(tiny_disk: Path) -> None:
    """Reservations of several lanes must not make a save fail that has room enough."""
    data = data_of(1, SLOT)

    async def main(lent: Lent) -> None:
        backend = await lent.open(tiny_disk / "store")
        facts = os.statvfs(tiny_disk)
        rounds = int(facts.f_bavail * facts.f_frsize * 0.9) // (4 * SLOT)
        writers = [await backend.create(f"data-{lane}", lane=lane) for lane in range(4)]
        for _ in range(rounds):
            for writer in writers:
                await lent.append(writer, data)
        for writer in writers:
            assert (await writer.finish()).size == rounds * SLOT
        await backend.aclose()

    run(main)
