"""Saves and restores of more files than a process may have open."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.sinks.targets import OpenTargets, Target
from ckptpipe.pipeline.sources.abc import Stream
from ckptpipe.pyx.errors import IoError
from ckptpipe.storage_backends.directory import storage_error
from ckptpipe.storage_backends.open_limit import open_error, room_for_files
from tests.pipeline.runs import KIB, MIB, SMALL, memory_dir, run
from tests.pipeline.trees import look, write

__all__ = ["memory_dir"]

FEW = 64
ONE_RUN = """
import resource, sys
import ckptpipe
what, path, url, chunk_bytes, limit = sys.argv[1:]
settings = ckptpipe.Settings(chunk_bytes=int(chunk_bytes), workers=2)
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit), hard))
try:
    if what == "save":
        sink = ckptpipe.SinkSpec(url, options={"lanes": 2} if url.startswith("nvme:") else {})
        print(ckptpipe.save_blocking(path, to=sink, name="i", settings=settings).sinks[0].image_url)
    else:
        ckptpipe.restore_blocking(url, to=path, settings=settings)
except ckptpipe.CkptpipeError as error:
    print(error)
"""


def one_run(what: str, path: Path, url: str, chunk_bytes: int) -> str:
    """In a process that may have few descriptors; the URL of the image, or what went wrong."""
    command = [sys.executable, "-c", ONE_RUN, what, str(path), url, str(chunk_bytes), str(FEW)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def tree_of(workdir: Path, files: int, nbytes: int) -> Path:
    for number in range(files):
        write(workdir / "tree" / f"f{number:03}", random.Random(number).randbytes(nbytes))
    return workdir / "tree"


def test_on_disks(workdir: Path) -> None:
    """Each file's chunks lie on two stripes: its file is written to until both have been read."""
    tree = tree_of(workdir, 300, 512 * KIB - 1)
    url = one_run("save", tree, f"nvme:{workdir}/a,{workdir}/b", 256 * KIB)
    assert url.startswith("nvme:"), url
    assert one_run("restore", workdir / "r", url, 256 * KIB) == ""
    assert look(workdir / "r") == look(tree)


@pytest.mark.s3
def test_in_s3(workdir: Path, s3_bucket: str) -> None:
    """Whole chunks are sent from the files, which are open until they have gone."""
    tree = tree_of(workdir, 150, MIB + 1)
    url = one_run("save", tree, f"s3://{s3_bucket}/x", MIB)
    assert url.startswith("s3:"), url
    assert one_run("restore", workdir / "r", url, MIB) == ""
    assert look(workdir / "r") == look(tree)


def target_of(name: str) -> Target:
    return Target(Stream(f"files/{name}", "file", 1, None, None, False), name, name.encode(), 1)


def test_a_file_that_nobody_writes_to_is_closed_for_the_next() -> None:
    async def main() -> None:
        opened: list[str] = []

        def open_one(target: Target) -> int:
            opened.append(target.staged)
            return os.open(os.devnull, os.O_WRONLY)

        targets = OpenTargets(2, open_one, lambda target: target.staged)
        a, b, c = (target_of(name) for name in "abc")
        await targets.hold(a)
        await targets.hold(b)
        assert not targets.has_room(c) and targets.has_room(a)
        targets.let_go(a)
        targets.let_go(b)
        await targets.hold(a)  # used last: the other one goes
        targets.let_go(a)
        await targets.hold(c)
        assert (opened, b.fd, targets.left()) == (["a", "b", "c"], -1, [a, c])
        await targets.hold(b)
        assert (opened, a.fd, targets.left()) == (["a", "b", "c", "b"], -1, [c, b])
        await targets.hold(a)  # all are held: one more than there should be
        assert targets.left() == [c, b, a]
        for target in targets.left():
            os.close(targets.take(target))

    asyncio.run(main())


def test_the_limit_is_met_though_there_was_room() -> None:
    """Somebody else took the descriptors: files that are open and idle make place."""

    async def main() -> None:
        full = 0

        def open_one(target: Target) -> int:
            nonlocal full
            if full:
                full -= 1
                raise open_error(OSError(errno.EMFILE, ""), "create", target.staged)
            return os.open(os.devnull, os.O_WRONLY)

        targets = OpenTargets(100, open_one, lambda target: target.staged)
        a, b, c = (target_of(name) for name in "abc")
        await targets.hold(a)
        await targets.hold(b)
        targets.let_go(a)
        full = 1
        await targets.hold(c)
        assert (a.fd, targets.left()) == (-1, [b, c])
        full = 1
        with pytest.raises(IoError, match=r"create a: .*ulimit -n"):
            await targets.hold(a)
        for target in targets.left():
            os.close(targets.take(target))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("number", "cure"), [(errno.EMFILE, "ulimit -n"), (errno.ENFILE, "fs.file-max"), (errno.EACCES, "")]
)
def test_the_cure_is_that_of_the_limit(number: int, cure: str) -> None:
    error = open_error(OSError(number, ""), "open", "x")
    assert (error.errno, error.operation, error.filename) == (number, "open", "x")
    assert cure in error.cure and bool(error.cure) == bool(cure)
    assert cure in storage_error(OSError(number, ""), "open", "x").cure


def test_a_directory_that_no_descriptor_is_left_for(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(workdir / "tree" / "file", b"x")

    def full(path: str) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    monkeypatch.setattr(os, "scandir", full)
    with pytest.raises(ckptpipe.SourceError, match=r"tree cannot be read: .*ulimit -n"):
        run(ckptpipe.save(workdir / "tree", to="memory:full", settings=SMALL))


def test_half_of_what_is_left_is_room() -> None:
    before, soft = room_for_files(), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    try:
        assert room_for_files() == before - 10 < soft // 2
    finally:
        for fd in held:
            os.close(fd)


COMMAND = """
import resource, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
from ckptpipe.pipeline.cli import main
main()
"""


@pytest.mark.parametrize("limit", [*range(6, 20), 24])
def test_a_limit_that_is_too_low_is_named_with_its_cure(workdir: Path, limit: int) -> None:
    """Below six the interpreter does not come up, or cannot import what says so."""
    tree = tree_of(workdir, 40, 90 * KIB)
    saved = run(ckptpipe.save(tree, to=workdir / "store", name="i", settings=SMALL))
    url = saved.sinks[0].image_url
    for command in (["verify", url], ["restore", url, "--to", str(workdir / "r")], ["show", url]):
        program = [sys.executable, "-c", COMMAND, str(limit), *command, "-q"]
        done = subprocess.run(program, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        assert done.returncode in (0, 1) and done.stdout == ""
        if done.returncode:
            assert "Too many open files; raise the limit" in done.stderr
            assert done.stderr.count("\n") == 1, done.stderr
            assert not (workdir / "r").exists()
        else:
            assert limit > 14
        shutil.rmtree(workdir / "r", ignore_errors=True)
