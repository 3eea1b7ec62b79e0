"""A save that is stopped, or whose machine is suspended, for longer than a lease holds: it fails, and an image is whole."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.errors import SaveFailed
from ckptpipe.pipeline.image import collection, holder, lease, protection
from ckptpipe.pipeline.image.lease import LEASE_HOLDS, LiveLease
from ckptpipe.pipeline.image.protection import LEASE_TTL
from ckptpipe.pipeline.image.saveid import new_save_id
from ckptpipe.pipeline.sinks import image as image_sink
from ckptpipe.storage_backends.registry import open_backend
from ckptpipe.storage_backends.testing.context import lent_context
from ckptpipe.storage_backends.wrappers.faulty import Faults, FaultyBackend
from tests.pipeline.runs import SMALL, break_sink, memory_dir, run, saves_at, while_held
from tests.pipeline.trees import look, write

__all__ = ["break_sink", "memory_dir"]

Plan = Callable[[str, Faults], Faults]
FIRST_REFRESH = ("put_atomic", 2)  # the first is the lease itself
AFTER_MANIFEST = ("read_bytes", 4)  # of an overwrite: the lease; manifest, lease, manifest come before
TOO_OLD = r"lease-\S+ was refreshed \d+ s ago, and gc elsewhere may have begun to remove what was saved"


class Machine:
    """The machine's clock that nobody sets."""

    ahead = 0.0

    def boot_seconds(self) -> float:
        return 1000.0 + self.ahead


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(lease, "boot_seconds", made.boot_seconds)
    return made


@pytest.fixture
def source(workdir: Path) -> Path:
    return write(workdir / "file", os.urandom(300_000))


@pytest.fixture
def old(workdir: Path) -> ckptpipe.SinkResult:
    other = write(workdir / "other", os.urandom(200_000))
    return run(ckptpipe.save(other, to=workdir / "store", name="i", settings=SMALL)).sinks[0]


