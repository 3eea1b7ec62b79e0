"""A full disk, real ones: found before the copy where it can be, and undone where it cannot."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pyx.errors import IoError
from ckptpipe.storage_backends.errors import NoSpace
from tests.pipeline.runs import MIB, SMALL, run
from tests.pipeline.trees import look, write
from tests.pyx.loop_disk import NoLoopDisk, loop_disk

ROOM = 24 * MIB


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(workdir: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 24 MiB. ext4 lies on a device of 4 KiB sectors: written with direct I/O."""
    if request.param == "ext4":
        try:
            with loop_disk(workdir, nbytes=ROOM) as mount:
                yield mount / "store"
        except NoLoopDisk as error:
            pytest.skip(f"no loop device: {error}")
        return
    mount = workdir / "mount"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(mount)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted: {done.stderr.strip()}")
    try:
        yield mount / "store"
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def stdin_of(path: Path) -> ckptpipe.SourceSpec:
    """A source whose size is not known beforehand."""
    fd = os.open(path, os.O_RDONLY)
    return ckptpipe.SourceSpec("stdin", {"fd": fd})


def close(spec: ckptpipe.SourceSpec) -> None:
    os.close(spec.params["fd"])


def test_it_is_found_before_a_byte_is_written(workdir: Path, small_disk: Path) -> None:
    source = write(workdir / "file", os.urandom(40 * MIB))
    with pytest.raises(NoSpace, match=r"40.* needed") as caught:
        run(ckptpipe.save(source, to=[workdir / "other", small_disk], name="i", settings=SMALL))
    assert caught.value.cure
    assert look(workdir / "other") == look(small_disk) == {}


@pytest.mark.parametrize("overwrite", [False, True])
def test_in_the_middle_everything_is_undone(workdir: Path, small_disk: Path, overwrite: bool) -> None:
    source = write(workdir / "file", os.urandom(40 * MIB))
    old = write(workdir / "old", os.urandom(2 * MIB))
    places = [workdir / "other", small_disk]
    if overwrite:
        run(ckptpipe.save(old, to=places, name="i", settings=SMALL))
    before = [look(place) for place in places]
    spec = stdin_of(source)
    with pytest.raises(NoSpace) as caught:
        run(ckptpipe.save(spec, to=places, name="i", overwrite=overwrite, settings=SMALL))
    close(spec)
    assert str(small_disk) in str(caught.value) and "free space" in caught.value.cure
    assert [look(place) for place in places] == before
    if overwrite:
        run(ckptpipe.verify(str(small_disk / "i"), settings=SMALL))
    again = run(ckptpipe.save(old, to=places, name="i", overwrite=overwrite, settings=SMALL))
    assert all(sink.ok for sink in again.sinks), "the space is free again"


def test_a_best_effort_sink_on_it_is_given_up(workdir: Path, small_disk: Path) -> None:
    source = write(workdir / "file", os.urandom(40 * MIB))
    spec = stdin_of(source)
    to = [workdir / "other", ckptpipe.SinkSpec(str(small_disk), policy="best-effort")]
    result = run(ckptpipe.save(spec, to=to, name="i", settings=SMALL))
    close(spec)
    assert [sink.ok for sink in result.sinks] == [True, False]
    assert "No space left" in result.sinks[1].error
    assert look(small_disk) == {}
    run(ckptpipe.verify(result.sinks[0].image_url, settings=SMALL))


def test_a_restore_onto_it(workdir: Path, small_disk: Path) -> None:
    small_disk.mkdir()
    source = write(workdir / "tree" / "file", os.urandom(40 * MIB))
    saved = run(ckptpipe.save(source.parent, to=workdir / "other", name="i", settings=SMALL))
    url = saved.sinks[0].image_url
    with pytest.raises(NoSpace, match="the restore needs"):
        run(ckptpipe.restore(url, to=small_disk / "r", settings=SMALL))
    assert look(small_disk) == {}


def test_a_restore_that_fills_it(workdir: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else took the space that was there when the restore began."""
    from ckptpipe.pipeline.sinks import files

    small_disk.mkdir()
    source = write(workdir / "tree" / "file", os.urandom(40 * MIB))
    saved = run(ckptpipe.save(source.parent, to=workdir / "other", name="i", settings=SMALL))
    monkeypatch.setattr(files, "free_space", lambda path: 1 << 40)
    with pytest.raises((NoSpace, IoError), match="No space left"):
        run(ckptpipe.restore(saved.sinks[0].image_url, to=small_disk / "r", settings=SMALL))
    assert look(small_disk) == {}
