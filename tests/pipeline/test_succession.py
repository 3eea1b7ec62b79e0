"""Saves that overwrite one image at once: the last one's image is whole, and nothing of the others is left."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.storage_backends.errors import StorageError
from ckptpipe.storage_backends.wrappers.faulty import Faults
from tests.pipeline.runs import MIB, break_sink, memory_dir, run, saves_at
from tests.pipeline.trees import write

__all__ = ["break_sink", "memory_dir"]

Plan = Callable[[str, Faults], Faults]
SETTINGS = ckptpipe.Settings(chunk_bytes=MIB, ring_bytes=8 * MIB, workers=2)
COMMIT = ("put_atomic", 3)  # lease and index come before
SETTLE = ("read_bytes", 5)  # manifest, lease, manifest, lease come before


class Racer:
    """An overwrite of the one image, by a name of the store that is its own, which stands where it is told to."""

    def __init__(self, workdir: Path, plan: Plan, name: str) -> None:
        (workdir / name).symlink_to("store")
        faults = Faults()
        plan(f"{workdir}/{name}", faults)
        self.commits, self.settles = faults.hold(*COMMIT), faults.hold(*SETTLE)  # type: ignore[arg-type]
        source = write(workdir / f"file-{name}", os.urandom(2 * MIB))
        self._save = ckptpipe.save(source, to=workdir / name, name="i", overwrite=True, settings=SETTINGS)

    def start(self) -> None:
        self.task = asyncio.ensure_future(self._save)

    async def committed(self) -> None:
        self.commits.release.set()
        await self.settles.reached.wait()

    async def settled(self) -> ckptpipe.SinkResult:
        self.settles.release.set()
        return (await self.task).sinks[0]


@pytest.fixture
def old(workdir: Path) -> ckptpipe.SinkResult:
    source = write(workdir / "file", os.urandom(3 * MIB))
    return run(ckptpipe.save(source, to=workdir / "store", name="i", settings=SETTINGS)).sinks[0]


@pytest.mark.parametrize("order", list(permutations("abc")), ids="".join)
def test_three_that_know_only_of_the_image_before_them(
    workdir: Path, old: ckptpipe.SinkResult, break_sink: Plan, order: tuple[str, ...]
) -> None:
    """They commit as a, b, c, and settle in any order."""
    racers = {name: Racer(workdir, break_sink, name) for name in "abc"}

    async def main() -> None:
        for racer in racers.values():
            racer.start()
            await racer.commits.reached.wait()
        for racer in racers.values():
            await racer.committed()
        results = {}
        for name in order:
            results[name] = await racers[name].settled()
            # Whoever is not the last one, and comes before it, leaves what it stored to it, and says so.
            left = any("was overwritten at once" in note for note in results[name].notes)
            assert left == ("c" not in results), name
        for unmistaken in (workdir / "store" / "i", workdir / "a" / "i"):
            await ckptpipe.verify(str(unmistaken), expect_digest=results["c"].digest, settings=SETTINGS)

    run(main())
    assert saves_at(workdir / "store" / "i") == 1
    assert not list((workdir / "store" / "i").glob("lease-*"))


def test_a_first_image_that_is_overwritten_at_once(workdir: Path, break_sink: Plan) -> None:
    (workdir / "store").mkdir()
    racers = [Racer(workdir, break_sink, name) for name in "ab"]

    async def main() -> None:
        for racer in racers:
            racer.start()
            await racer.commits.reached.wait()
        for racer in racers:
            await racer.committed()
        await racers[0].settled()
        late = await racers[1].settled()
        await ckptpipe.verify(str(workdir / "store" / "i"), expect_digest=late.digest, settings=SETTINGS)

    run(main())
    assert saves_at(workdir / "store" / "i") == 1


def test_a_successor_that_fails_puts_an_image_back_that_is_whole(
    workdir: Path, old: ckptpipe.SinkResult, break_sink: Plan
) -> None:
    """The one that it replaced must not have removed the one before it."""
    early = Racer(workdir, break_sink, "a")
    late, elsewhere = Faults(), Faults()
    commits = late.hold(*COMMIT)  # type: ignore[arg-type]
    fails = elsewhere.hold(*COMMIT)  # type: ignore[arg-type]
    elsewhere.fail(*COMMIT, StorageError("broken on purpose"))  # type: ignore[arg-type]
    (workdir / "b").symlink_to("store")
    break_sink(f"{workdir}/b", late)
    break_sink("elsewhere", elsewhere)
    source = write(workdir / "file", os.urandom(2 * MIB))

    async def main() -> None:
        early.start()
        await early.commits.reached.wait()
        work = ckptpipe.save(
            source, to=[workdir / "b", workdir / "elsewhere"], name="i", overwrite=True, settings=SETTINGS
        )
        save = asyncio.ensure_future(work)
        await commits.reached.wait()  # both know of the old image alone
        await early.committed()
        commits.release.set()
        await fails.reached.wait()  # the late one's manifest stands
        result = await early.settled()
        assert any("was overwritten at once" in note for note in result.notes)
        fails.release.set()
        with pytest.raises(StorageError, match="broken on purpose"):
            await save
        await ckptpipe.verify(str(workdir / "store" / "i"), expect_digest=old.digest, settings=SETTINGS)
        await ckptpipe.gc(str(workdir / "store"), older_than=0)
        await ckptpipe.verify(str(workdir / "store" / "i"), expect_digest=old.digest, settings=SETTINGS)

    run(main())
    assert saves_at(workdir / "store" / "i") == 1


def test_gc_beside_them_takes_nothing_that_stands(
    workdir: Path, old: ckptpipe.SinkResult, break_sink: Plan
) -> None:
    racers = {name: Racer(workdir, break_sink, name) for name in "abc"}

    async def main() -> None:
        async def gc() -> None:
            await ckptpipe.gc(str(workdir / "store"), older_than=0)

        for racer in racers.values():
            racer.start()
            await racer.commits.reached.wait()
        await gc()
        for racer in racers.values():
            await racer.committed()
            await gc()
        results = {}
        for name, racer in racers.items():
            results[name] = await racer.settled()
            await gc()
        await ckptpipe.verify(
            str(workdir / "store" / "i"), expect_digest=results["c"].digest, settings=SETTINGS
        )

    run(main())
    assert saves_at(workdir / "store" / "i") == 1
