"""gc of a torn manifest and what lies beside it: interrupted anywhere, and beside saves that begin and commit meanwhile."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

import ckptpipe
from ckptpipe.pipeline.image import collection
from ckptpipe.pipeline.image.layout import MANIFEST_NAME, data_name, lease_name
from ckptpipe.pipeline.image.saveid import new_save_id
from ckptpipe.pipeline.result import GcItem
from ckptpipe.storage_backends.errors import AccessDenied
from ckptpipe.storage_backends.registry import open_backend
from ckptpipe.storage_backends.testing.context import lent_context
from ckptpipe.storage_backends.wrappers.faulty import Faults, FaultyBackend
from tests.pipeline.runs import SMALL, break_sink, memory_dir, run, saves_at
from tests.pipeline.test_gc_clocks import abroad
from tests.pipeline.trees import write

__all__ = ["break_sink", "memory_dir"]

DAY = 86400.0
PROBE, TORN, LEASE, INDEX_OR_DATA = 1, 2, 3, 4  # what gc deletes, one after the other
SECOND_LOOK = 3  # of what it reads: manifest and lease come before


@pytest.fixture
def image(workdir: Path) -> Path:
    """As a save of another machine leaves it that was killed two days ago, while it wrote the manifest in place."""
    source = write(workdir / "file", os.urandom(200_000))
    run(ckptpipe.save(source, to=workdir / "store", name="i", settings=SMALL))
    made = workdir / "store" / "i"
    save_id = run(ckptpipe.show(str(made)))["save_id"]
    manifest = made / MANIFEST_NAME
    manifest.write_bytes(manifest.read_bytes()[:100])
    write(made / lease_name(save_id), abroad(refreshed=2 * DAY))
    for path in made.iterdir():
        os.utime(path, (time.time() - 2 * DAY,) * 2)
    return made


async def collect(image: Path, faults: Faults) -> list[GcItem]:
    async with lent_context() as context:
        backend = FaultyBackend(await open_backend(str(image), context), faults)
        try:
            return await collection.collect(backend, older_than=0, dry_run=False)
        finally:
            await backend.aclose()


@pytest.mark.parametrize("after", [False, True], ids=["refused", "answer lost"])
@pytest.mark.parametrize("at", [TORN, LEASE, INDEX_OR_DATA, INDEX_OR_DATA + 1])
def test_a_gc_that_was_interrupted_is_done_again(image: Path, at: int, after: bool) -> None:
    with pytest.raises(AccessDenied):
        run(collect(image, Faults().fail("delete", at, AccessDenied("no"), after=after)))
    assert (image / MANIFEST_NAME).exists() == (at == TORN and not after)
    items = run(collect(image, Faults()))
    assert all(item.removed for item in items)
    assert not image.exists() or not (items or os.listdir(image)), "all was gone but the directory"


@pytest.mark.parametrize("at", [TORN, LEASE, INDEX_OR_DATA, INDEX_OR_DATA + 1])
def test_what_an_interrupted_gc_leaves_is_in_no_saves_way(workdir: Path, image: Path, at: int) -> None:
    with pytest.raises(AccessDenied):
        run(collect(image, Faults().fail("delete", at, AccessDenied("no"))))
    run(ckptpipe.save(workdir / "file", to=workdir / "store", name="i", settings=SMALL))
    run(collect(image, Faults()))
    run(ckptpipe.verify(str(image), settings=SMALL))
    assert saves_at(image) == 1


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("operation", "at"),
    [("read_bytes", 2), ("read_bytes", SECOND_LOOK), ("delete", LEASE), ("delete", INDEX_OR_DATA)],
)
def test_an_image_that_was_committed_while_gc_ran_stands(
    workdir: Path, image: Path, operation: Literal["read_bytes", "delete"], at: int, overwrite: bool
) -> None:
    faults = Faults()
    held = faults.hold(operation, at)

    async def main() -> None:
        gc = asyncio.ensure_future(collect(image, faults))
        await held.reached.wait()
        work = ckptpipe.save(
            workdir / "file", to=workdir / "store", name="i", overwrite=overwrite, settings=SMALL
        )
        digest = (await work).sinks[0].digest
        held.release.set()
        items = await gc
        (manifest,) = (item for item in items if item.where.endswith(MANIFEST_NAME))
        if operation == "read_bytes":
            assert manifest.kept_because == "it was written just now"
            assert not any(item.removed for item in items)
        else:
            assert manifest.removed, "the torn one, before the save began"
        await ckptpipe.verify(str(image), expect_digest=digest, settings=SMALL)

    run(main())
    run(collect(image, Faults()))
    run(ckptpipe.verify(str(image), settings=SMALL))
    assert saves_at(image) == 1


def test_a_save_that_began_while_gc_ran_has_the_torn_manifest_to_itself(
    workdir: Path, image: Path, break_sink: Callable[[str, Faults], Faults]
) -> None:
    faults, gc_faults = Faults(), Faults()
    writing, looked = faults.hold("finish", 1), gc_faults.hold("read_bytes", 2)
    break_sink("store", faults)

    async def main() -> None:
        gc = asyncio.ensure_future(collect(image, gc_faults))
        await looked.reached.wait()
        work = ckptpipe.save(workdir / "file", to=workdir / "store", name="i", settings=SMALL)
        save = asyncio.ensure_future(work)
        await writing.reached.wait()
        looked.release.set()
        items = await gc
        assert {item.kept_because.rpartition(": ")[2] for item in items} == {"a save has begun just now"}
        writing.release.set()
        await save

    run(main())
    run(collect(image, Faults()))
    run(ckptpipe.verify(str(image), settings=SMALL))
    assert saves_at(image) == 1


def test_a_torn_manifest_that_stays_keeps_the_lease_that_tells_what_it_is(image: Path) -> None:
    """A save that runs beside it may be writing it just now."""
    running = new_save_id()
    write(image / data_name(running, 0, 0), bytes(4096))
    lease = write(image / lease_name(running), abroad(refreshed=60))
    before = sorted(os.listdir(image))
    items = run(collect(image, Faults()))
    assert sorted(os.listdir(image)) == before
    live = {item.kept_because for item in items if running in item.where}
    assert len(live) == 1 and live.pop().startswith("live lease of process 7 on there")
    for item in items:
        assert "live lease of process 7 on there" in item.kept_because, item
    os.utime(lease, (time.time() - 2 * DAY,) * 2)
    lease.write_bytes(abroad(refreshed=2 * DAY))
    os.utime(lease, (time.time() - 2 * DAY,) * 2)
    assert all(item.removed for item in run(collect(image, Faults())))
    assert not image.exists()
