"""Chunks of a launched process that nobody reads: the capture library's checksums, ranges of the pool, late writes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

import ckptpipe
from ckptpipe.pipeline.chunk import Chunk
from ckptpipe.pipeline.cuda.growing_image import GrowingImage
from ckptpipe.pipeline.cuda.launched_pool import PooledImage
from ckptpipe.pipeline.sources.launched_image import LaunchedImageSource, takes_changing
from ckptpipe.pipeline.spec import GraphSpec, SinkSpec, SourceSpec, StageSpec
from ckptpipe.pyx.checksum import crc32c
from ckptpipe.pyx.control_page import ImageState
from ckptpipe.pyx.staging import leaked, outstanding
from tests.pipeline.cuda.early import (
    BY_THE_MIDDLE,
    CHUNKS,
    Arrived,
    again,
    before_packing,
    begun,
    builds,
    in_the_middle,
)
from tests.pipeline.cuda.launched import Launch, holds_everything, launch, stored
from tests.pipeline.cuda.runs import KIB, SETTINGS, restore, runs, save
from tests.pipeline.runs import run
from tests.preload.launched import MIB, PIECE, Launched
from tests.simcuda import SimWorld

__all__ = ["launch"]


@pytest.fixture
def known_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is trusted."""

    class Trusted(dict[str, bool]):
        def get(self, key: str, default: bool | None = None) -> bool:  # type: ignore[override]
            return True

    monkeypatch.setattr("ckptpipe.pipeline.sources.launched_image.known_builds", Trusted)


def unread(result: ckptpipe.SaveResult) -> int:
    """Chunks that went out unread, as the result says."""
    notes = [note for note in result.facts.notes if "as they lie in the pool" in note]
    return int(notes[0].split(": ")[1].split()[0]) if notes else 0


def objects_are_what_the_manifest_says(workdir: Path) -> None:
    """The whole objects, with what no row refers to."""
    entries = run(ckptpipe.show(str(workdir / "a")))["objects"]
    assert entries
    for entry in entries:
        data = (workdir / "a" / entry["name"]).read_bytes()
        assert (len(data), f"{crc32c(data):08x}") == (entry["bytes"], entry["crc32c"])


def is_good_and_restored(world: SimWorld, it: Launched, workdir: Path, runtime: Path) -> None:
    """The image is right in every respect, and brings the checkpointed target back."""
    run(ckptpipe.verify(str(workdir / "a"), settings=SETTINGS))
    objects_are_what_the_manifest_says(workdir)
    holds_everything(stored(workdir), it)
    restore(workdir / "a", it.target)
    runs(world, it.target, runtime)
    assert outstanding() == 0 and leaked() == 0


@pytest.mark.usefixtures("known_driver")
@pytest.mark.parametrize("early", [True, False])
def test_a_known_driver_s_image_is_not_read(
    world: SimWorld,
    launch: Launch,
    workdir: Path,
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
    early: bool,
) -> None:
    async def nothing(*_: object) -> None:
        raise AssertionError("it was read")

    it = launch()
    monkeypatch.setattr(LaunchedImageSource, "_early_chunk", nothing)
    monkeypatch.setattr(LaunchedImageSource, "_settled_chunk", nothing)
    monkeypatch.setattr(LaunchedImageSource, "early", early)
    arrived = Arrived(monkeypatch, BY_THE_MIDDLE if early else 0)
    if not early:
        arrived.enough.set()
    result = asyncio.run(in_the_middle(world, it, workdir, arrived, leave="checkpointed"))
    assert unread(result) == CHUNKS
    monkeypatch.undo()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime.parent))
    is_good_and_restored(world, it, workdir, runtime)


@pytest.mark.parametrize("known", [True, False])
def test_a_late_write_while_the_chunk_is_on_its_way(
    world: SimWorld,
    launch: Launch,
    workdir: Path,
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    known: bool,
) -> None:
    """The store gets bytes that are not those of the row: that row goes, and the object's checksum is right."""
    if known:
        request.getfixturevalue("known_driver")
    it = launch(SIMCUDA_REWRITES="3")
    returned, first = asyncio.Event(), asyncio.Event()
    changed = GrowingImage.changed
    torn: list[int] = []

    def noted(image: GrowingImage) -> list[int]:
        returned.set()
        return changed(image)

    async def held(chunk: Chunk) -> None:
        first.set()
        await returned.wait()
        if chunk.unsettled and chunk.lease is not None:
            with memoryview(chunk.lease) as data:
                torn.extend([chunk.number] if crc32c(data[: chunk.raw_bytes]) != chunk.raw_crc32c else [])

    monkeypatch.setattr(GrowingImage, "changed", noted)
    before_packing(monkeypatch, held)

    async def main() -> ckptpipe.SaveResult:
        fault, task = await begun(world, it, workdir, first, leave="checkpointed")
        fault.release()
        return await task

    result = asyncio.run(main())
    assert torn and set(torn) <= {number for piece in (0, 2, 4) for number in range(piece * 8, piece * 8 + 8)}
    assert again(result)[1] >= len(torn)
    is_good_and_restored(world, it, workdir, runtime)


