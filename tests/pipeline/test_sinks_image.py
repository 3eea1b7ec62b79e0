"""The image sink: its live lease, what it refuses beforehand, other saves beside it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.sinks import image as image_sink
from ckptpipe.storage_backends.errors import StorageError
from ckptpipe.storage_backends.wrappers.faulty import Faults
from tests.pipeline.runs import MIB, break_sink, memory_dir, run, saves_at
from tests.pipeline.trees import look, write

__all__ = ["break_sink", "memory_dir"]

Plan = Callable[[str, Faults], Faults]
SETTINGS = ckptpipe.Settings(chunk_bytes=MIB, ring_bytes=8 * MIB, workers=2)


@pytest.fixture
def source(workdir: Path) -> Path:
    return write(workdir / "file", os.urandom(12 * MIB))


def test_the_lease_says_who_saves_and_is_refreshed(
    workdir: Path, source: Path, break_sink: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_sink, "LEASE_REFRESH", 0.01)
    faults = Faults()
    held = faults.hold("append", 3)
    refreshed = faults.hold("put_atomic", 4)  # 1: the first lease; the next ones are refreshes
    break_sink("store", faults)

    async def main() -> None:
        save = asyncio.ensure_future(ckptpipe.save(source, to=workdir / "store", name="i", settings=SETTINGS))
        await held.reached.wait()
        await refreshed.reached.wait()
        (lease,) = (workdir / "store" / "i").glob("lease-*")
        facts = json.loads(lease.read_text())
        assert facts["pid"] == os.getpid() and facts["host"] and facts["save_id"] in lease.name
        assert facts["refreshed"] >= facts["started"]
        assert lease.stat().st_mode & 0o777 == 0o600
        refreshed.release.set()
        held.release.set()
        result = await save
        assert result.sinks[0].ok and not lease.exists()

    run(main())


@pytest.mark.parametrize("policy", ["required", "best-effort"])
def test_a_lease_that_cannot_be_refreshed(
    workdir: Path, source: Path, break_sink: Plan, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """gc elsewhere would take the save for dead: it must not go on."""
    monkeypatch.setattr(image_sink, "LEASE_REFRESH", 0.01)
    faults = Faults().fail("put_atomic", 2, StorageError("read-only by now"))
    faults.hold("append", 5)
    break_sink("store", faults)
    to = [ckptpipe.SinkSpec(str(workdir / "store"), policy=policy), "null:"]  # type: ignore[arg-type]
    save = ckptpipe.save(source, to=to, name="i", settings=SETTINGS)
    if policy == "required":
        with pytest.raises(StorageError, match="read-only by now"):
            run(save)
    else:
        result = run(save)
        assert [sink.ok for sink in result.sinks] == [False, True]
        assert "read-only by now" in result.sinks[0].error
    assert look(workdir / "store") == {}


def test_too_many_chunks_are_refused_before_the_copy(workdir: Path) -> None:
    spec = ckptpipe.SourceSpec("synthetic", {"bytes": 1 << 50})
    settings = ckptpipe.Settings(chunk_bytes=4096)
    with pytest.raises(UsageError, match="larger chunks"):
        run(ckptpipe.save(spec, to=workdir / "store", settings=settings))
    assert look(workdir / "store") == {}


def test_too_many_files_are_refused_before_the_copy(
    workdir: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_sink, "ENTRY_LEAST", 1 << 30)
    with pytest.raises(UsageError, match="pack small files"):
        run(ckptpipe.save(source, to=workdir / "store", settings=SETTINGS))
    assert look(workdir / "store") == {}


def test_two_overwrites_at_once(workdir: Path, source: Path, break_sink: Plan) -> None:
    """The later commit replaces the earlier one's image, and leaves nothing of it."""
    store = workdir / "store"
    faults = Faults()
    break_sink("store", faults)
    other = write(workdir / "other", os.urandom(3 * MIB))

    async def main() -> None:
        await ckptpipe.save(other, to=store, name="i", settings=SETTINGS)
        faults.calls.clear()
        held = faults.hold("append", 2)
        slow = asyncio.ensure_future(
            ckptpipe.save(source, to=store, name="i", overwrite=True, settings=SETTINGS)
        )
        await held.reached.wait()
        await ckptpipe.save(other, to=store, name="i", overwrite=True, settings=SETTINGS)
        held.release.set()
        late = await slow
        await ckptpipe.verify(str(store / "i"), expect_digest=late.sinks[0].digest, settings=SETTINGS)

    run(main())
    assert saves_at(store / "i") == 1


def test_an_overwrite_that_fails_after_another_one_leaves_that_one(
    workdir: Path, source: Path, break_sink: Plan
) -> None:
    store = workdir / "store"
    faults = Faults()
    break_sink("store", faults)
    break_sink("second", Faults().fail("put_atomic", 3, StorageError("broken on purpose")))
    other = write(workdir / "other", os.urandom(3 * MIB))

    async def main() -> None:
        await ckptpipe.save(other, to=store, name="i", settings=SETTINGS)
        faults.calls.clear()
        held = faults.hold("append", 2)
        slow = asyncio.ensure_future(
            ckptpipe.save(source, to=[store, workdir / "second"], name="i", overwrite=True, settings=SETTINGS)
        )
        await held.reached.wait()
        quick = await ckptpipe.save(other, to=store, name="i", overwrite=True, settings=SETTINGS)
        held.release.set()
        with pytest.raises(StorageError, match="broken on purpose"):
            await slow
        await ckptpipe.verify(str(store / "i"), expect_digest=quick.sinks[0].digest, settings=SETTINGS)

    run(main())
    assert saves_at(store / "i") == 1


def test_a_file_of_proc_is_not_saved_as_an_empty_one(workdir: Path) -> None:
    with pytest.raises(ckptpipe.SourceError, match="says that it is empty"):
        run(ckptpipe.save("/proc/self/status", to=workdir / "store", settings=SETTINGS))
    assert look(workdir / "store") == {}


def test_odd_paths(workdir: Path) -> None:
    with pytest.raises(ckptpipe.SourceError, match="null byte"):
        run(ckptpipe.save("a\0b", to="null:", settings=SETTINGS))
    with pytest.raises(UsageError, match="no name of its own"):
        run(ckptpipe.save([workdir, "/"], to="null:", settings=SETTINGS))