def stop(machine: Machine, image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For half an hour, as gc on another machine sees it."""
    machine.ahead += 2 * LEASE_TTL
    monkeypatch.setattr(protection, "read_lease", lambda _: holder.Holder(life="unknown"))
    for path in image.iterdir():
        os.utime(path, (time.time() - 2 * LEASE_TTL,) * 2)


@pytest.mark.parametrize("seconds", [0.0, LEASE_HOLDS, LEASE_HOLDS + 1])
def test_a_refresh_counts_from_its_beginning_and_where_it_ends_in_time(
    workdir: Path, machine: Machine, seconds: float
) -> None:
    async def main() -> None:
        async with lent_context() as context:
            faults = Faults()
            held = faults.hold("put_atomic", 2)
            backend = FaultyBackend(await open_backend(str(workdir), context), faults)
            ours = LiveLease(backend, new_save_id())
            await ours.put()
            refresh = asyncio.ensure_future(ours.put())
            await held.reached.wait()
            machine.ahead += seconds
            held.release.set()
            await refresh
            assert await ours.stands()
            assert ours.holds() == (seconds <= LEASE_HOLDS)
            assert ours.age == seconds
            await ours.put()
            assert ours.holds() == (seconds <= LEASE_HOLDS), "what did not hold never holds again"
            await backend.aclose()

    run(main())
    assert LEASE_HOLDS < LEASE_TTL


@pytest.mark.parametrize("overwrite", [True, False], ids=["overwrite", "first"])
def test_gc_between_the_two_halves_of_a_refresh(
    workdir: Path,
    source: Path,
    request: pytest.FixtureRequest,
    machine: Machine,
    break_sink: Plan,
    monkeypatch: pytest.MonkeyPatch,
    overwrite: bool,
) -> None:
    """The save has seen its lease, gc takes that away and looks, the save puts it back: and both would go on."""
    before = request.getfixturevalue("old") if overwrite else None
    monkeypatch.setattr(image_sink, "LEASE_REFRESH", 0.05)
    image = workdir / "store" / "i"
    faults, gc_faults = Faults(), Faults()
    writing, refreshing = faults.hold("finish", 1), faults.hold(*FIRST_REFRESH)  # type: ignore[arg-type]
    break_sink("store", faults)
    gc_held = gc_faults.hold("delete", 4 if before else 3)  # the first object; probe and leases come before

    async def main() -> None:
        async with lent_context() as context:
            work = ckptpipe.save(source, to=workdir / "store", name="i", overwrite=overwrite, settings=SMALL)
            save = asyncio.ensure_future(work)
            await writing.reached.wait()
            await refreshing.reached.wait()
            monkeypatch.setattr(image_sink, "LEASE_REFRESH", 60)
            stop(machine, image, monkeypatch)
            backend = FaultyBackend(await open_backend(str(image), context), gc_faults)
            gc = asyncio.ensure_future(collection.collect(backend, older_than=0, dry_run=False))
            await gc_held.reached.wait()
            assert not list(image.glob("lease-*"))
            refreshing.release.set()
            writing.release.set()
            with pytest.raises(SaveFailed, match=TOO_OLD) as caught:
                await save
            assert "its machine suspended" in caught.value.cure
            gc_held.release.set()
            await gc
            await backend.aclose()

    run(main())
    if before is None:
        assert look(workdir / "store") == {}
    else:
        run(ckptpipe.verify(str(image), expect_digest=before.digest, settings=SMALL))
        assert saves_at(image) == 1


@pytest.mark.parametrize("at", [("finish", 1), ("put_atomic", 2), AFTER_MANIFEST])
@pytest.mark.parametrize("gc", [True, False], ids=["gc", "no gc"])
def test_an_image_is_whole_wherever_the_save_was_stopped(
    workdir: Path,
    source: Path,
    old: ckptpipe.SinkResult,
    machine: Machine,
    break_sink: Plan,
    monkeypatch: pytest.MonkeyPatch,
    at: tuple[str, int],
    gc: bool,
) -> None:
    """Also where gc has taken the old image, for the manifest of the new one stood."""
    image = workdir / "store" / "i"
    faults = Faults()
    held = faults.hold(*at)  # type: ignore[arg-type]
    break_sink("store", faults)
    taken = gc and at == AFTER_MANIFEST

    async def main() -> None:
        work = ckptpipe.save(source, to=workdir / "store", name="i", overwrite=True, settings=SMALL)
        async with while_held(held, work) as save:
            stop(machine, image, monkeypatch)
            if gc:
                assert any(item.removed for item in (await ckptpipe.gc(str(image), older_than=0)).items)
        with pytest.raises(SaveFailed, match=r"lease-\S+ was removed" if gc else TOO_OLD) as caught:
            await save
        cannot = f"the image that was replaced cannot be put back, data-{old.save_id}-0-0, index-"
        assert (cannot in str(caught.value)) == taken
        if taken:
            assert faults.calls["put_atomic"] == 3, "the old manifest was not put back in between"

    run(main())
    found = run(ckptpipe.verify(str(image), settings=SMALL))
    assert (found.digest == old.digest) is not taken
    assert found.raw_bytes == (300_000 if taken else 200_000)
    assert saves_at(image) == 1
    assert not list(image.glob("lease-*"))


def test_an_old_image_that_goes_while_it_is_put_back(
    workdir: Path, source: Path, old: ckptpipe.SinkResult, machine: Machine, break_sink: Plan
) -> None:
    image = workdir / "store" / "i"
    faults = Faults()
    committed = faults.hold(*AFTER_MANIFEST)  # type: ignore[arg-type]
    putting_back = faults.hold("put_atomic", 4)
    break_sink("store", faults)

    async def main() -> None:
        work = ckptpipe.save(source, to=workdir / "store", name="i", overwrite=True, settings=SMALL)
        save = asyncio.ensure_future(work)
        await committed.reached.wait()
        machine.ahead += 2 * LEASE_TTL
        committed.release.set()
        await putting_back.reached.wait()
        for path in image.glob(f"*-{old.save_id}*"):
            path.unlink()
        putting_back.release.set()
        with pytest.raises(SaveFailed, match="the image that was replaced cannot be put back, data-"):
            await save

    run(main())
    assert run(ckptpipe.verify(str(image), settings=SMALL)).raw_bytes == 300_000
    assert saves_at(image) == 1


def test_a_stop_that_is_shorter_does_no_harm(
    workdir: Path, source: Path, machine: Machine, break_sink: Plan
) -> None:
    faults = Faults()
    held = faults.hold("finish", 1)
    break_sink("store", faults)

    async def main() -> None:
        async with while_held(
            held, ckptpipe.save(source, to=workdir / "store", name="i", settings=SMALL)
        ) as save:
            machine.ahead += LEASE_HOLDS
        assert (await save).sinks[0].ok

    run(main())
    run(ckptpipe.verify(str(workdir / "store" / "i"), settings=SMALL))


def test_a_machine_that_is_renamed_meanwhile(
    workdir: Path, source: Path, break_sink: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults()
    held = faults.hold("finish", 1)
    break_sink("store", faults)

    async def main() -> None:
        async with while_held(
            held, ckptpipe.save(source, to=workdir / "store", name="i", settings=SMALL)
        ) as save:
            monkeypatch.setattr(holder.socket, "gethostname", lambda: "renamed")
        assert (await save).sinks[0].ok

    run(main())
