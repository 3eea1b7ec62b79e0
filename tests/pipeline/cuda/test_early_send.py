"""Saving a launched process while the driver still checkpoints it: what is sent early, what again, what never waits."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ckptpipe
from ckptpipe.pipeline.cuda.growing_image import GrowingImage
from ckptpipe.pipeline.cuda.launched_pool import PooledImage
from ckptpipe.pipeline.sources.launched_image import LaunchedImageSource
from ckptpipe.pyx.control_page import ImageState
from ckptpipe.pyx.staging import leaked, outstanding
from ckptpipe.storage_backends.errors import StorageError
from tests.pipeline.cuda.early import (
    BY_THE_MIDDLE,
    CHECKPOINT,
    CHUNKS,
    Arrived,
    again,
    begun,
    builds,
    in_the_middle,
)
from tests.pipeline.cuda.launched import Launch, everything, holds_everything, launch, stored
from tests.pipeline.cuda.runs import KIB, SETTINGS, images, recover, restore, runs, save
from tests.pipeline.cuda.test_killed_controller import SAVE
from tests.pipeline.image import second_reader
from tests.pipeline.image.test_second_reader import fast
from tests.pipeline.runs import run
from tests.preload.launched import MIB, PIECE
from tests.simcuda import SimWorld

__all__ = ["launch"]


@pytest.mark.parametrize("compress", ["none", "zstd:1"])
def test_chunks_are_stored_while_the_driver_works(
    world: SimWorld,
    launch: Launch,
    workdir: Path,
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
    compress: str,
) -> None:
    it = launch()
    arrived = Arrived(monkeypatch, BY_THE_MIDDLE)
    result = asyncio.run(in_the_middle(world, it, workdir, arrived, compress=compress))
    assert sorted(arrived.chunks[:BY_THE_MIDDLE]) == [(number, 0) for number in range(BY_THE_MIDDLE)]
    assert sorted(arrived.chunks) == [(number, 0) for number in range(CHUNKS)], "nothing was sent twice"
    early, late = again(result)
    assert BY_THE_MIDDLE <= early <= CHUNKS and late == 0
    holds_everything(stored(workdir), it)
    runs(world, it.target, runtime)
    assert outstanding() == 0 and leaked() == 0


@pytest.mark.parametrize("compress", ["none", "zstd:1"])
def test_what_changes_below_the_watermark_is_sent_again(
    world: SimWorld,
    launch: Launch,
    workdir: Path,
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
    compress: str,
) -> None:
    it = launch(SIMCUDA_REWRITES="3")
    arrived = Arrived(monkeypatch, BY_THE_MIDDLE)
    options: dict[str, Any] = {"compress": compress, "leave": "checkpointed"}
    result = asyncio.run(in_the_middle(world, it, workdir, arrived, **options))
    twice = [number for piece in (0, 2, 4) for number in range(piece * 8, piece * 8 + 8)]
    assert sorted(number for number, version in arrived.chunks if version) == twice
    assert again(result)[1] == len(twice)
    data = stored(workdir)
    holds_everything(data, it)
    run(ckptpipe.verify(str(workdir / "a"), settings=SETTINGS))
    (sink,) = result.sinks
    manifest = run(ckptpipe.show(str(workdir / "a")))
    assert manifest["totals"]["chunks"] == CHUNKS == result.chunks
    if compress == "none":
        assert sink.stored_bytes == (CHUNKS - result.zero_chunks + len(twice)) * 256 * KIB, (
            "dead space counts"
        )
    read = second_reader.read_image(workdir / "a", crc=fast)["proc/0/driver/0"]
    assert read == data
    restore(workdir / "a", it.target)
    runs(world, it.target, runtime)
    assert False not in builds(runtime), "a write that was seen is no reason not to trust a driver"


def test_a_write_that_nobody_saw_is_found_and_the_driver_not_trusted_again(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = launch(SIMCUDA_UNSEEN="2")
    arrived = Arrived(monkeypatch, BY_THE_MIDDLE)
    result = asyncio.run(in_the_middle(world, it, workdir, arrived))
    twice = [number for piece in (1, 3) for number in range(piece * 8, piece * 8 + 8)]
    assert sorted(number for number, version in arrived.chunks if version) == twice
    assert any("16 chunks were written in a way" in note for note in result.facts.notes)
    holds_everything(stored(workdir), it)
    runs(world, it.target, runtime)
    assert builds(runtime) == [False]
    arrived.chunks.clear()
    result = save(it.pid, workdir, name="b", capture="launch")
    assert not any("while the driver worked" in note for note in result.facts.notes)
    assert len(arrived.chunks) == CHUNKS
    holds_everything(stored(workdir, "b"), it)
    runs(world, it.target, runtime)
    assert builds(runtime) == [False]


def test_a_driver_of_which_no_copy_is_seen_is_read_when_it_is_done(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path
) -> None:
    """Nothing is sent early, and nothing cleared for never having been written."""
    it = launch(SIMCUDA_UNSEEN="all")
    for name in ("a", "b"):
        result = save(it.pid, workdir, name=name, capture="launch", leave="checkpointed")
        assert not any("while the driver worked" in note for note in result.facts.notes)
        holds_everything(stored(workdir, name), it)
        restore(workdir / name, it.target)
        runs(world, it.target, runtime)
    assert builds(runtime) == []


def test_a_driver_is_compared_once(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = launch()
    compared: list[int] = []
    settled = LaunchedImageSource._settled_chunk

    async def counted(source: Any, image: GrowingImage, number: int, same_as: int | None = None) -> Any:
        compared.extend([number] if same_as is not None else [])
        return await settled(source, image, number, same_as)

    monkeypatch.setattr(LaunchedImageSource, "_settled_chunk", counted)
    arrived = Arrived(monkeypatch, CHUNKS)
    monkeypatch.setattr(LaunchedImageSource, "early_jobs", 2)
    for name in ("a", "b"):  # the image is whole, and the driver's call has not returned
        arrived.chunks.clear()
        arrived.enough = asyncio.Event()
        result = asyncio.run(in_the_middle(world, it, workdir, arrived, name=name, point="after"))
        assert again(result) == (CHUNKS, 0)
        assert sorted(compared) == list(range(CHUNKS)) and builds(runtime) == [True]
        runs(world, it.target, runtime)


def test_a_driver_that_fails_half_way(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = launch()
    arrived = Arrived(monkeypatch, 1)

    async def main() -> None:
        fault, task = await begun(world, it, workdir, arrived.enough, error="CUDA_ERROR_UNKNOWN")
        fault.release()
        with pytest.raises(ckptpipe.CkptpipeError, match="UNKNOWN"):
            await task

    asyncio.run(main())
    runs(world, it.target, runtime)
    assert images(workdir) == [] and outstanding() == 0 and leaked() == 0
    it.until(lambda pool: not pool.armed)
    save(it.pid, workdir, capture="launch")
    runs(world, it.target, runtime)


def test_a_store_that_stands_still_does_not_hold_up_the_driver(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = launch()

    async def main() -> None:
        go = asyncio.Event()

        async def stand_still() -> None:
            await go.wait()

        Arrived(monkeypatch, 5, stand_still)
        fault, task = await begun(world, it, workdir, point="after")
        assert world.process(it.pid).state == "CHECKPOINTED"
        (image,) = it.page.images()
        assert image.watermark == image.nbytes
        fault.release()
        go.set()
        await task

    asyncio.run(main())
    holds_everything(stored(workdir), it)
    runs(world, it.target, runtime)


@pytest.mark.parametrize("end", ["fails", "is cancelled"])
def test_a_save_that_ends_in_the_middle(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The driver's call cannot be called back: it ends, and its work is undone."""
    it = launch()

    async def main() -> None:
        async def fail() -> None:
            if end == "fails":
                raise StorageError("the disk is gone")

        arrived = Arrived(monkeypatch, 20, fail)
        fault, task = await begun(world, it, workdir, arrived.enough)
        if end == "fails":
            fault.release()
            with pytest.raises(StorageError, match="the disk is gone"):
                await task
        else:
            task.cancel()
            fault.release()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    runs(world, it.target, runtime)
    assert images(workdir) == [] and outstanding() == 0 and leaked() == 0


