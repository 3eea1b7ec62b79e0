"""A save whose objects or lease are taken away while it runs fails, and leaves the old image."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.errors import SaveFailed
from ckptpipe.pipeline.image import collection, protection
from ckptpipe.pipeline.sinks import image as image_sink
from ckptpipe.storage_backends.registry import open_backend
from ckptpipe.storage_backends.testing.context import lent_context
from ckptpipe.storage_backends.wrappers.faulty import Faults, FaultyBackend
from tests.pipeline.runs import MIB, break_sink, memory_dir, run, saves_at, while_held
from tests.pipeline.trees import look, write

__all__ = ["break_sink", "memory_dir"]

Plan = Callable[[str, Faults], Faults]
SETTINGS = ckptpipe.Settings(chunk_bytes=MIB, ring_bytes=8 * MIB, workers=2)
INDEX, MANIFEST = ("put_atomic", 2), ("put_atomic", 3)  # the first is the lease
SETTLE = ("read_bytes", 5)  # of an overwrite; manifest, lease, manifest, lease come before


@pytest.fixture
def source(workdir: Path) -> Path:
    return write(workdir / "file", os.urandom(12 * MIB))


@pytest.fixture
def old(workdir: Path) -> ckptpipe.SinkResult:
    """An image that stands, to be overwritten."""
    other = write(workdir / "other", os.urandom(3 * MIB))
    return run(ckptpipe.save(other, to=workdir / "store", name="i", settings=SETTINGS)).sinks[0]


def objects_of_the_save(old: ckptpipe.SinkResult | None, image: Path, kind: str) -> list[Path]:
    old_id = old.save_id if old is not None else "none"
    return [path for path in image.glob(f"{kind}-*") if old_id not in path.name]


@pytest.mark.parametrize(
    ("at", "kind"),
    [
        (("append", 5), "data"),  # a file that its writer goes on to write to
        (("append", 5), "lease"),
        (INDEX, "data"),
        (MANIFEST, "index"),  # after the last look before the manifest
        (MANIFEST, "data"),
        (MANIFEST, "lease"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value[0]} {value[1]}",
)
@pytest.mark.parametrize("overwrite", [True, False], ids=["overwrite", "first"])
def test_what_was_taken_away_is_missed_before_the_old_image_goes(
    workdir: Path,
    source: Path,
    request: pytest.FixtureRequest,
    break_sink: Plan,
    at: tuple[str, int],
    kind: str,
    overwrite: bool,
) -> None:
    before = request.getfixturevalue("old") if overwrite else None
    image = workdir / "store" / "i"
    faults = Faults()
    held = faults.hold(*at)  # type: ignore[arg-type]
    break_sink("store", faults)

    async def main() -> None:
        work = ckptpipe.save(source, to=workdir / "store", name="i", overwrite=overwrite, settings=SETTINGS)
        async with while_held(held, work) as save:
            taken = objects_of_the_save(before, image, kind)[0]
            taken.unlink()
        with pytest.raises(SaveFailed, match=f"{taken.name} was removed while it was being written, by gc"):
            await save

    run(main())
    if before is None:
        assert look(workdir / "store") == {}
    else:
        run(ckptpipe.verify(str(image), expect_digest=before.digest, settings=SETTINGS))
        assert saves_at(image) == 1


def test_an_object_that_was_cut(
    workdir: Path, source: Path, old: ckptpipe.SinkResult, break_sink: Plan
) -> None:
    image = workdir / "store" / "i"
    faults = Faults()
    held = faults.hold(*INDEX)  # type: ignore[arg-type]
    break_sink("store", faults)

    async def main() -> None:
        work = ckptpipe.save(source, to=workdir / "store", name="i", overwrite=True, settings=SETTINGS)
        async with while_held(held, work) as save:
            cut = objects_of_the_save(old, image, "data")[0]
            size = cut.stat().st_size
            os.truncate(cut, size - 4096)
        with pytest.raises(SaveFailed, match=rf"{cut.name} \({size - 4096} bytes are left of {size}\)"):
            await save

    run(main())
    run(ckptpipe.verify(str(image), expect_digest=old.digest, settings=SETTINGS))


def test_the_marker_of_a_stripe(workdir: Path, source: Path, break_sink: Plan) -> None:
    faults = Faults()
    held = faults.hold("finish", 1)
    break_sink("nvme:", faults)

    async def main() -> None:
        store = f"nvme:{workdir}/a,{workdir}/b"
        async with while_held(held, ckptpipe.save(source, to=store, name="i", settings=SETTINGS)) as save:
            (marker,) = (workdir / "b" / "i").glob("stripe-*-1")
            marker.unlink()
        with pytest.raises(SaveFailed, match=f"{marker.name} was removed"):
            await save

    run(main())
    assert look(workdir / "a") == look(workdir / "b") == {}


def test_a_best_effort_sink_is_given_up(workdir: Path, source: Path, break_sink: Plan) -> None:
    faults = Faults()
    held = faults.hold(*INDEX)  # type: ignore[arg-type]
    break_sink("two", faults)

    async def main() -> None:
        to = [workdir / "one", ckptpipe.SinkSpec(str(workdir / "two"), policy="best-effort")]
        async with while_held(held, ckptpipe.save(source, to=to, name="i", settings=SETTINGS)) as save:
            for taken in (workdir / "two" / "i").glob("data-*"):
                taken.unlink()
        result = await save
        assert [sink.ok for sink in result.sinks] == [True, False]
        assert "was removed while it was being written" in result.sinks[1].error

    run(main())
    assert look(workdir / "two") == {}


def test_a_lease_that_is_gone_ends_the_save_early(
    workdir: Path, source: Path, old: ckptpipe.SinkResult, break_sink: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_sink, "LEASE_REFRESH", 0.01)
    faults = Faults()
    held = faults.hold("append", 5)  # never let go
    break_sink("store", faults)
    image = workdir / "store" / "i"

    async def main() -> None:
        work = ckptpipe.save(source, to=workdir / "store", name="i", overwrite=True, settings=SETTINGS)
        save = asyncio.ensure_future(work)
        await held.reached.wait()
        while left := objects_of_the_save(
            old, image, "lease"
        ):  # it may be put back once: a refresh under way
            left[0].unlink()
            await asyncio.sleep(0)
        with pytest.raises(SaveFailed, match=r"lease-\S+ was removed"):
            await save

    run(main())
    run(ckptpipe.verify(str(image), expect_digest=old.digest, settings=SETTINGS))
    assert saves_at(image) == 1


@pytest.fixture
def expired_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another machine would see them, whose clock is ahead."""
    from ckptpipe.pipeline.image import holder

    monkeypatch.setattr(protection, "LEASE_TTL", -1.0)
    monkeypatch.setattr(holder, "_life", lambda *_: "unknown")


