"""File-system calls: against what stat, the shell's tools and plain Python say."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptpipe.pyx import files
from ckptpipe.pyx.errors import IoError
from tests.pyx.engines import descriptor
from tests.pyx.loop_disk import NoLoopDisk, loop_disk

Open = Callable[..., int]
# Answers one errno to one system call: refuse(call number, errno), as a seccomp profile does.
REFUSE = """
import ctypes, os, struct, sys
def refuse(number, error):
    rows = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | error), (0x06, 0, 0, 0x7FFF0000)]
    memory = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.byref(Program(4, ctypes.cast(memory, ctypes.c_void_p).value)), 0, 0) == 0
from ckptpipe.pyx import files
"""


def after_refusal(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", REFUSE + textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    try:
        with loop_disk(tmp_path_factory.mktemp("loop"), nbytes=16 << 20) as mount:
            yield mount
    except NoLoopDisk as error:
        pytest.skip(f"no loop device: {error}")


@pytest.fixture
def shm() -> Iterator[Path]:
    path = Path(f"/dev/shm/ckptpipe-test-{os.getpid()}")
    if not path.parent.is_dir():
        pytest.skip("no /dev/shm here")
    path.mkdir()
    yield path
    shutil.rmtree(path)


# -- alignment -------------------------------------------------------------------------------------------


def test_alignment_of_a_disk_with_4k_sectors(small_disk: Path) -> None:
    path = small_disk / "aligned"
    with descriptor(path, os.O_RDWR | os.O_CREAT) as fd:
        found = files.dio_alignment(fd, path)
    assert found is not None
    assert found[1] == 4096
    path.unlink()


def test_alignment_is_what_the_kernel_takes(workdir: Path) -> None:
    import mmap

    path = workdir / "file"
    with descriptor(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT) as fd:
        found = files.dio_alignment(fd, str(path))
        assert found is not None
        memory = mmap.mmap(-1, 1 << 16)
        view = memoryview(memory)[found[0] : found[0] + found[1]]
        assert os.pwrite(fd, view, found[1]) == found[1]
        view.release()
        memory.close()


def test_no_alignment_without_direct_io(tmp_path: Path) -> None:
    with descriptor("/dev/null", os.O_RDONLY) as fd:
        assert files.dio_alignment(fd, "/dev/null") is None
    with descriptor(tmp_path, os.O_RDONLY) as fd:
        assert files.dio_alignment(fd, tmp_path) is None
    with pytest.raises(IoError, match="statx gone: Bad file descriptor"):
        files.dio_alignment(fd, "gone")


def test_alignment_where_statx_is_refused(workdir: Path, shm: Path) -> None:
    """An old seccomp profile refuses statx: then 4096 where the file can be opened with O_DIRECT."""
    number = {"x86_64": 332, "aarch64": 291}.get(os.uname().machine)
    if number is None:
        pytest.skip("the number of statx is not known on this architecture")
    shown = after_refusal(
        """
        fds = [os.open(os.path.join(folder, "file"), os.O_RDWR | os.O_CREAT) for folder in sys.argv[2:]]
        refuse(int(sys.argv[1]), 1)
        print([files.dio_alignment(fd, "file") for fd in fds])
        """,
        str(number),
        str(workdir),
        str(shm),
    )
    # tmpfs takes O_DIRECT since Linux 6.6.
    assert shown.strip() in ("[(4096, 4096), (4096, 4096)]", "[(4096, 4096), None]")


# -- openat2 ---------------------------------------------------------------------------------------------


def walk(dirfd: int, path: str, flags: int, mode: int = 0) -> int:
    return files._walk(dirfd, os.fsencode(path), flags | os.O_CLOEXEC, mode, path)  # type: ignore[attr-defined,no-any-return]


@pytest.fixture(params=["kernel", "walk"])
def opener(request: pytest.FixtureRequest) -> Open:
    """openat2 itself, and the walk that stands for it on old kernels."""
    return files.openat2 if request.param == "kernel" else walk


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    """An open folder with a file, a folder, and links that lead out of it and stay in it."""
    (tmp_path / "outside").write_bytes(b"secret")
    inside = tmp_path / "inside"
    (inside / "sub").mkdir(parents=True)
    (inside / "sub" / "file").write_bytes(b"content")
    (inside / "out").symlink_to("../outside")
    (inside / "away").symlink_to(tmp_path)
    (inside / "near").symlink_to("sub")
    with descriptor(inside, os.O_RDONLY | os.O_DIRECTORY) as fd:
        yield fd


@pytest.mark.parametrize("path", ["sub/file", "./sub/./file", "sub//file"])
def test_opens_beneath(opener: Open, folder: int, path: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    fd = opener(folder, path, os.O_RDONLY)
    assert os.read(fd, 100) == b"content"
    assert not os.get_inheritable(fd)
    os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("../outside", errno.EXDEV),
        ("sub/../../outside", errno.EXDEV),
        ("/etc/passwd", errno.EXDEV),
        ("out", errno.ELOOP),
        ("away/outside", errno.ELOOP),
        ("near/file", errno.ELOOP),
        ("near/", errno.ELOOP),
        ("missing", errno.ENOENT),
        ("sub/missing/file", errno.ENOENT),
        ("sub/file/", errno.ENOTDIR),
        ("sub/file/below", errno.ENOTDIR),
        ("", errno.ENOENT),
    ],
)
def test_refuses_what_leads_out(opener: Open, folder: int, path: str, number: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(IoError) as caught:
        opener(folder, path, os.O_RDONLY)
    assert (caught.value.errno, caught.value.operation) == (number, "open")
    assert bool(caught.value.cure) == (number in (errno.EXDEV, errno.ELOOP))
    assert len(os.listdir("/proc/self/fd")) == before


def test_creates_with_the_mode_and_never_through_a_link(opener: Open, folder: int, tmp_path: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    fd = opener(folder, "sub/new", flags, 0o600)
    assert os.fstat(fd).st_mode & 0o7777 == 0o600
    os.close(fd)
    with pytest.raises(FileExistsError):
        opener(folder, "sub/new", flags, 0o600)
    with pytest.raises(IoError):
        opener(folder, "out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    assert (tmp_path / "outside").read_bytes() == b"secret"


def test_path_descriptors_do_not_name_links(opener: Open, folder: int) -> None:
    with pytest.raises(IoError) as caught:
        opener(folder, "out", os.O_PATH)
    assert caught.value.errno == errno.ELOOP
    fd = opener(folder, ".", os.O_PATH | os.O_DIRECTORY)
    assert os.path.sameopenfile(fd, folder)
    os.close(fd)


def test_name_with_nul(folder: int) -> None:
    with pytest.raises(IoError, match="NUL"):
        files.openat2(folder, "sub\0/file", os.O_RDONLY)


def test_without_resolve_flags_links_are_followed(folder: int) -> None:
    fd = files.openat2(folder, "near/file", os.O_RDONLY, resolve=files.RESOLVE_BENEATH)
    assert os.read(fd, 100) == b"content"
    os.close(fd)


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_openat2_refused_by_seccomp(folder: int, tmp_path: Path, error: int) -> None:
    shown = after_refusal(
        """
        refuse(437, int(sys.argv[1]))
        folder = os.open(sys.argv[2], os.O_RDONLY)
        print(os.read(files.openat2(folder, "sub/file", os.O_RDONLY), 100))
        for path in ("out", "../outside"):
            try:
                files.openat2(folder, path, os.O_RDONLY)
            except OSError as error:
                print(error.errno)
        """,
        str(error),
        str(tmp_path / "inside"),
    )
    assert shown.split() == ["b'content'", str(errno.ELOOP), str(errno.EXDEV)]


# -- what a file system is and has -----------------------------------------------------------------------


def test_file_system_by_name(tmp_path: Path, small_disk: Path) -> None:
    assert files.filesystem("/proc") == (0x9FA0, "proc")
    assert files.filesystem(small_disk) == (0xEF53, "ext4")
    with descriptor(small_disk, os.O_RDONLY) as fd:
        assert files.filesystem(fd) == (0xEF53, "ext4")
    shown = subprocess.run(["stat", "-f", "-c", "%t", tmp_path], capture_output=True, text=True, check=True)
    assert files.filesystem(tmp_path)[0] == int(shown.stdout, 16)
    with pytest.raises(FileNotFoundError, match=r"statfs .*missing: No such file"):
        files.filesystem(tmp_path / "missing")


def test_file_system_of_memory(shm: Path) -> None:
    assert files.filesystem(shm)[1] == "tmpfs"


def test_free_space_is_df_s(small_disk: Path) -> None:
    command = ["df", "--output=avail", "-B1", str(small_disk)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert files.free_space(small_disk) == int(shown[-1])
    with descriptor(small_disk, os.O_RDONLY) as fd:
        assert files.free_space(fd) == int(shown[-1])
    with pytest.raises(FileNotFoundError):
        files.free_space(small_disk / "missing")


def test_ranges_of_a_sparse_file(small_disk: Path) -> None:
    path = small_disk / "sparse"
    with descriptor(path, os.O_RDWR | os.O_CREAT) as fd:
        os.pwrite(fd, b"x" * 4096, 8192)
        os.pwrite(fd, b"x", 40960)
        os.truncate(fd, 1 << 20)
        assert files.seek_data_ranges(fd, 1 << 20) == [(8192, 4096), (40960, 4096)]
        assert files.seek_data_ranges(fd, 40961) == [(8192, 4096), (40960, 1)]
        assert files.seek_data_ranges(fd, 8192) == []
        assert files.seek_data_ranges(fd, 0) == []
        assert files.seek_data_ranges(fd, 1 << 30) == [(8192, 4096), (40960, 4096)]
    path.unlink()


def test_ranges_of_full_and_empty_files_and_of_what_cannot_tell(workdir: Path) -> None:
    with descriptor(workdir / "full", os.O_RDWR | os.O_CREAT) as fd:
        os.write(fd, b"x" * 10_000)
        assert files.seek_data_ranges(fd, 10_000) == [(0, 10_000)]
    with descriptor(workdir / "hole", os.O_RDWR | os.O_CREAT) as fd:
        os.truncate(fd, 1 << 20)
        assert files.seek_data_ranges(fd, 1 << 20) == []
    source, sink = os.pipe()
    assert files.seek_data_ranges(source, 100) == [(0, 100)]
    os.close(source)
    os.close(sink)
    with pytest.raises(IoError, match="Bad file descriptor"):
        files.seek_data_ranges(source, 100)


# -- names -----------------------------------------------------------------------------------------------


def test_sync_of_a_directory(tmp_path: Path) -> None:
    assert files.fsync_directory(tmp_path) is True
    with pytest.raises(FileNotFoundError, match=r"open .*missing"):
        files.fsync_directory(tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        files.fsync_directory(tmp_path / "file")


def test_rename_never_replaces(workdir: Path) -> None:
    (workdir / "old").write_bytes(b"old")
    (workdir / "taken").write_bytes(b"taken")
    with descriptor(workdir, os.O_RDONLY) as fd:
        with pytest.raises(FileExistsError) as caught:
            files.rename_noreplace(fd, "old", fd, "taken")
        assert caught.value.filename == "taken"
        assert files.rename_noreplace(fd, "old", files.AT_FDCWD, workdir / "new") == "renameat2"
        with pytest.raises(FileNotFoundError, match="rename old to new: No such file"):
            files.rename_noreplace(fd, "old", fd, "new")
    found = {path.name: path.read_bytes() for path in workdir.iterdir()}
    assert found == {"new": b"old", "taken": b"taken"}


@pytest.mark.parametrize(("what", "how"), [("file", "link"), ("folder", "checked")])
def test_rename_where_renameat2_is_refused(workdir: Path, what: str, how: str) -> None:
    number = {"x86_64": 316, "aarch64": 276}.get(os.uname().machine)
    if number is None:
        pytest.skip("the number of renameat2 is not known on this architecture")
    (workdir / "file").write_bytes(b"content")
    (workdir / "folder").mkdir()
    (workdir / "taken").mkdir()
    shown = after_refusal(
        """
        refuse(int(sys.argv[1]), 22)
        folder = os.open(sys.argv[2], os.O_RDONLY)
        try:
            files.rename_noreplace(folder, sys.argv[3], folder, "taken")
        except FileExistsError:
            print(files.rename_noreplace(folder, sys.argv[3], folder, "new"))
        """,
        str(number),
        str(workdir),
        what,
    )
    assert shown.strip() == how
    assert not (workdir / what).exists()
    assert (workdir / "new").exists()
    assert os.listdir(workdir / "taken") == []
