"""The nvme backend: stripes, modes, permissions, hostile directories, what crashes left."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptpipe.storage_backends import nvme
from ckptpipe.storage_backends.abc import PendingUpload
from ckptpipe.storage_backends.errors import (
    AccessDenied,
    BadUrl,
    ObjectExists,
    ObjectNotFound,
    ObjectTruncated,
    StorageError,
    StoreNotFound,
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


@pytest.fixture(params=[0o000, 0o077, 0o277], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode)
        for path in sorted(folder.rglob("*"))
    }


def test_files_are_0600_and_directories_0700_whatever_the_umask(workdir: Path, umask: int) -> None:
    async def main(lent: Lent) -> None:
        backend = await lent.open(workdir / "new" / "store")
        image = backend.child("image")
        await image.check(writing=True)
        await lent.write(image, "data", data_of(1, SLOT))
        await lent.write(image, "sub/data", data_of(1, PAGE))
        await image.put_atomic("manifest.json", b"{}")
        await image.put_atomic("lease", b"", if_absent=True)
        await backend.aclose()

    run(main)
    assert modes(workdir) == {
        "new": 0o700,
        "new/store": 0o700,
        "new/store/image": 0o700,
        "new/store/image/data": 0o600,
        "new/store/image/lease": 0o600,
        "new/store/image/manifest.json": 0o600,
        "new/store/image/sub": 0o700,
        "new/store/image/sub/data": 0o600,
    }


def test_the_mode_of_an_existing_directory_is_kept(workdir: Path) -> None:
    folder = workdir / "mine"
    folder.mkdir()
    folder.chmod(0o755)

    async def main(lent: Lent) -> None:
        await (await lent.open(folder)).aclose()

    run(main)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_lanes_go_to_their_stripes_and_any_order_reads_them(workdir: Path) -> None:
    a, b, c = workdir / "a", workdir / "b", workdir / "c"

    async def save(lent: Lent) -> None:
        backend = await lent.open(f"nvme:{a},{b},{c}", {"lanes": 2})
        assert (backend.capabilities.stripes, backend.capabilities.lanes) == (3, 6)
        image = backend.child("image")
        assert image.url == f"nvme:{a}/image,{b}/image,{c}/image"
        await image.check(writing=True)
        for lane in range(6):
            await lent.write(image, f"data-{lane}", data_of(lane, PAGE * (lane + 1)), lane=lane)
            await image.put_atomic(f"stripe-{lane}", str(lane).encode(), lane=lane)
        await image.put_atomic("manifest.json", b"first")
        await backend.aclose()

    run(save)
    assert sorted(os.listdir(a / "image")) == ["data-0", "data-3", "manifest.json", "stripe-0", "stripe-3"]
    assert sorted(os.listdir(b / "image")) == ["data-1", "data-4", "stripe-1", "stripe-4"]
    assert sorted(os.listdir(c / "image")) == ["data-2", "data-5", "stripe-2", "stripe-5"]

    async def load(lent: Lent) -> None:
        backend = await lent.open(f"nvme:{c}/image,{a}/image,{b}/image")
        names = [info.name async for info in backend.list()]
        assert names == [*(f"data-{lane}" for lane in range(6)), "manifest.json"] + [
            f"stripe-{lane}" for lane in range(6)
        ]
        for lane in range(6):
            nbytes = PAGE * (lane + 1)
            assert await lent.read(backend, f"data-{lane}", nbytes) == data_of(lane, nbytes)
        # The old manifest is replaced where it lies: there are never two.
        await backend.put_atomic("manifest.json", b"second")
        with pytest.raises(ObjectExists):
            await backend.put_atomic("manifest.json", b"third", if_absent=True)
        with pytest.raises(ObjectExists):
            await backend.create("data-4", lane=0)
        await backend.aclose()

    run(load)
    assert (a / "image" / "manifest.json").read_bytes() == b"second"
    assert not (c / "image" / "manifest.json").exists()


def test_a_missing_stripe_is_named(workdir: Path) -> None:
    (workdir / "a").mkdir()

    async def main(lent: Lent) -> None:
        backend = await nvme.NvmeBackend.open(f"nvme:{workdir}/a,{workdir}/gone", lent.context, {})
        with pytest.raises(StoreNotFound, match=r"/gone: no such directory"):
            await backend.check(writing=False)
        await backend.aclose()

    run(main)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nvme:", "a directory is missing"),
        ("nvme:/a,", "a directory is missing"),
        ("nvme:/a,/b,/a", "named twice"),
        ("nvme:/a,/a/", "named twice"),
        ("nvme://host/dir", "host has no meaning"),
        ("file://host/dir", "directory of this machine"),
        ("/a\0b", "NUL"),
    ],
)
def test_urls_that_make_no_sense(url: str, message: str) -> None:
    async def main(lent: Lent) -> None:
        with pytest.raises(BadUrl, match=message):
            await nvme.NvmeBackend.open(url, lent.context, {})

    run(main)


def test_a_comma_in_a_path(workdir: Path) -> None:
    async def main(lent: Lent) -> str:
        backend = await lent.open(workdir / "a,b c")
        await backend.put_atomic("small", b"x")
        again = await lent.open(backend.url)
        assert await again.read_bytes("small", limit=1) == b"x"
        await again.aclose()
        await backend.aclose()
        return backend.url

    assert run(main) == f"file://{workdir}/a%2Cb%20c"


_AS_NOBODY = """
import asyncio, os, sys
import concurrent.futures.thread  # asyncio's: later, a home of root's cannot be read any more
from ckptpipe.storage_backends import nvme
from ckptpipe.storage_backends.errors import AccessDenied
from ckptpipe.storage_backends.testing import lent_context