def test_a_target_that_dies_in_the_middle(
    world: SimWorld, launch: Launch, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = launch()

    async def main() -> None:
        arrived = Arrived(monkeypatch, 20)
        _, task = await begun(world, it, workdir, arrived.enough)
        it.target.kill()
        with pytest.raises(ckptpipe.TargetGone, match="ended"):
            await task

    asyncio.run(main())
    assert images(workdir) == [] and outstanding() == 0 and leaked() == 0


def test_a_saving_process_that_is_killed_in_the_middle(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path
) -> None:
    it = launch()
    fault = world.fault(CHECKPOINT, point="middle", hold=True, target=it.pid)
    command = [sys.executable, "-c", SAVE, str(it.pid), str(workdir), "running", "launch"]
    with subprocess.Popen(command, env=world.environment()) as saver:
        fault.wait()
        os.kill(saver.pid, signal.SIGKILL)
        saver.wait()
    fault.release()
    it.until(lambda _: world.process(it.pid).state == "CHECKPOINTED")
    it.until(lambda pool: not pool.armed)
    assert recover(it.target).actions == ["restored it from its own memory"]
    runs(world, it.target, runtime)
    save(it.pid, workdir, capture="launch", overwrite=True)
    runs(world, it.target, runtime)


def test_two_processes_with_late_writes(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path
) -> None:
    both = [launch(SIMCUDA_REWRITES="2"), launch(SIMCUDA_REWRITES="1")]
    pids = [it.pid for it in both]
    run(ckptpipe.save(processes=pids, to=workdir, name="a", capture="launch", settings=SETTINGS))
    run(ckptpipe.restore(str(workdir / "a"), to=workdir / "files"))
    for k, it in enumerate(both):
        data = (workdir / "files" / "proc" / str(k) / "driver" / "0").read_bytes()
        assert all(each in data for each in everything(it))
        runs(world, it.target, runtime)


def test_ten_cycles_with_changing_contents_and_late_writes(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path
) -> None:
    it = launch(SIMCUDA_REWRITES="4")
    for cycle in range(10):
        name, way = f"{cycle}", ("running", "checkpointed", "evict", "early")[cycle % 4]
        expected = everything(it)
        options: dict[str, Any] = {"compress": "zstd:1"} if cycle % 3 == 1 else {}
        if way in ("evict", "early"):
            save(it.pid, workdir, name=name, capture="launch", evict=True, **options)
        else:
            save(it.pid, workdir, name=name, capture="launch", leave=way, **options)
        if way != "running":
            restore(workdir / name, it.target, early_start=way == "early")
        runs(world, it.target, runtime)
        data = stored(workdir, name)
        assert all(each in data for each in expected)
        run(ckptpipe.delete(str(workdir / name)))
        (workdir / f"files-{name}" / "proc" / "0" / "driver" / "0").unlink()
        assert outstanding() == 0 and leaked() == 0
    assert False not in builds(runtime), "what lay below the watermark was always what it became"
    state = it.page.pool()
    assert (state.served, state.returned, state.fallbacks) == (10, 10, 0)


class Pool:
    """What of a pool a `GrowingImage` asks for."""

    def __init__(self) -> None:
        self.mark = 0
        self.counts = [0] * 8

    def watermark(self, image: PooledImage) -> int:
        return self.mark

    def finished(self, first: int, count: int) -> bytes:
        return bytes(self.counts[first : first + count])


def test_what_may_be_read_and_what_has_changed() -> None:
    pool = Pool()
    nbytes = 3 * PIECE + MIB
    state = ImageState(
        *(0, 7, "writing", "open", 0, PIECE, nbytes, 0, 0, 0, 0, 0, False, False, 0, 0, 0.0),
    )
    image = GrowingImage(pool, state, 0, MIB)  # type: ignore[arg-type]
    assert (image.chunks, list(image.ready())) == (7, [])
    pool.mark = PIECE + PIECE // 2  # in the middle of a piece, of which the next copy has the other half
    pool.counts[1:3] = [1, 1]
    assert list(image.ready()) == [0, 1]
    for number in (0, 1):
        image.note(number)
    pool.counts[2] = 2
    pool.mark = nbytes
    assert list(image.ready()) == [2, 3, 4, 5, 6], "the end of the image is no piece's"
    image.note(2)
    assert (image.changed(), image.early) == ([], 3)
    pool.counts[1] += 1
    assert image.changed() == [0, 1]
    assert [image.next_version(0), image.next_version(0), image.next_version(1)] == [1, 2, 1]