@pytest.mark.parametrize("at", [("append", 5), INDEX, MANIFEST])
def test_gc_that_takes_a_living_save(
    workdir: Path,
    source: Path,
    old: ckptpipe.SinkResult,
    break_sink: Plan,
    expired_leases: None,
    at: tuple[str, int],
) -> None:
    faults = Faults()
    held = faults.hold(*at)  # type: ignore[arg-type]
    break_sink("store", faults)

    async def main() -> None:
        work = ckptpipe.save(source, to=workdir / "store", name="i", overwrite=True, settings=SETTINGS)
        async with while_held(held, work) as save:
            assert any(
                item.removed for item in (await ckptpipe.gc(str(workdir / "store"), older_than=0)).items
            )
        with pytest.raises(SaveFailed, match=r"lease-\S+ was removed"):
            await save

    run(main())
    run(ckptpipe.verify(str(workdir / "store" / "i"), expect_digest=old.digest, settings=SETTINGS))
    assert saves_at(workdir / "store" / "i") == 1


@pytest.mark.parametrize("gc_stands", ["before it takes the lease", "before it looks at the manifest again"])
def test_one_of_save_and_gc_sees_the_other(
    workdir: Path,
    source: Path,
    old: ckptpipe.SinkResult,
    break_sink: Plan,
    expired_leases: None,
    gc_stands: str,
) -> None:
    """However long either stands where, an image is whole at the end."""
    image = workdir / "store" / "i"
    faults, gc_faults = Faults(), Faults()
    committing = faults.hold(*MANIFEST)  # type: ignore[arg-type]
    break_sink("store", faults)
    first = gc_stands == "before it takes the lease"
    gc_held = gc_faults.hold("delete", 2) if first else gc_faults.hold("read_bytes", 4)
    # Deleted before: the probe of the clock; read before: manifest, both leases.

    async def main() -> None:
        async with lent_context() as context:
            work = ckptpipe.save(source, to=workdir / "store", name="i", overwrite=True, settings=SETTINGS)
            save = asyncio.ensure_future(work)
            await committing.reached.wait()
            backend = FaultyBackend(await open_backend(str(image), context), gc_faults)
            gc = asyncio.ensure_future(collection.collect(backend, older_than=0, dry_run=False))
            await asyncio.wait(
                {asyncio.ensure_future(gc_held.reached.wait()), gc}, return_when="FIRST_COMPLETED"
            )
            assert not gc.done(), gc
            assert bool(objects_of_the_save(old, image, "lease")) == first
            if first:  # the save finds its lease, and gc its manifest
                settling = faults.hold(*SETTLE)  # type: ignore[arg-type]
                committing.release.set()
                await settling.reached.wait()
                gc_held.release.set()
                items = await gc
                settling.release.set()
                late = (await save).sinks[0]
                assert {item.kept_because for item in items if late.save_id in item.where} == {
                    "its manifest was written just now"
                }
                expected = late.digest
            else:  # the save misses its lease, and puts the old image back
                committing.release.set()
                with pytest.raises(SaveFailed, match=r"lease-\S+ was removed"):
                    await save
                gc_held.release.set()
                await gc
                expected = old.digest
            await ckptpipe.verify(str(image), expect_digest=expected, settings=SETTINGS)
            await backend.aclose()

    run(main())
    assert saves_at(image) == 1


def test_what_keeps_nothing_is_not_looked_for(source: Path) -> None:
    result = run(ckptpipe.save(source, to="null:", name="i", settings=SETTINGS))
    assert result.sinks[0].ok