if os.geteuid() == 0:  # whom no mode stops
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)

async def main(path):
    async with lent_context(io_engine="threads") as context:
        for place, writing in ((path, True), (path, False), (path + "/deeper", True)):
            backend = await nvme.NvmeBackend.open("nvme:" + place, context, {})
            try:
                await backend.check(writing=writing)
            except AccessDenied as error:
                print(error)

asyncio.run(main(sys.argv[1]))
"""


def test_a_directory_of_another_user() -> None:
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        closed = Path(parent) / "closed"
        closed.mkdir()
        closed.chmod(0o700 if os.geteuid() == 0 else 0)
        done = subprocess.run(
            [sys.executable, "-c", _AS_NOBODY, str(closed)], capture_output=True, text=True, check=False
        )
        closed.chmod(0o700)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stdout
    assert all("ermission denied" in line and str(closed) in line for line in lines)
    assert "uid 65534" in lines[0] or os.geteuid() != 0


def test_a_read_only_file_system(tiny_disk: Path) -> None:
    (tiny_disk / "store").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)

    async def main(lent: Lent) -> None:
        with pytest.raises(AccessDenied, match="read-only"):
            await lent.open(tiny_disk / "store")
        with pytest.raises(AccessDenied, match="read-only"):
            await lent.open(tiny_disk / "new")

    run(main)


def test_a_file_where_a_directory_should_be(workdir: Path) -> None:
    (workdir / "file").write_bytes(b"")

    async def main(lent: Lent) -> None:
        for path in (workdir / "file", workdir / "file" / "deeper"):
            with pytest.raises(StoreNotFound, match="not a directory"):
                await lent.open(path)

    run(main)


def test_links_and_pipes_are_never_objects(workdir: Path) -> None:
    outside = workdir / "outside"
    outside.mkdir()
    (outside / "victim").write_bytes(b"untouched" * 1000)
    store = workdir / "store"
    store.mkdir()
    (store / "link").symlink_to(outside / "victim")
    (store / "dangling").symlink_to(outside / "new")
    (store / "folder").symlink_to(outside)
    os.mkfifo(store / "pipe")
    (store / "directory").mkdir()

    async def main(lent: Lent) -> None:
        backend = await lent.open(store)
        for name in ("link", "dangling", "pipe", "directory"):
            with pytest.raises(StorageError, match="not a regular file"):
                await lent.read(backend, name, 9)
            with pytest.raises(StorageError, match="not a regular file"):
                await backend.read_bytes(name, limit=10_000)
            with pytest.raises(StorageError):
                await backend.create(name)
            with pytest.raises(StorageError):
                await backend.put_atomic(name, b"x")
        for name in ("folder/victim", "folder/new"):
            with pytest.raises(StorageError):
                await lent.read(backend, name, 9)
            with pytest.raises(StorageError):
                await backend.create(name)
            with pytest.raises(StorageError):
                await backend.put_atomic(name, b"x")
            with pytest.raises(StorageError):
                await backend.delete(name)
        assert [info.name async for info in backend.list()] == []
        assert await backend.children() == []
        await backend.aclose()

    run(main)
    assert os.listdir(outside) == ["victim"]
    assert (outside / "victim").read_bytes() == b"untouched" * 1000


def test_what_a_crash_left_is_pending_and_can_be_discarded(workdir: Path) -> None:
    a, b = workdir / "a", workdir / "b"

    async def main(lent: Lent) -> None:
        backend = await lent.open(f"nvme:{a},{b}")
        (a / ".tmp-manifest.json-0011").write_bytes(b"torn")
        (b / ".tmp-stripe-0-0022").write_bytes(b"torn")
        (a / "data").write_bytes(b"x")
        found = await backend.pending()
        assert [upload.name for upload in found] == ["manifest.json-0011", "stripe-0-0022"]
        assert all(abs(upload.started - a.stat().st_mtime) < 60 for upload in found)
        assert [info.name async for info in backend.list()] == ["data"]
        for upload in found:
            await backend.discard(upload)
        for token in ("0/data", "0/../a/data", "2/.tmp-x", "x", "0/.tmp-x/../../a/data"):
            with pytest.raises(StorageError):
                await backend.discard(PendingUpload("x", token, 0.0))
        await backend.aclose()

    run(main)
    assert os.listdir(a) == ["data"]
    assert os.listdir(b) == []


def test_an_object_that_shrinks_while_it_is_open(workdir: Path) -> None:
    async def main(lent: Lent) -> None:
        backend = await lent.open(workdir / "store", {"direct": "off"})
        await lent.write(backend, "data", data_of(1, 4 * PAGE))
        assert await lent.read(backend, "data", PAGE) == data_of(1, 4 * PAGE)[:PAGE]
        os.truncate(workdir / "store" / "data", 2 * PAGE + 10)
        with pytest.raises(ObjectTruncated, match=r"store/data: ends at byte 8202, 16384 were to be read"):
            await lent.read(backend, "data", 4 * PAGE)
        await backend.aclose()

    run(main)


def test_many_objects_do_not_exhaust_descriptors(workdir: Path) -> None:
    count = 200

    async def main(lent: Lent) -> int:
        backend = await lent.open(workdir / "store", {"direct": "off"})
        for index in range(count):
            (workdir / "store" / f"data-{index}").write_bytes(index.to_bytes(4, "little"))
        before = len(os.listdir("/proc/self/fd"))
        for index in range(count):
            assert await lent.read(backend, f"data-{index}", 4) == index.to_bytes(4, "little")
        most = len(os.listdir("/proc/self/fd")) - before
        await backend.aclose()
        return most

    assert run(main) <= 70


def test_closing_a_backend_aborts_what_is_being_written(workdir: Path) -> None:
    async def main(lent: Lent) -> None:
        backend = await lent.open(workdir / "store")
        writer = await backend.create("data")
        await lent.append(writer, data_of(1, SLOT))
        await backend.aclose()
        assert lent.ring.in_use == 0

    run(main)
    assert os.listdir(workdir / "store") == []


def test_a_place_that_check_did_not_make(workdir: Path) -> None:
    async def main(lent: Lent) -> None:
        backend = await lent.open(workdir / "store")
        image = backend.child("image")
        with pytest.raises(StoreNotFound, match="no such directory"):
            await image.create("data")
        with pytest.raises(StoreNotFound, match="no such directory"):
            await image.put_atomic("manifest.json", b"x")
        assert [info async for info in image.list()] == []
        assert await image.children() == []
        with pytest.raises(ObjectNotFound):
            await image.stat("data")
        await image.delete("data")
        await image.remove_if_empty()
        await backend.aclose()

    run(main)


def test_memory_file_systems_are_not_called_durable() -> None:
    async def main(lent: Lent) -> None:
        backend = await nvme.NvmeBackend.open("nvme:/dev/shm/never-made", lent.context, {})
        assert not backend.capabilities.durable
        assert "tmpfs is memory" in backend.report().notes[0]
        await backend.aclose()

    run(main)
    assert not os.path.exists("/dev/shm/never-made")


@pytest.mark.parametrize("writing", [False, True])
@pytest.mark.parametrize("below", ["", "/new"])
def test_two_names_of_one_directory_are_no_two_stripes(workdir: Path, writing: bool, below: str) -> None:
    (workdir / "real").mkdir()
    (workdir / "also").symlink_to("real")

    async def main(lent: Lent) -> None:
        url = f"nvme:{workdir}/real{below},{workdir}/also{below}"
        backend = await nvme.NvmeBackend.open(url, lent.context, {})
        with pytest.raises(BadUrl, match=f"real{below} and .*also{below} are the same directory"):
            await backend.check(writing=writing)
        await backend.aclose()
        assert list((workdir / "real").iterdir()) == []

    run(main)


@pytest.mark.parametrize(
    ("number", "silent"), [(errno.EACCES, True), (errno.EROFS, True), (errno.EIO, False)]
)
def test_a_directory_that_this_user_may_not_remove_stays(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, number: int, silent: bool
) -> None:
    """It is somebody else's, who made it; any other failure is told."""
    (workdir / "store").mkdir()

    def rmdir(path: str) -> None:
        raise OSError(number, os.strerror(number), path)

    async def main(lent: Lent) -> None:
        backend = await lent.open(workdir / "store")
        monkeypatch.setattr(os, "rmdir", rmdir)
        if silent:
            await backend.remove_if_empty()
        else:
            with pytest.raises(StorageError, match=f"rmdir .*store: {os.strerror(number)}"):
                await backend.remove_if_empty()

    run(main)
    monkeypatch.undo()
    assert (workdir / "store").is_dir()