@pytest.mark.usefixtures("known_driver")
def test_memory_that_fails_before_it_is_stored_is_found_by_verify(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save does not see it, and the process, which is restored from the same memory, is not what it was."""
    it = launch()
    flipped: list[int] = []

    async def flip(chunk: Chunk) -> None:
        if chunk.lease is not None and not flipped:
            (image,) = it.page.images()
            at = image.offset + chunk.number * 256 * KIB + 777
            (byte,) = os.pread(it.attach_pool(), 1, at)
            os.pwrite(it.attach_pool(), bytes([byte ^ 4]), at)
            flipped.append(chunk.number)

    before_packing(monkeypatch, flip)
    save(it.pid, workdir, capture="launch", leave="checkpointed")
    assert len(flipped) == 1
    with pytest.raises(ckptpipe.CkptpipeError, match=f"chunk {flipped[0]}\\b"):
        run(ckptpipe.verify(str(workdir / "a"), settings=SETTINGS))


def test_a_bit_that_flips_under_an_unknown_driver_is_found_by_the_save(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a write that nobody saw: nothing can tell them apart."""
    it = launch(SIMCUDA_UNSEEN="2")
    arrived = Arrived(monkeypatch, BY_THE_MIDDLE)
    result = asyncio.run(in_the_middle(world, it, workdir, arrived))
    assert builds(runtime) == [False] and unread(result)
    objects_are_what_the_manifest_says(workdir)
    run(ckptpipe.verify(str(workdir / "a"), settings=SETTINGS))


@pytest.mark.usefixtures("known_driver")
@pytest.mark.parametrize("to", ["memory:unread-chunks", "zstd"])
def test_a_store_that_looks_gets_copies_while_the_driver_works(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    it = launch(SIMCUDA_REWRITES="3")
    unsettled: list[int] = []

    async def noted(chunk: Chunk) -> None:
        unsettled.extend([chunk.number] if chunk.unsettled else [])

    before_packing(monkeypatch, noted)
    arrived = Arrived(monkeypatch, BY_THE_MIDDLE)
    options: dict[str, Any] = {"compress": "zstd:1"} if to == "zstd" else {}
    place = workdir if to == "zstd" else to
    asyncio.run(in_the_middle(world, it, place, arrived, **options))
    assert not unsettled
    run(ckptpipe.verify(f"{place}/a", settings=SETTINGS))
    runs(world, it.target, runtime)
    run(ckptpipe.delete(f"{place}/a"))


class Pool:
    """What of a pool is asked for a chunk that is not read."""

    def finished(self, first: int, count: int) -> bytes:
        return bytes(4 * count)

    def summed(self, image: PooledImage, start: int, nbytes: int) -> tuple[int, bool]:
        return crc32c(bytes(nbytes)), start == 0

    def lend(self, offset: int, nbytes: int) -> None:
        raise AssertionError("it is read")


def test_zeros_are_not_stored_and_what_ends_within_a_page_is_copied() -> None:
    state = ImageState(
        *(0, 7, "writing", "open", 0, PIECE, MIB + 5, 0, 0, 0, 0, 0, False, False, 0, 0, 0.0),
    )
    image = GrowingImage(Pool(), state, 0, MIB)  # type: ignore[arg-type]
    source = LaunchedImageSource.__new__(LaunchedImageSource)
    chunk = source._unread_chunk(image, 0)
    assert chunk is not None and chunk.zero and chunk.raw_crc32c == crc32c(bytes(MIB))
    assert image.sums == {0: chunk.raw_crc32c}
    assert source._unread_chunk(image, 1) is None
    assert (image.early, image.unread) == (1, 1)


def test_which_stores_take_bytes_that_change(tmp_path: Path) -> None:
    source = SourceSpec("process", {"pids": [1]})
    folder, s3 = SinkSpec(str(tmp_path)), SinkSpec("s3://bucket/prefix")
    limit, compress = StageSpec("slow", "limit"), StageSpec("small", "compress")
    assert takes_changing(GraphSpec(source, (folder, SinkSpec("null:")), (limit,)))
    for sinks, stages in (((folder, s3), ()), ((SinkSpec("memory:x"),), ()), ((folder,), (compress,))):
        assert not takes_changing(GraphSpec(source, sinks, stages))
