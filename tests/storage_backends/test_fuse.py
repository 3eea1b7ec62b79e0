"""The fuse backend on a real FUSE mount: recognised, in place, in order, and honest about what failed."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptpipe.storage_backends import fuse
from ckptpipe.storage_backends.abc import Backend
from ckptpipe.storage_backends.errors import (
    BadUrl,
    NoSpace,
    ObjectExists,
    StorageError,
    StoreNotFound,
)
from ckptpipe.storage_backends.registry import open_backend, scheme_of
from ckptpipe.storage_backends.testing.bench import data_of
from tests.pyx.loop_disk import NoLoopDisk, loop_disk
from tests.services.mounts import Mount, start_bindfs
from tests.services.process import ServiceMissing
from tests.storage_backends.lent import SLOT, Lent, run

pytestmark = pytest.mark.fuse


def bindfs(behind: Path, folder: Path) -> Mount:
    behind.mkdir(exist_ok=True)
    try:
        return start_bindfs(behind, folder)
    except ServiceMissing as error:
        pytest.skip(str(error))


@pytest.fixture
def behind(workdir: Path) -> Path:
    return workdir / "behind"


@pytest.fixture
def bound(workdir: Path, behind: Path) -> Iterator[Mount]:
    with bindfs(behind, workdir) as mounted:
        yield mounted


@pytest.fixture
def mount(bound: Mount) -> Path:
    return bound.path


def test_a_path_on_a_fuse_mount_is_recognised(mount: Path, behind: Path) -> None:
    assert scheme_of(str(mount)) == "fuse"
    assert scheme_of(f"{mount}/not/made/yet") == "fuse"
    assert scheme_of(f"file://{mount}/not/made/yet") == "fuse"
    assert scheme_of(str(behind)) == "nvme"
    assert scheme_of(f"nvme:{mount}") == "nvme"

    async def main(lent: Lent) -> None:
        backend = await lent.open(mount / "store")
        assert isinstance(backend, fuse.FuseBackend)
        assert backend.url == f"fuse:{mount}/store"
        facts = backend.capabilities
        assert (facts.put_atomic, facts.if_absent, facts.durable) == ("in-place", "checked", True)
        await lent.write(backend, "data", data_of(1, SLOT))
        await backend.put_atomic("manifest.json", b"{}")
        assert backend.report().direct == "off"
        await backend.aclose()

    run(main)
    store = behind / "store"
    assert (store / "data").read_bytes() == data_of(1, SLOT)
    assert stat.S_IMODE((store / "data").stat().st_mode) == 0o600
    assert stat.S_IMODE(store.stat().st_mode) == 0o700


def test_a_plain_directory_is_refused_unless_forced(workdir: Path) -> None:
    async def main(lent: Lent) -> None:
        with pytest.raises(StoreNotFound, match=r"is not on a FUSE mount \(it lies on .*\); mount it first"):
            await open_backend(f"fuse:{workdir}/store", lent.context)
        forced = await lent.open(f"fuse:{workdir}/store", {"force": True})
        await lent.write(forced, "data", data_of(1, SLOT))
        assert await lent.read(forced, "data", SLOT) == data_of(1, SLOT)
        await forced.aclose()

    run(main)


def test_one_directory_only(workdir: Path) -> None:
    async def main(lent: Lent) -> None:
        with pytest.raises(BadUrl, match="one directory"):
            await open_backend(f"fuse:{workdir}/a,{workdir}/b", lent.context)

    run(main)


def test_nothing_but_sequential_writes_reaches_the_mount(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One write in flight, each where the one before ended; no rename, truncate or fallocate."""
    calls: list[tuple[int, int]] = []

    async def main(lent: Lent) -> None:
        backend = await lent.open(f"fuse:{workdir}/store", {"force": True})
        writer = await backend.create("data")
        io = lent.context.io
        writing = io.write

        def write(fd: int, lease: Any, nbytes: int, offset: int, path: str) -> asyncio.Future[int]:
            assert io.inflight == 0
            calls.append((offset, nbytes))
            return writing(fd, lease, nbytes, offset, path)

        class Watched:
            def __getattr__(self, name: str) -> Any:
                assert name != "fallocate"
                return write if name == "write" else getattr(io, name)

        writer._io = Watched()  # type: ignore[attr-defined]
        for name in ("rename", "replace", "link", "ftruncate", "truncate"):
            monkeypatch.setattr(os, name, None)
        sizes = [4096 * (index % 5 + 1) for index in range(16)]
        await asyncio.gather(*(lent.append(writer, data_of(size, size)) for size in sizes))
        await writer.finish()
        await backend.put_atomic("manifest.json", b"{}")
        await backend.put_atomic("manifest.json", b"{new}")
        await backend.aclose()

    run(main)
    assert [offset for offset, _ in calls] == [sum(n for _, n in calls[:index]) for index in range(16)]


