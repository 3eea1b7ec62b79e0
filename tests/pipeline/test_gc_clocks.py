"""Leases and clocks: whom gc takes for dead, where clocks, times of writing and processes say different things."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import ckptpipe
from ckptpipe.pipeline.image import collection, protection
from ckptpipe.pipeline.image.holder import holder_facts, lease_facts
from ckptpipe.pipeline.image.layout import data_name, lease_name
from ckptpipe.pipeline.image.protection import CLOCK_DOUBT, LEASE_TTL
from ckptpipe.pipeline.image.saveid import new_save_id
from ckptpipe.pipeline.result import GcItem
from ckptpipe.storage_backends.errors import NoSpace
from ckptpipe.storage_backends.registry import open_backend
from ckptpipe.storage_backends.testing.context import lent_context
from ckptpipe.storage_backends.wrappers.faulty import Faults, FaultyBackend
from tests.pipeline.runs import SMALL, memory_dir, run
from tests.pipeline.trees import look, write

__all__ = ["memory_dir"]

DAY = 86400.0


def abroad(*, refreshed: float = 0.0) -> bytes:
    """A lease of a process of another machine. ``refreshed``: seconds ago by its own clock."""
    facts = {"host": "there", "pid": 7, "process": {"boot_id": "another"}}
    return json.dumps(facts | {"refreshed": time.time() - refreshed}).encode()


def plant(image: Path, lease: bytes, *, age: float, lease_age: float | None = None) -> list[Path]:
    """A save's data and lease, so many seconds old by their times of writing."""
    save_id = new_save_id()
    planted = [
        write(image / data_name(save_id, 0, 0), bytes(4096)),
        write(image / lease_name(save_id), lease),
    ]
    for path, seconds in zip(planted, (age, age if lease_age is None else lease_age), strict=True):
        os.utime(path, (time.time() - seconds,) * 2)
    return planted


def collect(store: Path, **more: object) -> list[GcItem]:
    return run(ckptpipe.gc(str(store), **({"older_than": 0} | more))).items  # type: ignore[arg-type]


@pytest.fixture
def shift_clock(monkeypatch: pytest.MonkeyPatch) -> object:
    """gc's own clock is ahead by so many seconds; the store's is right."""

    def shift(seconds: float) -> None:
        now = SimpleNamespace(time=lambda: time.time() + seconds)
        monkeypatch.setattr(protection, "time", now)

    return shift


def test_a_process_that_lives_protects_its_save_whatever_the_times_say(workdir: Path) -> None:
    planted = plant(workdir / "s" / "i", lease_facts(holder_facts(new_save_id(), 1.0)), age=2 * DAY)
    kept = collect(workdir / "s")
    assert all(path.exists() for path in planted)
    assert {item.kept_because for item in kept} == {
        f"live lease of process {os.getpid()} on {os.uname().nodename}, which is alive"
    }


def test_a_save_that_has_left_is_not_protected_by_its_process(workdir: Path) -> None:
    plant(workdir / "s" / "i", lease_facts(holder_facts(new_save_id(), 1.0), left=True), age=1)
    assert all(item.removed for item in collect(workdir / "s"))
    assert not (workdir / "s" / "i").exists()


@pytest.mark.parametrize(
    ("age", "refreshed", "kept"),
    [
        (2 * LEASE_TTL, 2 * LEASE_TTL, False),
        (LEASE_TTL / 2, 2 * LEASE_TTL, True),  # the store's time counts: its clock is behind
        (2 * LEASE_TTL, LEASE_TTL / 2, True),  # something has set the time of writing back
        (2 * LEASE_TTL, -LEASE_TTL / 2, True),
        (2 * LEASE_TTL, -2 * LEASE_TTL, False),  # a clock that is wrong by so much says nothing
        (-DAY, 2 * LEASE_TTL, True),  # written in the future
    ],
)
def test_the_later_of_time_of_writing_and_the_holders_word(
    workdir: Path, age: float, refreshed: float, kept: bool
) -> None:
    planted = plant(workdir / "s" / "i", abroad(refreshed=refreshed), age=age)
    items = collect(workdir / "s")
    assert {item.removed for item in items} == {not kept}
    assert all(path.exists() for path in planted) == kept
    assert kept or not (workdir / "s" / "i").exists()


