"""Files and directories as a source: what is taken, what is refused, and what may not change meanwhile."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.edge import Edge, Outlet
from ckptpipe.pipeline.errors import SourceChanged, SourceError, UsageError
from ckptpipe.pipeline.sources.files import FilesSource
from tests.pipeline.runs import KIB, MIB, SMALL, in_context, run
from tests.pipeline.trees import look, write

STEP = SMALL.chunk_bytes


def read_all(paths: list[Path], each: Callable[[int], None] = lambda number: None) -> dict[str, bytes]:
    """Every stream of a FilesSource; ``each`` is called after each chunk."""

    async def body(context: GraphContext) -> dict[str, bytes]:
        source = FilesSource(paths)
        try:
            await source.open(context)
            data = {stream.name: bytearray(stream.nbytes) for stream in source.streams}
            edge = Edge(1)

            async def feed() -> None:
                await source.run(Outlet([edge]))
                edge.end()

            async def take() -> None:
                number = 0
                while (chunk := await edge.get()) is not None:
                    name, at = source.streams[chunk.stream].name, chunk.number * STEP
                    if chunk.lease is not None:
                        with memoryview(chunk.lease) as view:
                            data[name][at : at + chunk.raw_bytes] = view[: chunk.raw_bytes]
                    chunk.release()
                    each(number)
                    number += 1

            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(feed())
                    group.create_task(take())
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            finally:
                edge.drop()
            return {name: bytes(content) for name, content in data.items()}
        finally:
            await source.aclose()

    return in_context(body)


def at_chunk(number: int, action: Callable[[], object]) -> Callable[[int], None]:
    return lambda now: action() if now == number else None  # type: ignore[func-returns-value]


def test_one_file_keeps_its_name(workdir: Path) -> None:
    path = write(workdir / "a" / "file", os.urandom(3 * STEP + 1))
    assert read_all([path]) == {"files/file": path.read_bytes()}


def test_several_paths_keep_their_last_component(workdir: Path) -> None:
    write(workdir / "one" / "x", b"1")
    write(workdir / "two" / "x", b"2")
    write(workdir / "three", b"3")
    streams = read_all([workdir / "one", workdir / "two/", workdir / "three"])
    assert streams == {"files/one/x": b"1", "files/two/x": b"2", "files/three": b"3"}


def test_paths_of_one_name_are_refused(workdir: Path) -> None:
    write(workdir / "a" / "x", b"1")
    write(workdir / "b" / "x", b"2")
    with pytest.raises(UsageError, match="would both be called x"):
        read_all([workdir / "a" / "x", workdir / "b" / "x"])


def test_a_path_that_is_a_link_is_followed_and_links_inside_are_not(workdir: Path) -> None:
    write(workdir / "real" / "file", b"data")
    (workdir / "real" / "link").symlink_to("file")
    (workdir / "way").symlink_to("real")

    async def body(context: GraphContext) -> None:
        source = FilesSource([workdir / "way"])
        await source.open(context)
        assert [stream.name for stream in source.streams] == ["files/file"]
        assert [(entry.path, entry.kind, entry.target) for entry in source.tree] == [
            ("link", "symlink", "file")
        ]
        await source.aclose()

    in_context(body)


@pytest.mark.parametrize("kind", ["missing", "dangling", "fifo", "socket", "device"])
def test_what_cannot_be_saved_is_refused_by_name(workdir: Path, kind: str) -> None:
    path = workdir / "thing"
    listener = socket.socket(socket.AF_UNIX)
    if kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.open(workdir, os.O_PATH)
        listener.bind(f"/proc/self/fd/{here}/thing")  # the name of a socket ends at 107 bytes
        os.close(here)
    elif kind == "device":
        path = Path("/dev/null")
    with listener, pytest.raises(SourceError) as caught:
        run(ckptpipe.save(path, to=workdir / "store", settings=SMALL))
    assert str(path) in str(caught.value)
    assert caught.value.cure
    assert not (workdir / "store").exists()


def test_special_files_inside_a_directory_are_left_out_and_named(workdir: Path) -> None:
    write(workdir / "tree" / "file", b"x")
    os.mkfifo(workdir / "tree" / "fifo")
    result = run(ckptpipe.save(workdir / "tree", to=workdir / "store", settings=SMALL))
    assert result.streams == 1
    assert any("fifo is a named pipe: not saved" in note for note in result.facts.notes)


def without_root_powers() -> list[str]:
    """Words before a command that take root's right to read everything away; none where we are not root."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root may read everything, and setpriv (util-linux) is not here to take that away")
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]


