"""Saves that are compressed before they leave the GPU: what ran, what is stored, and what is refused before that."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline import graph_run
from ckptpipe.pipeline.context import graph_context
from ckptpipe.pipeline.cuda import coding
from ckptpipe.pipeline.cuda.buffers import DeviceBuffers
from ckptpipe.pipeline.cuda.device_array import device_array
from ckptpipe.pipeline.cuda.driver import CudaDriver
from ckptpipe.pipeline.cuda.links import Links
from ckptpipe.pipeline.sources.device import DeviceSource
from ckptpipe.pipeline.spec import GraphSpec, SinkSpec, SourceSpec, StageSpec
from ckptpipe.pyx.cuda import CudaError
from tests.pipeline.cuda import damage
from tests.pipeline.cuda.codec_runs import (
    CONTENTS,
    GPU,
    MIB,
    NOWHERE,
    SETTINGS,
    Buffers,
    buffers,
    check_files,
    restore,
    save,
    to_files,
    with_settings,
)
from tests.pipeline.cuda.device_arrays import Allocate, Memory
from tests.pipeline.image.second_reader import read_image
from tests.pipeline.runs import memory_dir, run
from tests.simcuda import SimWorld

__all__ = ["buffers", "memory_dir"]


@pytest.mark.parametrize("compress", ["deflate:0", "deflate:1", "deflate:5", "ans:u8", "ans:f16", "ans:fp8"])
def test_there_and_back(buffers: Buffers, workdir: Path, compress: str) -> None:
    result = save(buffers, workdir, compress)
    (sink,) = result.sinks
    assert (sink.codec, sink.codec_backend) == (compress, GPU)
    assert sink.chunks_compressed >= 6 and sink.chunks_raw >= 2, "noise and single bytes stay as they are"
    assert result.facts.gpu_scratch_bytes == SETTINGS.gpu_scratch_bytes
    assert result.facts.notes == []
    assert result.zero_chunks == 2
    stored = run(ckptpipe.show(str(workdir / "a")))["stored_as"]
    assert set(stored) <= {
        "zero",
        "none",
        compress.partition(":")[0],
        f"{compress.partition(':')[0]}+none",
    } | {f"none+{compress.partition(':')[0]}"}
    buffers.clear()
    back = restore(workdir / "a", buffers)
    buffers.check()
    assert back.codec_backend == GPU
    assert back.facts.gpu_scratch_bytes == SETTINGS.gpu_scratch_bytes
    assert back.zero_chunks == 2 and back.facts.notes == []


def test_weights_are_split_into_planes_and_the_plane_that_gains_nothing_stays_raw(
    allocate: Allocate, workdir: Path
) -> None:
    buffers = Buffers(allocate, {"w": CONTENTS["bf16"][: 256 << 10]})
    result = save(buffers, workdir, "deflate:0")
    stored = run(ckptpipe.show(str(workdir / "a")))["stored_as"]
    (kind,) = stored
    assert kind == "deflate+none"
    assert result.raw_bytes / stored[kind]["stored_bytes"] > 1.45
    assert read_image(workdir / "a") == {"device/w": buffers.contents["w"]}, "with zlib alone"


@pytest.mark.parametrize("transform", ["none", "planes2", "planes4"])
def test_a_transform_that_is_asked_for(buffers: Buffers, workdir: Path, transform: str) -> None:
    save(buffers, workdir, "deflate:1", transform=transform)
    to_files(workdir / "a", workdir / "files")
    check_files(workdir / "files", CONTENTS)
    buffers.clear()
    restore(workdir / "a", buffers)
    buffers.check()


def test_only_what_is_stored_crosses_the_link(world: SimWorld, allocate: Allocate, workdir: Path) -> None:
    buffers = Buffers(allocate, {"t": CONTENTS["text"], "u": CONTENTS["text"]})
    before = [world.moved(gpu)[0] for gpu in range(2)]
    result = save(buffers, workdir, "deflate:1")
    moved = sum(world.moved(gpu)[0] - before[gpu] for gpu in range(2))
    stored = sum(
        each["stored_bytes"] for each in run(ckptpipe.show(str(workdir / "a")))["stored_as"].values()
    )
    samples = 2 * 4 * (64 << 10)
    tables = 2 * 64 << 10  # sizes of blocks, checksums
    assert moved <= stored + samples + tables < result.raw_bytes * 2


def test_zstd_is_the_cpus_work(buffers: Buffers, workdir: Path) -> None:
    result = save(buffers, workdir, "zstd:1")
    assert result.sinks[0].codec_backend == "cpu"
    assert result.facts.gpu_scratch_bytes == 0 and result.facts.notes == []
    buffers.clear()
    assert restore(workdir / "a", buffers).codec_backend == "cpu"
    buffers.check()


def test_auto_decides_by_stream_and_says_so(buffers: Buffers, workdir: Path) -> None:
    result = save(buffers, workdir, "auto")
    (sink,) = result.sinks
    assert sink.codec_backend == GPU
    decisions = {str(each["streams"]): each for each in sink.decisions}
    assert decisions["device/bf16"]["encoding"] == "deflate:0 planes2"
    assert decisions["device/noise"]["encoding"] == "none" and "random" in str(
        decisions["device/noise"]["reason"]
    )
    assert run(ckptpipe.show(str(workdir / "a")))["codec"]["decisions"] == sink.decisions
    to_files(workdir / "a", workdir / "files", decompress_backend="cpu")
    check_files(workdir / "files", CONTENTS)


def test_a_stream_of_many_kinds_is_decided_piece_by_piece(
    allocate: Allocate, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coding, "PIECE_BYTES", 256 << 10)
    part = 256 << 10
    mixed = CONTENTS["bf16"][:part] + os.urandom(part) + (CONTENTS["f32"] * 2)[:part] + bytes(part) + b"end"
    buffers = Buffers(allocate, {"mixed": mixed})
    (sink,) = save(buffers, workdir, "auto").sinks
    (decision,) = sink.decisions
    assert decision["chunks"] == {"deflate:0 planes2": 2, "deflate:0 planes4": 2, "raw": 3}
    assert decision["streams"] == "device/mixed" and "random" not in str(decision["reason"])
    buffers.clear()
    restore(workdir / "a", buffers)
    buffers.check()
    save(buffers, workdir, "deflate:0", name="fixed")
    transforms = [row.transform for row in damage.rows(workdir / "fixed")]
    assert transforms == [1, 1, 0, 0, 2, 2, 0, 0, 0], "a fixed codec has its transform piece by piece as well"


def test_auto_into_memory_stores_raw_where_the_link_is_faster(buffers: Buffers) -> None:
    result = save(buffers, "null:", "auto")
    assert result.sinks[0].codec_backend == ""
    assert {each["encoding"] for each in result.sinks[0].decisions} == {"none"}


def test_auto_without_nvcomp_is_the_cpus(
    buffers: Buffers, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTPIPE_NVCOMP", NOWHERE)
    result = save(buffers, workdir, "auto")
    assert "nvcomp" not in result.sinks[0].codec_backend
    assert any("auto is the CPU's work" in note and NOWHERE in note for note in result.facts.notes)
    buffers.clear()
    restore(workdir / "a", buffers)
    buffers.check()


async def graph(buffers: Buffers, stages: list[StageSpec], sinks: list[SinkSpec]) -> ckptpipe.SaveResult:
    """A save of device buffers whose branches differ."""
    arrays = {f"device/{name}": device_array(name, array) for name, array in buffers.arrays.items()}
    spec = GraphSpec(SourceSpec("device", {}), tuple(sinks), tuple(stages), "a")
    async with await CudaDriver.open() as driver, graph_context(SETTINGS) as context, Links(driver) as links:
        source = DeviceSource(DeviceBuffers(driver, arrays, links))
        return await graph_run.save_graph(spec, source, context, "save", None)


def compress(name: str, codec: str, level: int | None = None, reads: str = "source") -> StageSpec:
    return StageSpec(name, "compress", reads, {"codec": codec, "level": level})


def test_one_branch_raw_and_others_compressed_all_from_the_gpu(buffers: Buffers, workdir: Path) -> None:
    stages = [compress("d", "deflate", 1), compress("a", "ans", 1), compress("same", "deflate", 1)]
    sinks = [
        SinkSpec(str(workdir / "raw"), reads="source"),
        SinkSpec(str(workdir / "deflate"), reads="d"),
        SinkSpec(str(workdir / "ans"), reads="a"),
        SinkSpec(str(workdir / "same"), reads="same"),
    ]
    result = run(graph(buffers, stages, sinks))
    assert [sink.codec_backend for sink in result.sinks] == ["", GPU, GPU, GPU]
    assert [sink.chunks_compressed for sink in result.sinks][1] == result.sinks[3].chunks_compressed > 0
    assert result.facts.notes == []
    assert result.facts.ring_bytes >= 3 * 2 * MIB, "a ring for each form"
    for place in ("raw", "deflate", "ans", "same"):
        buffers.clear()
        restore(workdir / place / "a", buffers)
        buffers.check()


def test_what_is_limited_before_it_is_compressed_is_the_cpus_work(buffers: Buffers, workdir: Path) -> None:
    stages = [StageSpec("slow", "limit", "source", {"rate": 1e9}), compress("d", "deflate", 1, "slow")]
    result = run(graph(buffers, stages, [SinkSpec(str(workdir), reads="d")]))
    assert result.sinks[0].codec_backend == "cpu"
    assert any("stage d is the CPU's work" in note for note in result.facts.notes)


def test_a_limit_behind_the_codec_counts_stored_bytes(buffers: Buffers, workdir: Path) -> None:
    stages = [compress("d", "deflate", 1), StageSpec("slow", "limit", "d", {"rate": 1e9})]
    result = run(graph(buffers, stages, [SinkSpec(str(workdir), reads="slow")]))
    assert result.sinks[0].codec_backend == GPU and result.sinks[0].chunks_compressed
    buffers.clear()
    restore(workdir / "a", buffers)
    buffers.check()


def test_a_best_effort_branch_of_another_form_that_fails_is_dropped_alone(
    buffers: Buffers, workdir: Path
) -> None:
    (workdir / "bad").write_bytes(b"a file where a folder is wanted")
    stages = [compress("d", "deflate", 1)]
    sinks = [
        SinkSpec(str(workdir / "good"), reads="d"),
        SinkSpec(str(workdir / "bad"), reads="source", policy="best-effort"),
    ]
    result = run(graph(buffers, stages, sinks))
    assert [sink.ok for sink in result.sinks] == [True, False]
    buffers.clear()
    restore(workdir / "good" / "a", buffers)
    buffers.check()


def test_without_nvcomp_deflate_is_the_cpus_and_ans_is_refused(
    buffers: Buffers, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTPIPE_NVCOMP", NOWHERE)
    result = save(buffers, workdir, "deflate:1")
    assert result.sinks[0].codec_backend == "cpu"
    assert any("deflate:1 is the CPU's work" in note for note in result.facts.notes)
    with pytest.raises(ckptpipe.CkptpipeError, match=NOWHERE):
        save(buffers, workdir / "b", "ans:f16")
    assert not (workdir / "b").exists()


@pytest.mark.parametrize("what", ["files", "buffers", "stdin"])
def test_codecs_of_the_gpu_are_refused_by_name_for_what_lies_in_host_memory(workdir: Path, what: str) -> None:
    (workdir / "file").write_bytes(b"x" * 100_000)
    source = {"files": workdir / "file", "buffers": {"x": b"x" * 100_000}, "stdin": "-"}[what]
    with pytest.raises(
        ckptpipe.UsageError, match=r"ans:f16 is written on a GPU only.*host memory"
    ) as refused:
        run(ckptpipe.save(source, to=workdir / "images", compress="ans:f16"))
    assert "deflate" in refused.value.cure
    assert not (workdir / "images").exists()


def test_scratch_that_is_not_there_is_said_before_anything_is_written(
    make_world: Callable[..., SimWorld], workdir: Path
) -> None:
    world = make_world(gpus=1, memory=64 * MIB)
    memory = Memory(0, CONTENTS["bf16"])
    before = world.used(0)
    buffers = Buffers(lambda ordinal, data: memory, {"x": CONTENTS["bf16"]})
    try:
        with pytest.raises(CudaError, match=r"OUT_OF_MEMORY.*256(\.0)? MiB of scratch") as failed:
            save(
                buffers, workdir / "images", "deflate:1", settings=with_settings(gpu_scratch_bytes=256 * MIB)
            )
        assert "--gpu-scratch" in failed.value.cure
        assert not (workdir / "images").exists()
        assert world.used(0) == before
        save(buffers, workdir / "images", "deflate:1")
    finally:
        memory.free()


def test_scratch_that_does_not_hold_a_chunk_is_said_before_anything_is_written(
    buffers: Buffers, workdir: Path
) -> None:
    settings = with_settings(gpu_scratch_bytes=16 * MIB, chunk_bytes=16 * MIB, ring_bytes=128 * MIB)
    with pytest.raises(ckptpipe.CkptpipeError, match=r"do not hold one chunk") as failed:
        save(buffers, workdir / "images", "deflate:1", settings=settings)
    assert "--gpu-scratch" in failed.value.cure
    assert not (workdir / "images").exists()
    with pytest.raises(ckptpipe.UsageError, match="too little for codecs"):
        save(buffers, workdir / "images", "deflate:1", settings=with_settings(gpu_scratch_bytes=MIB))


@pytest.mark.parametrize(
    "call", ["nvcompBatchedDeflateCompressAsync", "cuLaunchKernel", "cuMemcpyDtoHAsync", "cuEventRecord"]
)
@pytest.mark.parametrize("nth", [1, 3])
def test_an_encoder_that_fails_leaves_nothing(
    world: SimWorld, buffers: Buffers, workdir: Path, call: str, nth: int
) -> None:
    known = {"nvcompBatchedDeflateCompressAsync": "nvcompErrorInternal"}
    world.fault(call, pid=os.getpid(), nth=nth, error=known.get(call, "CUDA_ERROR_UNKNOWN"))
    with pytest.raises(ckptpipe.CkptpipeError):
        save(buffers, workdir / "images", "deflate:1", transform="none")
    assert not list((workdir / "images").rglob("*-*"))
    save(buffers, workdir / "images", "deflate:1")
    buffers.clear()
    restore(workdir / "images" / "a", buffers)
    buffers.check()


def test_cancelled_while_it_encodes(world: SimWorld, buffers: Buffers, workdir: Path) -> None:
    hold = world.fault("nvcompBatchedDeflateCompressAsync", pid=os.getpid(), nth=2, hold=True)

    async def main() -> None:
        saving = asyncio.ensure_future(
            ckptpipe.save(
                device_buffers=buffers.arrays, to=workdir / "images", compress="deflate:1", settings=SETTINGS
            )
        )
        await asyncio.to_thread(hold.wait)
        saving.cancel()
        await asyncio.sleep(0)
        hold.release()
        with pytest.raises(asyncio.CancelledError):
            await saving

    run(main())
    assert not list((workdir / "images").rglob("*-*"))


def test_one_gpu_without_room_gives_the_others_memory_back(
    make_world: Callable[..., SimWorld], workdir: Path
) -> None:
    world = make_world(gpus=2, memory=[512 * MIB, 24 * MIB])
    held: list[Memory] = []

    def make(ordinal: int, data: bytes) -> Memory:
        held.append(Memory(ordinal, data))
        return held[-1]

    buffers = Buffers(make, {"x": CONTENTS["bf16"], "y": CONTENTS["text"]})
    used = [world.used(gpu) for gpu in range(2)]
    with pytest.raises(CudaError, match=r"OUT_OF_MEMORY.*codec of GPU 1"):
        save(buffers, workdir / "images", "deflate:1")
    assert [world.used(gpu) for gpu in range(2)] == used
    save(buffers, workdir / "images", "zstd:1")
    for memory in held:
        memory.free()
