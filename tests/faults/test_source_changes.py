"""Source files that change under a running save to two stores: the save fails by name and leaves nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.errors import SourceChanged
from tests.pipeline.runs import MIB, SMALL, memory_dir, run
from tests.pipeline.trees import look, write

__all__ = ["memory_dir"]


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def replace(path: Path) -> None:
    os.replace(write(path.with_name("new"), os.urandom(16 * MIB)), path)


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"other")


def rewrite_and_hide_it(path: Path) -> None:
    seen = path.stat()
    rewrite(path)
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "shrinks": (lambda path: os.truncate(path, 1000), "shrank"),
    "grows": (grow, "grew"),
    "is deleted": (Path.unlink, "was deleted"),
    "is replaced": (replace, "was replaced by another file"),
    "is written to": (rewrite, "was written to"),
    "is written to, its time set back": (rewrite_and_hide_it, r"was changed \(its content"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_that(workdir: Path, change: str, overwrite: bool) -> None:
    path = write(workdir / "tree" / "file", os.urandom(16 * MIB))
    os.utime(path, (1e9, 1e9))
    places = [workdir / "one", workdir / "two"]
    if overwrite:
        old = write(workdir / "old", b"the old image")
        run(ckptpipe.save(old, to=places, name="i", settings=SMALL))
    before = [look(place) for place in places]
    act, message = CHANGES[change]
    done = False

    def when_begun(progress: ckptpipe.Progress) -> None:
        nonlocal done
        if not done and 0 < progress.done_bytes < 8 * MIB:
            done = True
            act(path)

    spec = ckptpipe.GraphSpec(
        ckptpipe.SourceSpec("files", {"paths": [workdir / "tree"]}),
        tuple(ckptpipe.SinkSpec(str(place), reads="slow") for place in places),
        (ckptpipe.StageSpec("slow", "limit", params={"rate": 20 * MIB}),),
        image_name="i",
        overwrite=overwrite,
    )
    with pytest.raises(SourceChanged, match=message) as caught:
        run(ckptpipe.run_graph(spec, settings=SMALL, progress=when_begun))
    assert done and str(path) in str(caught.value) and caught.value.cure
    assert [look(place) for place in places] == before
    if overwrite:
        run(ckptpipe.verify(str(places[0] / "i"), settings=SMALL))