@pytest.mark.parametrize("what", ["file", "directory", "file inside"])
def test_unreadable_sources(workdir: Path, what: str) -> None:
    path = write(workdir / "tree" / "file", b"secret", 0o000 if what != "directory" else 0o644)
    if what == "directory":
        path.parent.chmod(0o000)
    named = path if what == "file" else path.parent
    script = (
        "import sys, ckptpipe\n"
        "try: ckptpipe.save_blocking(sys.argv[1], to='memory:x')\n"
        "except ckptpipe.SourceError as error: print(error)\n"
    )
    command = [*without_root_powers(), sys.executable, "-c", script, str(named)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    path.parent.chmod(0o755)
    assert "cannot be read" in done.stdout and "check its permissions" in done.stdout, done
    assert str(path if what != "directory" else path.parent) in done.stdout


def test_a_file_that_shrinks(workdir: Path) -> None:
    path = write(workdir / "file", os.urandom(200 * STEP))
    with pytest.raises(SourceChanged, match="shrank"):
        read_all([path], at_chunk(0, lambda: os.truncate(path, 3)))


def test_a_file_that_grows(workdir: Path) -> None:
    path = write(workdir / "file", os.urandom(200 * STEP))

    def grow() -> None:
        with path.open("ab") as file:
            file.write(b"more")

    with pytest.raises(SourceChanged, match=r"grew from \d+ to \d+ bytes"):
        read_all([path], at_chunk(0, grow))


def test_a_file_that_is_deleted(workdir: Path) -> None:
    path = write(workdir / "file", os.urandom(200 * STEP))
    with pytest.raises(SourceChanged, match="was deleted"):
        read_all([path], at_chunk(0, path.unlink))


@pytest.mark.parametrize("names", [1, 2])
def test_a_file_that_is_replaced(workdir: Path, names: int) -> None:
    """As editors do: a new file is renamed over the old one, of which a backup may be kept by a link."""
    path = write(workdir / "file", os.urandom(200 * STEP))
    if names == 2:
        os.link(path, workdir / "file~")
    other = write(workdir / "other", os.urandom(200 * STEP))
    with pytest.raises(SourceChanged, match="was replaced by another file"):
        read_all([path], at_chunk(0, lambda: os.replace(other, path)))


def test_a_file_that_is_renamed(workdir: Path) -> None:
    path = write(workdir / "file", os.urandom(200 * STEP))
    with pytest.raises(SourceChanged, match="file was renamed or deleted while it was saved"):
        read_all([path], at_chunk(0, lambda: path.rename(workdir / "other")))


def test_a_file_that_is_written_to(workdir: Path) -> None:
    path = write(workdir / "file", os.urandom(200 * STEP))
    os.utime(path, ns=(0, 10**18))

    def touch() -> None:
        with path.open("r+b") as file:
            file.write(b"x")

    with pytest.raises(SourceChanged, match="was written to"):
        read_all([path], at_chunk(0, touch))


@pytest.mark.parametrize("change", ["gone", "replaced", "grown"])
def test_a_file_that_changes_before_its_turn(workdir: Path, change: str) -> None:
    write(workdir / "tree" / "a", os.urandom(200 * STEP))
    later = write(workdir / "tree" / "b", os.urandom(STEP))

    def act() -> None:
        if change == "gone":
            later.unlink()
        elif change == "replaced":
            os.replace(write(workdir / "new", os.urandom(STEP)), later)
        else:
            later.write_bytes(bytes(3 * STEP))

    expected = {"gone": "disappeared", "replaced": "was replaced by another file", "grown": "grew"}[change]
    with pytest.raises(SourceChanged, match=expected):
        read_all([workdir / "tree"], at_chunk(0, act))


def test_a_change_fails_the_save_and_leaves_nothing(workdir: Path) -> None:
    tree = workdir / "tree"
    write(tree / "a", os.urandom(MIB))
    path = write(tree / "b", os.urandom(64 * MIB))

    def change(progress: ckptpipe.Progress) -> None:
        if path.stat().st_size == 64 * MIB:
            os.truncate(path, 1000)

    spec = ckptpipe.GraphSpec(
        ckptpipe.SourceSpec("files", {"paths": [tree]}),
        (ckptpipe.SinkSpec(str(workdir / "store"), reads="slow"),),
        (ckptpipe.StageSpec("slow", "limit", params={"rate": 50 * MIB}),),
        image_name="i",
    )
    with pytest.raises(SourceChanged, match="shrank"):
        run(ckptpipe.run_graph(spec, settings=SMALL, progress=change))
    assert look(workdir / "store") == {}


def test_holes_are_not_read(workdir: Path) -> None:
    path = workdir / "sparse"
    with path.open("wb") as file:
        file.truncate(100 * STEP)
        file.seek(50 * STEP + 10)
        file.write(b"data")

    async def body(context: GraphContext) -> None:
        source = FilesSource([path])
        await source.open(context)
        assert source.total_bytes == 100 * STEP
        assert source.need_bytes <= 2 * STEP
        assert source.streams[0].sparse
        await source.aclose()

    in_context(body)
    before = int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])
    (content,) = read_all([path]).values()
    read = int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0]) - before
    assert content == path.read_bytes() and read < 20 * STEP


