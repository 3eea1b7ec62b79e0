"""Restoring into a directory: what was there stays, whatever happens, unless it was to be replaced."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.errors import RestoreConflict
from ckptpipe.pipeline.sinks.files import STAGING_PREFIX, FilesSink
from ckptpipe.pyx.errors import IoError
from ckptpipe.storage_backends.errors import NoSpace
from tests.pipeline.cancelled import cancelled_restore
from tests.pipeline.runs import MIB, SMALL, memory_dir, run
from tests.pipeline.trees import look, write

__all__ = ["memory_dir"]


@pytest.fixture
def image(workdir: Path) -> str:
    tree = workdir / "tree"
    write(tree / "a" / "one", os.urandom(200_000), 0o640)
    write(tree / "b" / "two", os.urandom(300_000))
    (tree / "z").symlink_to("a/one")
    (tree / "a").chmod(0o750)
    return run(ckptpipe.save(tree, to=workdir / "store", name="i", settings=SMALL)).sinks[0].image_url


def break_commit(monkeypatch: pytest.MonkeyPatch, nth: int, error: BaseException) -> None:
    """The ``nth`` file or link is not renamed to its place."""
    place, count = FilesSink._place, 0

    def broken(self: FilesSink, staged: bytes, path: bytes) -> None:
        nonlocal count
        count += 1
        if count == nth:
            raise error
        place(self, staged, path)

    monkeypatch.setattr(FilesSink, "_place", broken)


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_restore_that_fails_at_the_end_undoes_itself(
    workdir: Path, image: str, monkeypatch: pytest.MonkeyPatch, nth: int, overwrite: bool
) -> None:
    target = workdir / "target"
    write(target / "other", b"not ours")
    if overwrite:
        write(target / "a" / "one", b"old one", 0o600)
        (target / "z").symlink_to("old target")
        (target / "a").chmod(0o700)
    before = look(target, times=True)
    break_commit(monkeypatch, nth, IoError(5, "rename", "x"))
    with pytest.raises(IoError):
        run(ckptpipe.restore(image, to=target, overwrite=overwrite, settings=SMALL))
    assert look(target, times=True) == before
    if overwrite:
        assert (target / "a" / "one").read_bytes() == b"old one"


def test_directories_that_were_made_for_a_failed_restore_go_again(
    workdir: Path, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_commit(monkeypatch, 2, IoError(5, "rename", "x"))
    with pytest.raises(IoError):
        run(ckptpipe.restore(image, to=workdir / "new" / "deep" / "target", settings=SMALL))
    assert not (workdir / "new").exists()


def test_a_cancelled_restore_leaves_the_directory_as_it_was(workdir: Path) -> None:
    source = write(workdir / "file", os.urandom(32 * MIB))
    target = workdir / "target"

    async def main() -> None:
        saved = await ckptpipe.save(source, to=workdir / "store", settings=SMALL)
        spec = ckptpipe.GraphSpec(
            ckptpipe.SourceSpec("image", {"url": saved.sinks[0].image_url}),
            (ckptpipe.SinkSpec(str(target), kind="files", reads="slow"),),
            (ckptpipe.StageSpec("slow", "limit", params={"rate": MIB}),),
        )
        begun = asyncio.Event()

        def told(progress: ckptpipe.Progress) -> None:
            if progress.done_bytes:
                begun.set()

        await cancelled_restore(ckptpipe.run_graph(spec, settings=SMALL, progress=told), begun, target)

    run(main())


def test_what_a_killed_restore_left_is_removed_and_a_running_ones_is_not(workdir: Path, image: str) -> None:
    import fcntl

    target = workdir / "target"
    write(target / f"{STAGING_PREFIX}dead" / "0", b"half")
    write(target / f"{STAGING_PREFIX}live" / "0", b"half")
    (target / f"{STAGING_PREFIX}link").symlink_to(workdir / "tree")
    held = os.open(target / f"{STAGING_PREFIX}live", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    run(ckptpipe.restore(image, to=target, settings=SMALL))
    os.close(held)
    assert sorted(os.listdir(target)) == [
        f"{STAGING_PREFIX}link",
        f"{STAGING_PREFIX}live",
        "a",
        "b",
        "z",
    ]
    assert (workdir / "tree" / "a" / "one").exists()


def test_a_file_that_appears_meanwhile_is_not_replaced(
    workdir: Path, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = workdir / "target"
    commit = FilesSink._commit

    def late(self: FilesSink) -> None:
        write(target / "b" / "two", b"somebody else's")
        commit(self)

    monkeypatch.setattr(FilesSink, "_commit", late)
    with pytest.raises(RestoreConflict, match="appeared while the restore ran"):
        run(ckptpipe.restore(image, to=target, settings=SMALL))
    assert (target / "b" / "two").read_bytes() == b"somebody else's"
    assert not (target / "a").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_nothing_is_written_through_a_link_that_was_planted(
    workdir: Path, image: str, overwrite: bool
) -> None:
    outside = workdir / "outside"
    outside.mkdir()
    target = workdir / "target"
    target.mkdir()
    (target / "b").symlink_to(outside)
    before = look(target)
    with pytest.raises(RestoreConflict, match="nothing is written through it"):
        run(ckptpipe.restore(image, to=target, overwrite=overwrite, settings=SMALL))
    assert list(outside.iterdir()) == [] and look(target) == before


def test_a_link_where_a_file_goes_is_replaced_and_not_followed(workdir: Path, image: str) -> None:
    victim = write(workdir / "victim", b"untouched")
    target = workdir / "target"
    (target / "a").mkdir(parents=True)
    (target / "a" / "one").symlink_to(victim)
    with pytest.raises(RestoreConflict):
        run(ckptpipe.restore(image, to=target, settings=SMALL))
    run(ckptpipe.restore(image, to=target, overwrite=True, settings=SMALL))
    assert victim.read_bytes() == b"untouched"
    assert not (target / "a" / "one").is_symlink()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_where_a_file_goes(workdir: Path, image: str, overwrite: bool) -> None:
    target = workdir / "target"
    write(target / "a" / "one" / "inside", b"x")
    before = look(target)
    with pytest.raises(RestoreConflict, match="a/one") as caught:
        run(ckptpipe.restore(image, to=target, overwrite=overwrite, settings=SMALL))
    assert caught.value.cure
    assert look(target) == before


def test_a_target_that_is_a_file(workdir: Path, image: str) -> None:
    target = write(workdir / "target", b"x")
    with pytest.raises(RestoreConflict, match="not a directory"):
        run(ckptpipe.restore(image, to=target, settings=SMALL))
    with pytest.raises((RestoreConflict, IoError)):
        run(ckptpipe.restore(image, to=target / "below", settings=SMALL))
    assert target.read_bytes() == b"x"


def test_no_space_is_found_before_anything_is_written(
    workdir: Path, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptpipe.pipeline.sinks import files

    monkeypatch.setattr(files, "free_space", lambda path: 1000)
    with pytest.raises(NoSpace, match="has 1000 B free"):
        run(ckptpipe.restore(image, to=workdir / "target", settings=SMALL))
    assert not (workdir / "target").exists()


def test_set_id_bits_are_not_restored(workdir: Path) -> None:
    path = write(workdir / "tree" / "tool", b"#!/bin/sh\n")
    path.chmod(0o6755)
    saved = run(ckptpipe.save(workdir / "tree", to=workdir / "store", name="i", settings=SMALL))
    run(ckptpipe.restore(saved.sinks[0].image_url, to=workdir / "r", settings=SMALL))
    assert (workdir / "r" / "tool").stat().st_mode & 0o7777 == 0o755
