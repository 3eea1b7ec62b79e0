"""Restores that a GPU decodes, of images that lie or are damaged, and with a decoder that fails or is cancelled."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptpipe
from tests.pipeline.cuda import damage
from tests.pipeline.cuda.codec_runs import (
    CONTENTS,
    KIB,
    MIB,
    SETTINGS,
    Buffers,
    buffers,
    engine_buffers,
    restore,
    save,
    to_files,
    with_settings,
)
from tests.pipeline.cuda.device_arrays import Memory
from tests.pipeline.runs import memory_dir, run
from tests.simcuda import SimWorld

__all__ = ["buffers", "engine_buffers", "memory_dir"]


INTO = ("device", "files")


def attempt(into: str, image: Path, buffers: Buffers, **options: object) -> object:
    if into == "device":
        return restore(image, buffers, **options)
    folder = image.parent / "files"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        return to_files(image, folder, **options)
    finally:
        assert not folder.exists() or not list(folder.rglob("bf16"))


@pytest.mark.parametrize("into", INTO)
@pytest.mark.parametrize("codec", ["deflate:0", "ans:u8"])
@pytest.mark.parametrize("kind", ["raw chunk", "raw plane", "coded plane", "first byte", "last byte"])
def test_a_flipped_bit_never_reaches_a_decoder(
    buffers: Buffers, workdir: Path, codec: str, kind: str, into: str
) -> None:
    save(buffers, workdir, codec, transform="planes2")
    image = workdir / "a"
    row = damage.coded(image, 2)
    if kind == "raw chunk":
        row = next(each for each in damage.rows(image) if not each.planes and not each.zero)
    at = {
        "raw chunk": row.raw_bytes // 2,
        "raw plane": 100,
        "coded plane": row.planes[0].stored_bytes + 100 if row.planes else 0,
        "first byte": 0,
        "last byte": row.stored_bytes - 1,
    }[kind]
    damage.flip_stored(image, row, at)
    with pytest.raises(ckptpipe.ImageCorrupt, match=r"stored bytes have the checksum") as failed:
        attempt(into, image, buffers, decompress_backend="nvcomp-cuda")
    assert damage.where(image, row) in str(failed.value)


@pytest.mark.parametrize("backend", ["decompression-engine", "nvcomp-cuda"])
def test_no_decoder_has_seen_bytes_of_another_checksum(
    engine_buffers: tuple[SimWorld, Buffers], workdir: Path, backend: str
) -> None:
    world, buffers = engine_buffers
    buffers.memory = {"text": buffers.memory["text"]}
    save(buffers, workdir, "deflate:1", settings=with_settings(chunk_bytes=MIB, ring_bytes=16 * MIB))
    (row,) = damage.rows(workdir / "a")
    damage.flip_stored(workdir / "a", row, row.stored_bytes // 2)
    buffers.clear()
    with pytest.raises(
        ckptpipe.ImageCorrupt, match=r"stream device/text chunk 0 .*stored bytes have the checksum"
    ):
        restore(workdir / "a", buffers, decompress_backend=backend)
    assert world.calls("cuMemBatchDecompressAsync") == world.calls("nvcompBatchedDeflateDecompressAsync") == 0
    buffers.untouched()


@pytest.mark.parametrize("into", INTO)
@pytest.mark.parametrize(
    ("codec", "lie"),
    [
        *(("deflate:1", lie) for lie in damage.LIES),
        *(("ans:u8", lie) for lie in damage.LIES[2:]),  # it has one block in a chunk of this size
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_lying_index_names_stream_and_chunk(
    buffers: Buffers, workdir: Path, codec: str, lie: Callable[..., object], into: str
) -> None:
    save(buffers, workdir, codec, transform="none", settings=with_settings(chunk_bytes=256 * KIB))
    image = workdir / "a"
    row = next(each for each in damage.rows(image) if each.planes)
    damage.relabel(image, lambda each: lie(each) if each == row else each)  # type: ignore[arg-type,return-value]
    with pytest.raises(ckptpipe.ImageCorrupt) as failed:
        attempt(into, image, buffers, decompress_backend="nvcomp-cuda")
    assert damage.where(image, row) in str(failed.value)
    assert "restore from another copy" in failed.value.cure


@pytest.mark.parametrize("lie", damage.LIES[:2], ids=lambda lie: lie.__name__)
def test_a_lying_index_on_the_cpu(buffers: Buffers, workdir: Path, lie: Callable[..., object]) -> None:
    save(buffers, workdir, "deflate:1", transform="none")
    image = workdir / "a"
    row = damage.coded(image)
    damage.relabel(image, lambda each: lie(each) if each == row else each)  # type: ignore[arg-type,return-value]
    with pytest.raises(ckptpipe.ImageCorrupt) as failed:
        restore(image, buffers, decompress_backend="cpu")
    assert damage.where(image, row) in str(failed.value)


@pytest.mark.parametrize("lie", damage.LIES[:2], ids=lambda lie: lie.__name__)
def test_a_lying_index_that_makes_the_engine_fault(
    make_world: Callable[..., SimWorld], workdir: Path, lie: Callable[..., object]
) -> None:
    """An engine that is given what is no stream takes the context with it: the error says which chunk that was."""
    make_world(gpus=1, decompression=(7, 4 * MIB))
    buffers = Buffers(lambda ordinal, data: Memory(0, data), {"text": CONTENTS["text"][: 100 * KIB]})
    save(buffers, workdir, "deflate:1", transform="none")
    image = workdir / "a"
    row = damage.coded(image)
    damage.relabel(image, lie)  # type: ignore[arg-type]
    with pytest.raises(ckptpipe.CkptpipeError, match=r"LAUNCH_FAILED") as failed:
        restore(image, buffers, decompress_backend="decompression-engine")
    assert damage.where(image, row) in str(failed.value)


@pytest.mark.parametrize(
    "name", ["nvcompBatchedDeflateDecompressAsync", "cuLaunchKernel", "cuMemcpyHtoDAsync", "cuEventRecord"]
)
def test_a_decoder_that_fails_is_no_damage_of_the_image(
    world: SimWorld, buffers: Buffers, workdir: Path, name: str
) -> None:
    save(buffers, workdir, "deflate:1")
    buffers.clear()
    error = "nvcompErrorInternal" if name.startswith("nvcomp") else "CUDA_ERROR_UNKNOWN"
    world.fault(name, pid=os.getpid(), nth=2, error=error)
    with pytest.raises(ckptpipe.CkptpipeError) as failed:
        restore(workdir / "a", buffers)
    assert not isinstance(failed.value, ckptpipe.ImageCorrupt)
    restore(workdir / "a", buffers)
    buffers.check()


@pytest.mark.parametrize("into", INTO)
def test_cancelled_while_it_decodes(world: SimWorld, buffers: Buffers, workdir: Path, into: str) -> None:
    save(buffers, workdir, "ans:u8")
    hold = world.fault("nvcompBatchedANSDecompressAsync", pid=os.getpid(), nth=2, hold=True)

    async def main() -> None:
        options = {"device_buffers": buffers.arrays} if into == "device" else {"to": workdir / "files"}
        restoring = asyncio.ensure_future(
            ckptpipe.restore(str(workdir / "a"), settings=SETTINGS, **options)  # type: ignore[arg-type]
        )
        await asyncio.to_thread(hold.wait)
        restoring.cancel()
        await asyncio.sleep(0)
        hold.release()
        with pytest.raises(asyncio.CancelledError):
            await restoring

    used = [world.used(gpu) for gpu in range(2)]
    run(main())
    assert [world.used(gpu) for gpu in range(2)] == used
    assert not (workdir / "files").exists() or not list((workdir / "files").rglob("bf16"))
