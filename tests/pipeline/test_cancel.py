"""Cancelled at every phase: nothing is left, neither in the process (the fixtures look) nor in the store."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.storage_backends.wrappers.faulty import Faults
from tests.pipeline.runs import MIB, break_sink, memory_dir, run, saves_at
from tests.pipeline.trees import look, write

__all__ = ["break_sink", "memory_dir"]

Plan = Callable[[str, Faults], Faults]
SETTINGS = ckptpipe.Settings(chunk_bytes=MIB, ring_bytes=8 * MIB, workers=2)

# Where the save stands when it is cancelled: at this call of the backend.
PHASES = {
    "check": ("check", 1),
    "look for an image": ("read_bytes", 1),
    "lease": ("put_atomic", 1),
    "create": ("create", 1),
    "first bytes": ("append", 1),
    "middle": ("append", 5),
    "finish": ("finish", 1),
    "index": ("put_atomic", 2),
    "manifest": ("put_atomic", 3),
}


@pytest.fixture
def source(workdir: Path) -> Path:
    return write(workdir / "file", os.urandom(12 * MIB + 5))


async def cancelled_at(held: object, work: asyncio.Task[object]) -> None:
    await asyncio.wait({asyncio.ensure_future(held.reached.wait()), work}, return_when="FIRST_COMPLETED")  # type: ignore[attr-defined]
    assert not work.done(), work
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work


@pytest.mark.parametrize("compress", ["none", "zstd:1"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_cancelled_save_leaves_nothing(
    workdir: Path, source: Path, break_sink: Plan, phase: str, compress: str
) -> None:
    faults = Faults()
    held = faults.hold(*PHASES[phase])  # type: ignore[arg-type]
    break_sink("two", faults)

    async def main() -> None:
        to = [workdir / "one", workdir / "two"]
        save = ckptpipe.save(source, to=to, name="i", compress=compress, settings=SETTINGS)
        await cancelled_at(held, asyncio.ensure_future(save))

    run(main())
    assert look(workdir / "one") == look(workdir / "two") == {}


@pytest.mark.parametrize("phase", ["middle", "index", "manifest"])
def test_a_cancelled_overwrite_leaves_the_old_image(
    workdir: Path, source: Path, break_sink: Plan, phase: str
) -> None:
    faults = Faults()
    break_sink("two", faults)

    async def main() -> None:
        first = await ckptpipe.save(source, to=workdir / "two", name="i", settings=SETTINGS)
        before = look(workdir / "two")
        faults.calls.clear()
        held = faults.hold(*PHASES[phase])  # type: ignore[arg-type]
        save = ckptpipe.save(source, to=workdir / "two", name="i", overwrite=True, settings=SETTINGS)
        await cancelled_at(held, asyncio.ensure_future(save))
        assert look(workdir / "two") == before
        await ckptpipe.verify(
            first.sinks[0].image_url, expect_digest=first.sinks[0].digest, settings=SETTINGS
        )

    run(main())


def test_a_commit_that_was_done_when_the_cancellation_came_is_undone(
    workdir: Path, source: Path, break_sink: Plan
) -> None:
    """The first image stands already, the second is held in its commit."""
    faults = Faults()
    held = faults.hold("put_atomic", 3)
    break_sink("two", faults)

    async def main() -> None:
        to = [workdir / "one", workdir / "two"]
        save = asyncio.ensure_future(ckptpipe.save(source, to=to, name="i", settings=SETTINGS))
        await held.reached.wait()
        assert (workdir / "one" / "i" / "manifest.json").exists()
        await cancelled_at(held, save)

    run(main())
    assert look(workdir / "one") == look(workdir / "two") == {}


def test_a_cancellation_while_the_old_image_is_removed_comes_too_late(
    workdir: Path, source: Path, break_sink: Plan
) -> None:
    faults = Faults()
    break_sink("one", faults)

    async def main() -> None:
        await ckptpipe.save(source, to=workdir / "one", name="i", settings=SETTINGS)
        faults.calls.clear()
        held = faults.hold("delete", 2)
        to = [workdir / "one", workdir / "two"]
        save = asyncio.ensure_future(
            ckptpipe.save(source, to=to, name="i", overwrite=True, settings=SETTINGS)
        )
        await held.reached.wait()
        save.cancel()
        held.release.set()
        with pytest.raises(asyncio.CancelledError):
            await save
        for place in ("one", "two"):
            await ckptpipe.verify(str(workdir / place / "i"), settings=SETTINGS)

    run(main())
    assert saves_at(workdir / "one" / "i") == saves_at(workdir / "two" / "i") == 1


def test_an_impatient_user_cancels_twice(workdir: Path, source: Path, break_sink: Plan) -> None:
    faults = Faults()
    held = faults.hold("append", 5)
    undoing = faults.hold("list", 1)
    break_sink("one", faults)

    async def main() -> None:
        save = asyncio.ensure_future(ckptpipe.save(source, to=workdir / "one", settings=SETTINGS))
        await held.reached.wait()
        save.cancel()
        await undoing.reached.wait()
        save.cancel()
        undoing.release.set()
        with pytest.raises(asyncio.CancelledError):
            await save

    run(main())
    assert look(workdir / "one") == {}


def test_a_cancelled_verify(workdir: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptpipe.pipeline import opening
    from ckptpipe.storage_backends.abc import Backend
    from ckptpipe.storage_backends.wrappers.faulty import FaultyBackend

    faults = Faults()
    held = faults.hold("read_into", 3)
    opened = opening.open_backend

    async def broken(*arguments: object) -> Backend:
        return FaultyBackend(await opened(*arguments), faults)  # type: ignore[arg-type]

    async def main() -> None:
        saved = await ckptpipe.save(source, to=workdir / "one", compress="zstd:1", settings=SETTINGS)
        monkeypatch.setattr(opening, "open_backend", broken)
        await cancelled_at(
            held, asyncio.ensure_future(ckptpipe.verify(saved.sinks[0].image_url, settings=SETTINGS))
        )

    run(main())


def test_a_time_limit_around_a_save(workdir: Path, source: Path, break_sink: Plan) -> None:
    faults = Faults()
    faults.hold("append", 3)
    break_sink("one", faults)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await ckptpipe.save(source, to=workdir / "one", settings=SETTINGS)

    run(main())
    assert look(workdir / "one") == {}


def test_many_cancellations_at_any_moment(workdir: Path, source: Path) -> None:
    """After any number of steps of the loop, without looking where the save stands."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for steps in range(1, 400, 19):
            save = asyncio.ensure_future(
                ckptpipe.save(source, to=workdir / "one", name="i", compress="zstd:1", settings=SETTINGS)
            )

            def later(left: int, save: asyncio.Task[object] = save) -> None:
                if left:
                    loop.call_soon(later, left - 1, save)
                else:
                    save.cancel()

            later(steps)
            try:
                await save
            except asyncio.CancelledError:
                assert look(workdir / "one") == {}
            else:
                await ckptpipe.delete(str(workdir / "one" / "i"))

    run(main())
