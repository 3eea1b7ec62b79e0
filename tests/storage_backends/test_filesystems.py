"""What is asked of the kernel: kinds of file systems, and what of a file lies in the page cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptpipe.storage_backends import filesystems
from ckptpipe.storage_backends.filesystems import cached_share, existing_part, is_fuse, kind_of
from tests.services.mounts import start_bindfs
from tests.services.process import ServiceMissing

MIB = 1 << 20


def test_kinds() -> None:
    assert kind_of("/proc/self") == "proc"
    assert kind_of("/dev/shm/never/made") == "tmpfs"
    assert not is_fuse("/proc/self")


def test_the_nearest_part_that_exists(workdir: Path) -> None:
    (workdir / "file").write_bytes(b"")
    assert existing_part(f"{workdir}/a/b/c") == str(workdir)
    assert existing_part(f"{workdir}/file/deeper") == f"{workdir}/file"
    assert existing_part("/") == "/"
    assert existing_part("never-made-relative") == os.getcwd()


@pytest.mark.fuse
def test_a_mount_with_blanks_in_its_name(workdir: Path) -> None:
    """The mount table writes them as octal escapes; the statfs type is not consulted here."""
    folder = workdir / "with blank\tand tab"
    folder.mkdir()
    try:
        mounted = start_bindfs(folder, folder)
    except ServiceMissing as error:
        pytest.skip(str(error))
    with mounted as mount:
        assert filesystems._mount_types(str(mount.path / "x"))[0] == "fuse"
        assert filesystems._mount_types(str(folder))[0] != "fuse"


def shares(path: Path) -> tuple[float, float]:
    """By cachestat(2) and by mincore(2)."""
    size = path.stat().st_size
    descriptor = os.open(path, os.O_RDONLY)
    try:
        pages = filesystems._cachestat(descriptor, size)
        exact = cached_share(descriptor, size)
        sampled = filesystems._mincore_share(descriptor, size)
    finally:
        os.close(descriptor)
    if pages is None:
        pytest.skip("this kernel has no cachestat")
    return exact, sampled


def test_what_is_cached_is_seen_by_both_calls(workdir: Path) -> None:
    path = workdir / "file"
    path.write_bytes(os.urandom(8 * MIB))
    assert shares(path) == (1.0, 1.0)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 4 * MIB, os.POSIX_FADV_DONTNEED)
    assert shares(path) == pytest.approx((0.5, 0.5), abs=0.1)
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert shares(path) == (0.0, 0.0)


def test_an_empty_file_is_not_cached(workdir: Path) -> None:
    path = workdir / "file"
    path.touch()
    with path.open("rb") as file:
        assert cached_share(file.fileno(), 0) == 0.0