def test_a_disk_of_holes_fits_where_its_bytes_would_not(workdir: Path) -> None:
    path = workdir / "huge"
    with path.open("wb") as file:
        file.truncate(1 << 43)  # 8 TiB
    settings = ckptpipe.Settings(chunk_bytes=64 * MIB, ring_bytes=512 * MIB, huge_pages="off")
    os.truncate(path, 1 << 40)
    result = run(ckptpipe.save(path, to=workdir / "store", name="i", settings=settings))
    assert result.zero_chunks == result.chunks == (1 << 40) // (64 * MIB)


def test_a_very_deep_directory(workdir: Path) -> None:
    here = os.open(workdir, os.O_RDONLY)
    depth = 1500
    try:
        os.mkdir("d", dir_fd=here)
        fd = os.open("d", os.O_RDONLY, dir_fd=here)
        for _ in range(depth):
            os.mkdir("d", dir_fd=fd)
            inner = os.open("d", os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = inner
        os.close(fd)
        result = run(ckptpipe.save(workdir / "d", to="memory:deep", settings=SMALL))
        assert result.streams == 0
    finally:
        os.close(here)
        subprocess.run(["rm", "-rf", str(workdir / "d")], check=True)  # too deep for shutil


def test_no_path_is_no_source() -> None:
    with pytest.raises(UsageError, match="no path"):
        FilesSource([])
    with pytest.raises(UsageError, match="int cannot be saved"):
        run(ckptpipe.save(5, to="memory:x"))
    assert KIB == 1024


def test_what_may_not_be_looked_at_is_not_said_to_have_disappeared(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of the links of other users' processes in /proc."""
    (workdir / "tree").mkdir()
    (workdir / "tree" / "cwd").symlink_to("/")

    def readlink(path: str) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "readlink", readlink)
    with pytest.raises(SourceError, match="cwd cannot be read: Permission denied") as caught:
        read_all([workdir / "tree"])
    assert not isinstance(caught.value, SourceChanged)
    assert caught.value.cure == "check its permissions"
