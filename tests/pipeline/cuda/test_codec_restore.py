"""Restores that a GPU decodes: who runs and who is refused, bad bytes and lying tables, what is left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.chunk import Chunk
from ckptpipe.pipeline.cuda import codec_device, host_decoder, loading
from ckptpipe.pipeline.sinks import device as device_sink
from tests.pipeline.cuda import damage
from tests.pipeline.cuda.codec_runs import (
    CONTENTS,
    ENGINE,
    GPU,
    KIB,
    MIB,
    NOWHERE,
    SETTINGS,
    Buffers,
    buffers,
    check_files,
    engine_buffers,
    restore,
    save,
    to_files,
    with_settings,
)
from tests.pipeline.cuda.device_arrays import Allocate, Memory
from tests.pipeline.runs import memory_dir, run
from tests.simcuda import SimWorld
from tests.simcuda.driver import call, driver

__all__ = ["buffers", "engine_buffers", "memory_dir"]
Fail = Callable[[], object]


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


@pytest.mark.parametrize("loads", [True, False])
def test_stored_bytes_are_loaded_beside_the_destination_or_go_through_the_ring(
    buffers: Buffers, workdir: Path, monkeypatch: pytest.MonkeyPatch, loads: bool
) -> None:
    """The first where the image lies in local files and scratch has room for what waits to be decoded."""
    save(buffers, workdir, "ans:u8")
    loaded: list[bool] = []

    def counted(image: object, chunk: Chunk, *where: object) -> object:
        loaded.append(bool(chunk.planes))
        return loading.load(image, chunk, *where)  # type: ignore[arg-type]

    monkeypatch.setattr(device_sink, "load", counted)
    if not loads:
        monkeypatch.setattr(codec_device, "PLACES_MAX", 0)
    buffers.clear()
    result = restore(workdir / "a", buffers)
    buffers.check()
    assert result.codec_backend == GPU and result.facts.gpu_scratch_bytes == SETTINGS.gpu_scratch_bytes
    assert any(loaded) == loads and not all(loaded), "noise is loaded as it is"


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