@pytest.mark.parametrize("ahead", [2 * LEASE_TTL, 2 * DAY])
def test_ages_are_by_the_clock_of_the_store(workdir: Path, shift_clock: object, ahead: float) -> None:
    shift_clock(ahead)  # type: ignore[operator]
    planted = plant(workdir / "s" / "i", abroad(refreshed=60), age=60)
    young = plant(workdir / "s" / "j", abroad(refreshed=2 * LEASE_TTL), age=2 * LEASE_TTL)
    kept = collect(workdir / "s", older_than=DAY)
    assert all(path.exists() for path in (*planted, *young))
    assert [item.kept_because for item in kept[:2]] == [
        "live lease of process 7 on there, refreshed 60 s ago"
    ] * 2
    assert [item.kept_because for item in kept[2:]] == ["younger than 86400 s"] * 2
    assert all(round(item.age_seconds / 10) in (6, 180) for item in kept)
    assert sorted(os.listdir(workdir / "s" / "i")) == sorted(path.name for path in planted)


def test_a_dry_run_writes_nothing(workdir: Path) -> None:
    plant(workdir / "s" / "i", abroad(), age=60)
    before = look(workdir / "s"), os.stat(workdir / "s" / "i").st_mtime_ns
    collect(workdir / "s", dry_run=True)
    assert (look(workdir / "s"), os.stat(workdir / "s" / "i").st_mtime_ns) == before


def test_a_store_that_takes_no_probe_is_collected_with_a_doubt(workdir: Path) -> None:
    """It may be full, and then there is work for gc."""
    doubtful = plant(workdir / "i", abroad(refreshed=DAY), age=LEASE_TTL + CLOCK_DOUBT / 2)
    old = plant(workdir / "i", abroad(refreshed=DAY), age=LEASE_TTL + CLOCK_DOUBT + 60)

    async def main() -> None:
        async with lent_context() as context:
            faults = Faults().fail("put_atomic", 0, lambda: NoSpace("full"))
            backend = FaultyBackend(await open_backend(str(workdir / "i"), context), faults)
            await collection.collect(backend, older_than=0, dry_run=False)
            await backend.aclose()

    run(main())
    assert all(path.exists() for path in doubtful)
    assert not any(path.exists() for path in old)


def test_the_probe_of_a_killed_gc_goes_and_nobody_elses_file(workdir: Path) -> None:
    left = write(workdir / "s" / "i" / "write-probe-0123456789abcdef", b"")
    foreign = [
        write(workdir / "s" / "j" / name, data)
        for name, data in (
            ("write-probe", b""),
            ("write-probe-0123456789abcdef", b"mine"),
            ("write-probe-mine", b""),
        )
    ]
    assert [item.kept_because for item in collect(workdir / "s", older_than=DAY)] == ["younger than 86400 s"]
    assert [item.removed for item in collect(workdir / "s")] == [True]
    assert not left.exists() and all(path.exists() for path in foreign)


def test_what_a_save_replaced_stays_until_that_save_has_ended(workdir: Path) -> None:
    """It may fail at another of its places, and put the old manifest back."""
    source = write(workdir / "file", os.urandom(200_000))
    run(ckptpipe.save(source, to=workdir / "s", name="i", settings=SMALL))
    image = workdir / "s" / "i"
    save_id = run(ckptpipe.show(str(image)))["save_id"]
    lease = write(image / lease_name(save_id), abroad())
    replaced = write(image / data_name(new_save_id(), 0, 0), bytes(4096))
    os.utime(replaced, (time.time() - 2 * DAY,) * 2)
    (item,) = (item for item in collect(workdir / "s") if item.where.endswith(replaced.name))
    assert item.kept_because.startswith("replaced by a save that has not ended: live lease of process 7")
    lease.unlink()
    assert [item.removed for item in collect(workdir / "s")] == [True]
    assert not replaced.exists()
    run(ckptpipe.verify(str(image), settings=SMALL))