def test_if_absent_never_replaces(mount: Path) -> None:
    async def main(lent: Lent) -> None:
        backend = await lent.open(mount)
        results = await asyncio.gather(
            *(backend.put_atomic("small", bytes([65 + i]) * 10, if_absent=True) for i in range(8)),
            return_exceptions=True,
        )
        assert sum(result is None for result in results) == 1
        assert all(isinstance(result, ObjectExists | None) for result in results)
        winner = next(i for i, result in enumerate(results) if result is None)
        assert await backend.read_bytes("small", limit=10) == bytes([65 + winner]) * 10
        await backend.aclose()

    run(main)


def test_what_comes_back_different_is_an_error(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(lent: Lent) -> None:
        backend = await lent.open(f"fuse:{workdir}/store", {"force": True})
        written = fuse.Directory.write_in_place

        def torn(self: fuse.Directory, name: str, data: bytes, *, if_absent: bool) -> None:
            written(self, name, data[:-1], if_absent=if_absent)

        monkeypatch.setattr(fuse.Directory, "write_in_place", torn)
        with pytest.raises(StorageError, match="read back is not what was written"):
            await backend.put_atomic("manifest.json", b"{}")
        await backend.aclose()

    run(main)


def test_a_size_that_is_not_what_was_written_is_an_error(workdir: Path) -> None:
    path = workdir / "store" / "data"

    async def main(lent: Lent) -> None:
        backend = await lent.open(f"fuse:{workdir}/store", {"force": True})
        writer = await backend.create("data")
        await lent.append(writer, data_of(1, SLOT))
        await lent.context.io.drain()
        os.truncate(path, 10)
        with pytest.raises(
            StorageError, match=f"{SLOT} bytes were written and synced, 10 bytes can be found"
        ):
            await writer.finish()
        await writer.abort()
        await backend.aclose()

    run(main)
    assert not path.exists()


def test_a_mount_that_dies_is_an_error_and_is_cleaned_up(bound: Mount) -> None:
    """ENOTCONN on every call: what can be said is said, and no lease or descriptor is kept."""

    async def main(lent: Lent) -> None:
        mount = bound.path
        backend = await lent.open(mount / "store")
        await lent.write(backend, "whole", data_of(1, SLOT))
        writer = await backend.create("data")
        await lent.append(writer, data_of(1, SLOT))
        await lent.context.io.drain()
        bound.process.kill()
        with pytest.raises(StoreNotFound, match=r"mount is dead: unmount it"):
            await lent.append(writer, data_of(2, SLOT))
            await writer.finish()
        with pytest.raises(StoreNotFound, match=r"mount is dead: unmount it"):
            await backend.check(writing=False)
        with pytest.raises(StoreNotFound, match=r"mount is dead: unmount it"):
            await writer.abort()
        assert scheme_of(f"{mount}/store") == "fuse"
        await backend.aclose()
        assert lent.ring.in_use == 0

    run(main)


def test_a_full_disk_behind_the_mount(workdir: Path) -> None:
    try:
        with loop_disk(workdir, nbytes=32 << 20) as disk, bindfs(disk / "behind", workdir) as mounted:
            run(lambda lent: _fill(lent, mounted.path))
            assert os.listdir(disk / "behind" / "store") == []
    except NoLoopDisk as error:
        pytest.skip(str(error))


async def _fill(lent: Lent, mounted: Path) -> None:
    backend: Backend = await lent.open(mounted / "store")
    with pytest.raises(NoSpace):
        await backend.check(writing=True, need_bytes=1 << 30)
    writer = await backend.create("data")
    with pytest.raises(NoSpace, match="save elsewhere"):
        for _ in range(40 << 20 >> 18):
            await lent.append(writer, data_of(1, SLOT))
        await writer.finish()
    await writer.abort()
    await backend.aclose()
