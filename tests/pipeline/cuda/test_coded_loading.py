"""Coded chunks of local files: loaded beside their destination and decoded there, with the errors of any restore."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.cuda import codec_device
from ckptpipe.pyx import cuda
from tests.fixtures.gpu_contents import bf16_weights
from tests.pipeline.cuda import damage
from tests.pipeline.cuda.codec_runs import GPU, KIB, SETTINGS, Buffers, restore, save
from tests.pipeline.cuda.device_arrays import Allocate
from tests.pipeline.cuda.runs import cancelled_while_the_gpu_fetches
from tests.pipeline.runs import memory_dir, run
from tests.simcuda import SimWorld

__all__ = ["memory_dir"]
CHUNK = SETTINGS.chunk_bytes


@pytest.fixture
def weights(allocate: Allocate, workdir: Path) -> Iterator[Buffers]:
    """Nine chunks, all of them coded, at ``workdir``; the buffers are cleared."""
    buffers = Buffers(lambda _, data: allocate(0, data), {"w": bf16_weights(9 * CHUNK)})
    save(buffers, workdir, "ans:f16")
    assert all(row.planes for row in damage.rows(workdir / "a"))
    buffers.clear()
    yield buffers
    assert cuda.pinned_bytes() == 0


def largest(image: Path) -> Path:
    return max(image.glob("data-*"), key=lambda path: path.stat().st_size)


async def meanwhile(world: SimWorld, image: Path, buffers: Buffers, act: Callable[[], object]) -> None:
    """A restore with something done when the image is open and checked, and no byte of it is read."""
    held = world.fault("cuDevicePrimaryCtxRetain", pid=os.getpid(), hold=True)
    work = ckptpipe.restore(str(image), device_buffers=buffers.arrays, settings=SETTINGS)
    task = asyncio.ensure_future(work)
    try:
        await asyncio.to_thread(held.wait)
        act()
    finally:
        held.release()
        held.cancel()
    await task


def test_stored_bytes_cross_the_link_and_nothing_else(
    world: SimWorld, weights: Buffers, workdir: Path
) -> None:
    moved, decodes = world.moved(0)[1], world.calls("nvcompBatchedANSDecompressAsync")
    result = restore(workdir / "a", weights)
    weights.check()
    assert result.codec_backend == GPU
    assert result.facts.ring_bytes == 0
    assert world.calls("nvcompBatchedANSDecompressAsync") > decodes
    tables = world.moved(0)[1] - moved - result.stored_bytes
    assert 0 <= tables < 9 * 4 * KIB, "what tells the decoder where its blocks are"


@pytest.mark.parametrize("why", ["a codec of the CPU's", "no room for what is loaded"])
def test_a_ring_is_made_for_what_goes_through_one(
    allocate: Allocate, workdir: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    buffers = Buffers(lambda _, data: allocate(0, data), {"w": bf16_weights(9 * CHUNK)})
    save(buffers, workdir, "zstd:1" if "codec" in why else "deflate:1")
    if "room" in why:
        monkeypatch.setattr(codec_device, "PLACES_MAX", 0)
    buffers.clear()
    result = restore(workdir / "a", buffers)
    buffers.check()
    assert result.facts.ring_bytes > 0
    assert result.codec_backend == ("cpu" if "codec" in why else GPU)
    assert cuda.pinned_bytes() == 0


def test_bad_bytes_are_seen_before_they_are_decoded(world: SimWorld, weights: Buffers, workdir: Path) -> None:
    rows = damage.rows(workdir / "a")
    damage.flip_stored(workdir / "a", rows[4], rows[4].stored_bytes // 2)
    with pytest.raises(ckptpipe.ImageCorrupt, match="stored bytes have the checksum") as caught:
        restore(workdir / "a", weights)
    assert damage.where(workdir / "a", rows[4]) in str(caught.value)
    damage.flip_stored(workdir / "a", rows[4], rows[4].stored_bytes // 2)
    restore(workdir / "a", weights)
    weights.check()


def test_a_file_that_was_cut_off_meanwhile(world: SimWorld, weights: Buffers, workdir: Path) -> None:
    stored = largest(workdir / "a")

    def cut() -> None:
        os.truncate(stored, stored.stat().st_size - CHUNK // 2)

    words = r"stream device/w chunk \d+ \(data-.* cannot be read: .*ends at byte \d+, \d+ were to be read"
    used = world.used(0)
    with pytest.raises(ckptpipe.ImageIncomplete, match=words) as caught:
        run(meanwhile(world, workdir / "a", weights, cut))
    assert str(stored) in str(caught.value)
    assert world.used(0) == used


def test_an_image_that_was_deleted_meanwhile_is_no_damage(
    world: SimWorld, weights: Buffers, workdir: Path
) -> None:
    def delete() -> None:
        (workdir / "a" / "manifest.json").unlink()
        for path in (workdir / "a").glob("data-*"):
            os.truncate(path, 0)

    with pytest.raises(ckptpipe.CkptpipeError, match="was deleted while it was read"):
        run(meanwhile(world, workdir / "a", weights, delete))


def test_cancelled_while_the_gpu_still_fetches(world: SimWorld, weights: Buffers, workdir: Path) -> None:
    used = world.used(0)

    async def main() -> None:
        work = ckptpipe.restore(str(workdir / "a"), device_buffers=weights.arrays, settings=SETTINGS)
        await cancelled_while_the_gpu_fetches(world, work)

    run(main())
    assert world.used(0) == used
    restore(workdir / "a", weights)
    weights.check()


@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync", "cuEventRecord", "cuEventQuery"])
def test_a_driver_that_refuses_is_no_damage_of_the_image(
    world: SimWorld, weights: Buffers, workdir: Path, call: str
) -> None:
    fault = world.fault(call, pid=os.getpid(), nth=3, error="CUDA_ERROR_UNKNOWN")
    with pytest.raises(ckptpipe.CkptpipeError, match=f"{call}: CUDA_ERROR_UNKNOWN") as caught:
        restore(workdir / "a", weights)
    assert not isinstance(caught.value, ckptpipe.ImageCorrupt)
    assert fault.fired == 1
    fault.cancel()
    restore(workdir / "a", weights)
    weights.check()
