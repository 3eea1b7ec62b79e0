"""Restores that a GPU decodes: who runs and who is refused, bad bytes and lying tables, what is left behind."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.cuda import host_decoder
from tests.pipeline.cuda import damage
from tests.pipeline.cuda.codec_runs import (
    CONTENTS,
    ENGINE,
    GPU,
    KIB,
    MIB,
    NOWHERE,
    SETTINGS,
    Allocate,
    Buffers,
    allocate,
    check_files,
    restore,
    save,
    to_files,
    with_settings,
)
from tests.pipeline.cuda.device_arrays import Memory
from tests.pipeline.runs import memory_dir, run
from tests.simcuda import SimWorld
from tests.simcuda.driver import call, driver

__all__ = ["allocate", "memory_dir"]
Fail = Callable[[], object]


@pytest.fixture
def buffers(allocate: Allocate) -> Buffers:
    return Buffers(allocate, CONTENTS)


@pytest.fixture
def engine_buffers(make_world: Callable[..., SimWorld]) -> Iterator[tuple[SimWorld, Buffers]]:
    """On a machine whose GPUs have the decompression engine."""
    world = make_world(gpus=2, decompression=(7, 4 * MIB))
    held: list[Memory] = []

    def make(ordinal: int, data: bytes) -> Memory:
        held.append(Memory(ordinal, data))
        return held[-1]

    yield world, Buffers(make, CONTENTS)
    for memory in held:
        memory.free()


def refused(fail: Fail, *words: str, kind: type[ckptpipe.CkptpipeError] = ckptpipe.UsageError) -> None:
    with pytest.raises(kind) as failed:
        fail()
    for word in words:
        assert word in str(failed.value) + failed.value.cure, word


# -- who decodes -----------------------------------------------------------------------------------------------


def test_the_engine_comes_first_then_nvcomp_then_the_cpu(
    engine_buffers: tuple[SimWorld, Buffers], workdir: Path
) -> None:
    world, buffers = engine_buffers
    for codec, expected in (("deflate:1", ENGINE), ("ans:u8", GPU), ("zstd:1", "cpu"), ("none", "")):
        save(buffers, workdir, codec, overwrite=True)
        buffers.clear()
        result = restore(workdir / "a", buffers)
        buffers.check()
        assert result.codec_backend == expected, codec
    assert world.calls("cuMemBatchDecompressAsync") > 0


def test_each_that_can_be_forced_runs_alone(engine_buffers: tuple[SimWorld, Buffers], workdir: Path) -> None:
    world, buffers = engine_buffers
    save(buffers, workdir, "deflate:1")
    for backend, expected in (("nvcomp-cuda", GPU), ("cpu", "cpu"), ("decompression-engine", ENGINE)):
        before = world.calls("cuMemBatchDecompressAsync")
        buffers.clear()
        result = restore(workdir / "a", buffers, decompress_backend=backend)
        buffers.check()
        assert result.codec_backend == expected
        assert (world.calls("cuMemBatchDecompressAsync") > before) == (expected == ENGINE)


def test_several_that_ran_are_named_with_their_chunks(
    engine_buffers: tuple[SimWorld, Buffers], workdir: Path
) -> None:
    world, buffers = engine_buffers
    save(buffers, workdir, "deflate:1", transform="none")
    chunks = sum(bool(row.planes) for row in damage.rows(workdir / "a"))
    world.attribute(1, 136, 0)  # the second GPU has no engine after all
    buffers.clear()
    result = restore(workdir / "a", buffers)
    buffers.check()
    parts = dict(part.split(": ") for part in result.codec_backend.split(", "))
    assert set(parts) == {ENGINE, GPU}
    assert sum(int(part.split()[0]) for part in parts.values()) == chunks


def test_what_was_forced_and_cannot_run_is_an_error_before_anything_is_touched(
    buffers: Buffers, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(buffers, workdir, "deflate:1")
    save(buffers, workdir, "ans:u8", name="ans")
    save(buffers, workdir, "none", name="raw")
    buffers.clear()
    to = workdir / "files"
    for name in ("a", "raw"):
        for fail in (
            lambda name=name: restore(workdir / name, buffers, decompress_backend="decompression-engine"),
            lambda name=name: to_files(workdir / name, to, decompress_backend="decompression-engine"),
        ):
            refused(fail, "decompression engine", kind=ckptpipe.CkptpipeError)
    for fail in (
        lambda: restore(workdir / "ans", buffers, decompress_backend="cpu"),
        lambda: to_files(workdir / "ans", to, decompress_backend="cpu"),
    ):
        refused(fail, "chunk 0 is coded with ans", "ckptpipe[gpu]", kind=ckptpipe.UnsupportedImage)
    refused(lambda: restore(workdir / "a", buffers, decompress_backend="fpga"), "fpga", "nvcomp-cuda")
    monkeypatch.setenv("CKPTPIPE_NVCOMP", NOWHERE)
    for name in ("a", "ans", "raw"):
        for fail in (
            lambda name=name: restore(workdir / name, buffers, decompress_backend="nvcomp-cuda"),
            lambda name=name: to_files(workdir / name, to, decompress_backend="nvcomp-cuda"),
        ):
            refused(fail, NOWHERE, kind=ckptpipe.CkptpipeError)
    fail = lambda: restore(workdir / "a", buffers, decompress_backend="decompression-engine")  # noqa: E731
    refused(fail, "decompression engine", kind=ckptpipe.CkptpipeError)
    buffers.untouched()
    assert not to.exists()


def test_the_engine_that_is_forced_must_take_every_codec_and_block(
    engine_buffers: tuple[SimWorld, Buffers], workdir: Path
) -> None:
    world, buffers = engine_buffers
    save(buffers, workdir, "ans:u8", name="ans")
    save(buffers, workdir, "deflate:1")
    buffers.clear()
    refused(
        lambda: restore(workdir / "ans", buffers, decompress_backend="decompression-engine"),
        "chunk 0 is coded with ans",
        "does not decode here",
    )
    for gpu in range(2):
        world.attribute(gpu, 137, 32 * KIB)
    refused(
        lambda: restore(workdir / "a", buffers, decompress_backend="decompression-engine"),
        "blocks of 65536 bytes",
        "32768",
    )
    buffers.untouched()
    result = restore(workdir / "a", buffers)
    buffers.check()
    assert GPU in result.codec_backend, "nvCOMP takes what is too long for the engine"


def test_a_destination_that_the_engine_cannot_write(
    make_world: Callable[..., SimWorld], workdir: Path
) -> None:
    """Memory of a pool: decoded beside it, and copied on the device."""
    make_world(gpus=1, decompression=(7, 4 * MIB))
    memory = Memory(0, CONTENTS["bf16"])
    call(driver.cuCtxSetCurrent(memory.context))
    own = memory.address
    memory.address = int(call(driver.cuMemAllocAsync(memory.nbytes, 0)))
    capable = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE
    assert not call(driver.cuPointerGetAttribute(capable, memory.address))
    buffers = Buffers(lambda ordinal, data: memory, {"x": CONTENTS["bf16"]})
    try:
        memory.write(CONTENTS["bf16"])
        save(buffers, workdir, "deflate:1", transform="none")
        buffers.clear()
        result = restore(workdir / "a", buffers, decompress_backend="decompression-engine")
        buffers.check()
        assert result.codec_backend == ENGINE
    finally:
        call(driver.cuCtxSetCurrent(memory.context))
        call(driver.cuMemFreeAsync(memory.address, 0))
        call(driver.cuCtxSynchronize())
        memory.address = own
        memory.free()


# -- without nvCOMP, without a GPU -----------------------------------------------------------------------------


def test_without_nvcomp_the_cpu_decodes_deflate_and_says_so(
    buffers: Buffers, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(buffers, workdir, "deflate:1")
    save(buffers, workdir, "ans:u8", name="ans")
    monkeypatch.setenv("CKPTPIPE_NVCOMP", NOWHERE)
    buffers.clear()
    result = restore(workdir / "a", buffers)
    buffers.check()
    assert result.codec_backend == "cpu"
    assert any(note.startswith("the CPU decodes: ") and NOWHERE in note for note in result.facts.notes)
    buffers.clear()
    refused(
        lambda: restore(workdir / "ans", buffers),
        "stream device/bf16 chunk 0 is coded with ans",
        NOWHERE,
        "ckptpipe[gpu]",
        kind=ckptpipe.UnsupportedImage,
    )
    buffers.untouched()


def test_without_nvcomp_the_engine_still_decodes_deflate(
    engine_buffers: tuple[SimWorld, Buffers], workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, buffers = engine_buffers
    save(buffers, workdir, "deflate:1")
    monkeypatch.setenv("CKPTPIPE_NVCOMP", NOWHERE)
    buffers.clear()
    assert restore(workdir / "a", buffers).codec_backend == ENGINE
    buffers.check()


def test_no_room_for_scratch(world: SimWorld, buffers: Buffers, workdir: Path) -> None:
    save(buffers, workdir, "deflate:1")
    save(buffers, workdir, "ans:u8", name="ans")
    buffers.clear()
    used = [world.used(gpu) for gpu in range(2)]
    large = with_settings(gpu_scratch_bytes=2 << 30)
    refused(
        lambda: restore(workdir / "ans", buffers, settings=large),
        "OUT_OF_MEMORY",
        kind=ckptpipe.UnsupportedImage,
    )
    refused(
        lambda: restore(workdir / "a", buffers, settings=large, decompress_backend="nvcomp-cuda"),
        "OUT_OF_MEMORY",
        "--gpu-scratch",
        kind=ckptpipe.CkptpipeError,
    )
    buffers.untouched()
    result = restore(workdir / "a", buffers, settings=large)
    buffers.check()
    assert result.codec_backend == "cpu" and any("OUT_OF_MEMORY" in note for note in result.facts.notes)
    assert [world.used(gpu) for gpu in range(2)] == used


# -- into files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["ans:u8", "ans:f16", "ans:fp8"])
def test_what_only_a_gpu_decodes_goes_into_files_through_it(
    world: SimWorld, buffers: Buffers, workdir: Path, codec: str
) -> None:
    save(buffers, workdir, codec)
    used = [world.used(gpu) for gpu in range(2)]
    result = to_files(workdir / "a", workdir / "files")
    check_files(workdir / "files", CONTENTS)
    assert result.codec_backend == GPU and result.facts.gpu_scratch_bytes == SETTINGS.gpu_scratch_bytes
    checked = run(ckptpipe.verify(str(workdir / "a"), settings=SETTINGS))
    assert checked.codec_backend == GPU and checked.chunks == result.chunks
    host = {name: bytearray(len(data)) for name, data in CONTENTS.items() if name in ("bf16", "noise")}
    run(ckptpipe.restore(str(workdir / "a"), buffers=host, settings=SETTINGS))
    assert host == {name: CONTENTS[name] for name in host}
    assert [world.used(gpu) for gpu in range(2)] == used


def test_streams_that_need_no_gpu_come_without_one(
    allocate: Allocate, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = Buffers(allocate, {"noise": CONTENTS["noise"], "bf16": CONTENTS["bf16"]})
    save(buffers, workdir, "ans:f16")
    monkeypatch.setenv("CKPTPIPE_NVCOMP", NOWHERE)
    host = {"noise": bytearray(len(CONTENTS["noise"]))}
    run(ckptpipe.restore(str(workdir / "a"), buffers=host, settings=SETTINGS))
    assert host["noise"] == CONTENTS["noise"]
    refused(
        lambda: to_files(workdir / "a", workdir / "files"),
        "stream device/bf16 chunk 0 is coded with ans",
        kind=ckptpipe.UnsupportedImage,
    )
    checked = run(ckptpipe.verify(str(workdir / "a"), settings=SETTINGS))
    assert checked.chunks_not_decoded == 3 and checked.codec_backend == ""
    refused(
        lambda: run(ckptpipe.verify(str(workdir / "a"), settings=SETTINGS, decompress_backend="cpu")),
        "ans",
        kind=ckptpipe.UnsupportedImage,
    )
    assert not (workdir / "files").exists()


@pytest.mark.parametrize("backend", ["nvcomp-cuda", "decompression-engine", "auto"])
def test_files_by_what_is_asked_for(
    engine_buffers: tuple[SimWorld, Buffers], workdir: Path, backend: str
) -> None:
    _, buffers = engine_buffers
    save(buffers, workdir, "deflate:1")
    result = to_files(workdir / "a", workdir / "files", decompress_backend=backend)
    check_files(workdir / "files", CONTENTS)
    assert (
        result.codec_backend == {"nvcomp-cuda": GPU, "decompression-engine": ENGINE, "auto": "cpu"}[backend]
    )


def test_more_chunks_than_places(buffers: Buffers, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_decoder, "PLACES", 1)
    save(buffers, workdir, "ans:u8", settings=with_settings(chunk_bytes=16 * KIB))
    to_files(workdir / "a", workdir / "files")
    check_files(workdir / "files", CONTENTS)


def test_a_copy_keeps_or_changes_the_codec(buffers: Buffers, workdir: Path) -> None:
    save(buffers, workdir, "ans:u8")
    kept = run(ckptpipe.copy(str(workdir / "a"), to=workdir / "kept", settings=SETTINGS))
    assert kept.sinks[0].codec_backend == ""
    made = run(ckptpipe.copy(str(workdir / "a"), to=workdir / "anew", compress="zstd:1", settings=SETTINGS))
    assert made.sinks[0].codec_backend == "cpu"
    for place in ("kept", "anew"):
        buffers.clear()
        restore(workdir / place / "a", buffers)
        buffers.check()


# -- bad bytes -------------------------------------------------------------------------------------------------

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
