"""What a save that failed does when cleaning up fails, too: it goes on, and says what is left and how to remove it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline import loop
from ckptpipe.pipeline.cli.failure import describe
from ckptpipe.pipeline.errors import SaveFailed
from ckptpipe.pipeline.interrupted import Interrupted
from ckptpipe.storage_backends.errors import AccessDenied, StorageError, TransientError
from ckptpipe.storage_backends.wrappers.faulty import Fault, Faults
from tests.pipeline.runs import MIB, break_sink, memory_dir, run, saves_at
from tests.pipeline.trees import look, write

__all__ = ["break_sink", "memory_dir"]

Plan = Callable[[str, Faults], Faults]
SETTINGS = ckptpipe.Settings(chunk_bytes=MIB, ring_bytes=8 * MIB, workers=2)


@pytest.fixture
def source(workdir: Path) -> Path:
    return write(workdir / "file", os.urandom(12 * MIB))


@pytest.mark.parametrize("policy", ["required", "best-effort"])
@pytest.mark.parametrize(
    ("operation", "nth", "after"),
    [
        ("abort", 1, True),
        ("list", 0, False),
        ("pending", 0, False),
        ("delete", 1, False),
        ("remove_if_empty", 1, False),
    ],
)
def test_a_clean_up_goes_on_past_what_fails(
    workdir: Path, source: Path, break_sink: Plan, operation: str, nth: int, after: bool, policy: str
) -> None:
    faults = Faults().fail("put_atomic", 2, StorageError("the reason"))  # the index: data is finished then
    lost = TransientError("cut on purpose")
    break_sink("store", faults.fail(operation, nth, lambda: lost, after=after))  # type: ignore[arg-type]
    to = [ckptpipe.SinkSpec(str(workdir / "store"), policy=policy), "null:"]  # type: ignore[arg-type]
    work = ckptpipe.save(source, to=to, name="i", settings=SETTINGS)
    if operation == "abort":
        faults.fail("append", 5, StorageError("the reason"))
    told = f"nvme:{workdir}/store was not cleaned up: cut on purpose"
    cure = f"remove what is left with: ckptpipe gc nvme:{workdir}/store --older-than 0s"
    if policy == "required":
        with pytest.raises(StorageError) as caught:
            run(work)
        assert caught.value.message == f"the reason; {told}"
        assert caught.value.cure == cure
        assert describe(caught.value).lines == [f"ckptpipe: the reason; {told}; {cure}"]
    else:
        result = run(work)
        assert result.sinks[0].error == "the reason"
        assert f"{told}; {cure}" in result.facts.notes
    left = {path.name.partition("-")[0] for path in (workdir / "store" / "i").glob("*")}
    assert left == set(), "all else went"


def test_a_clean_up_that_is_refused_is_told_and_left_to_gc(
    workdir: Path, source: Path, break_sink: Plan
) -> None:
    """Also while this process lives, whose leases protect what they stand for."""
    faults = Faults().fail("put_atomic", 2, StorageError("the reason", cure="mend it"))
    for operation in ("delete", "abort", "discard"):
        faults.fail(operation, 0, lambda: AccessDenied("not allowed", cure="ask for the permission"))  # type: ignore[arg-type]
    break_sink("store", faults)
    with pytest.raises(StorageError) as caught:
        run(ckptpipe.save(source, to=workdir / "store", name="i", settings=SETTINGS))
    error = describe(caught.value).as_json()["error"]
    assert error["message"].startswith(
        f"the reason; nvme:{workdir}/store was not cleaned up: not allowed (and "
    )
    assert (
        error["cure"]
        == f"mend it; remove what is left with: ckptpipe gc nvme:{workdir}/store --older-than 0s"
    )
    assert list((workdir / "store" / "i").glob("lease-*"))
    items = run(ckptpipe.gc(str(workdir / "store"), older_than=0)).items
    assert items and all(item.removed for item in items)
    assert look(workdir / "store") == {}


def test_every_sink_that_was_not_cleaned_up_is_named(workdir: Path, source: Path, break_sink: Plan) -> None:
    for place in ("one", "two"):
        faults = Faults().fail("append", 3, StorageError(f"the reason of {place}"))
        break_sink(place, faults.fail("list", 0, lambda: StorageError("no list")))
    to = [ckptpipe.SinkSpec(str(workdir / place), policy="best-effort") for place in ("one", "two")]
    with pytest.raises(SaveFailed) as caught:
        run(ckptpipe.save(source, to=to, name="i", settings=SETTINGS))
    for place in ("one", "two"):
        assert f"nvme:{workdir}/{place} was not cleaned up: no list" in caught.value.message
        assert f"ckptpipe gc nvme:{workdir}/{place}" in caught.value.cure


@pytest.fixture
def held(break_sink: Plan) -> Fault:
    """A save to "store" stands here, and what it is to clean up then cannot be listed."""
    faults = Faults().fail("list", 0, lambda: StorageError("no list"))
    break_sink("store", faults)
    return faults.hold("append", 5)


def test_a_cancelled_save_has_a_note_of_what_was_not_cleaned_up(
    workdir: Path, source: Path, held: Fault
) -> None:
    async def main() -> None:
        work = ckptpipe.save(source, to=workdir / "store", name="i", settings=SETTINGS)
        save = asyncio.ensure_future(work)
        await held.reached.wait()
        save.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await save
        (note,) = caught.value.__notes__
        assert note.startswith(f"nvme:{workdir}/store was not cleaned up: no list; remove what is left with")

    run(main())


def test_a_save_that_a_signal_ends_says_what_was_not_cleaned_up(
    workdir: Path, source: Path, held: Fault
) -> None:
    async def work() -> None:
        save = asyncio.ensure_future(ckptpipe.save(source, to=workdir / "store", name="i", settings=SETTINGS))
        await held.reached.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await save

    with pytest.raises(Interrupted) as caught:
        loop.run(work, notice=lambda _: None)
    assert str(caught.value).startswith(
        f"interrupted by SIGTERM; nvme:{workdir}/store was not cleaned up: no list; remove what is left with"
    )


def test_a_manifest_that_cannot_be_withdrawn_keeps_its_objects(
    workdir: Path, source: Path, break_sink: Plan
) -> None:
    """The new image stands, whole; what it replaced is there, too, for gc. Neither would be if its objects went."""
    other = write(workdir / "other", os.urandom(3 * MIB))
    run(ckptpipe.save(other, to=[workdir / "one", workdir / "two"], name="i", settings=SETTINGS))
    faults = Faults()
    break_sink("one", faults)
    break_sink("two", Faults().fail("put_atomic", 3, StorageError("the reason")))
    faults.fail("put_atomic", 4, TransientError("not now"))  # the manifest of the old image
    to = [workdir / "one", workdir / "two"]
    with pytest.raises(StorageError, match=r"the reason; nvme:\S+/one was not cleaned up: not now"):
        run(ckptpipe.save(source, to=to, name="i", overwrite=True, settings=SETTINGS))
    stands = run(ckptpipe.verify(str(workdir / "one" / "i"), settings=SETTINGS))
    assert stands.raw_bytes == 12 * MIB
    assert run(ckptpipe.verify(str(workdir / "two" / "i"), settings=SETTINGS)).raw_bytes == 3 * MIB
    run(ckptpipe.gc(str(workdir / "one"), older_than=0))
    run(ckptpipe.verify(str(workdir / "one" / "i"), expect_digest=stands.digest, settings=SETTINGS))
    assert saves_at(workdir / "one" / "i") == 1
