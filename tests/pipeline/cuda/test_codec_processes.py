"""Processes by custom storage whose memory is compressed on their GPUs: saved, put back, restored, recovered."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.cuda.device_map import GpuUnsuitable
from ckptpipe.pyx.cuda import CudaError
from ckptpipe.storage_backends.errors import StorageError
from ckptpipe.storage_backends.wrappers.faulty import Faults
from tests.pipeline.cuda import damage
from tests.pipeline.cuda.codec_runs import ENGINE, GPU, MIB, NOWHERE
from tests.pipeline.cuda.runs import SETTINGS as PLAIN
from tests.pipeline.cuda.runs import Spawn, recover, runs
from tests.pipeline.cuda.runs import restore as restore_plain
from tests.pipeline.cuda.runs import save as save_plain
from tests.pipeline.runs import break_sink, memory_dir, run
from tests.simcuda import SimWorld, Target
from tests.simcuda.contents import COMPRESSIBLE

__all__ = ["break_sink", "memory_dir"]

SETTINGS = replace(PLAIN, gpu_scratch_bytes=32 * MIB)
LOCK = "cuCheckpointProcessLock"
RESTORE = "cuCheckpointProcessRestore"
Plan = Callable[[str, Faults], Faults]


def save(target: Target | int, to: object, compress: str, **options: object) -> ckptpipe.SaveResult:
    return save_plain(target, to, **({"compress": compress, "settings": SETTINGS} | options))


def restore(url: object, target: Target, **options: object) -> ckptpipe.ReadResult:
    return restore_plain(url, target, **({"settings": SETTINGS} | options))


@pytest.mark.parametrize("compress", ["deflate:0", "ans:u8", "auto"])
def test_a_snapshot_is_put_back_by_the_gpus(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, compress: str
) -> None:
    target = spawn(world, seed=COMPRESSIBLE)
    result = save(target, workdir, compress)
    assert result.sinks[0].codec_backend == GPU and result.sinks[0].chunks_compressed
    assert result.facts.gpu_scratch_bytes == SETTINGS.gpu_scratch_bytes
    runs(world, target, runtime)
    assert [world.used(gpu) for gpu in range(2)] == [5 * MIB, 3 * MIB], "the target's own"


@pytest.mark.parametrize("compress", ["deflate:1", "ans:f16"])
@pytest.mark.parametrize("engine", [False, True])
def test_checkpointed_and_restored(
    make_world: Callable[..., SimWorld],
    spawn: Spawn,
    workdir: Path,
    runtime: Path,
    compress: str,
    engine: bool,
) -> None:
    world = make_world(gpus=2, decompression=(7, 4 * MIB) if engine else (0, 0))
    target = spawn(world, seed=COMPRESSIBLE)
    save(target, workdir, compress, leave="checkpointed")
    assert [world.used(gpu) for gpu in range(2)] == [0, 0]
    back = restore(workdir / "a", target)
    assert back.codec_backend == (ENGINE if engine and compress == "deflate:1" else GPU)
    runs(world, target, runtime)


def test_several_processes_on_several_gpus(world: SimWorld, spawn: Spawn, workdir: Path) -> None:
    targets = [
        spawn(world, [(0, MIB), (1, 2 * MIB)], seed=COMPRESSIBLE + 1),
        spawn(world, [(1, 3 * MIB)], seed=COMPRESSIBLE + 2),
        spawn(world, [(0, MIB // 2)], seed=COMPRESSIBLE + 3),
    ]
    pids = [target.pid for target in targets]
    result = run(
        ckptpipe.save(
            processes=pids,
            to=workdir,
            name="a",
            compress="ans:u8",
            leave="checkpointed",
            settings=SETTINGS,
        )
    )
    assert result.sinks[0].codec_backend == GPU
    back = run(ckptpipe.restore(str(workdir / "a"), processes=pids, settings=SETTINGS))
    assert back.codec_backend == GPU
    for target in targets:
        assert world.process(target.pid).state == "RUNNING"
        target.check()


def test_the_image_of_a_process_is_read_by_the_cpu(world: SimWorld, spawn: Spawn, workdir: Path) -> None:
    target = spawn(world, [(0, 3 << 20), (1, 1 << 20)], seed=COMPRESSIBLE)
    save(target, workdir, "deflate:0")
    result = run(
        ckptpipe.restore(
            str(workdir / "a"), to=workdir / "files", decompress_backend="cpu", settings=SETTINGS
        )
    )
    assert result.codec_backend == "cpu"
    for k, gpu in enumerate(world.gpus):
        assert (workdir / "files" / "proc" / "0" / "gpu" / gpu.uuid).read_bytes().endswith(target.buffer(k))


def test_what_cannot_be_encoded_is_refused_before_the_target_is_touched(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = spawn(world, seed=COMPRESSIBLE)
    with pytest.raises(CudaError, match=r"OUT_OF_MEMORY.*of scratch") as failed:
        save(target, workdir / "b", "deflate:0", settings=replace(SETTINGS, gpu_scratch_bytes=2 << 30))
    assert "--gpu-scratch" in failed.value.cure
    with pytest.raises(ckptpipe.UsageError, match=r"ans:u8 is written on a GPU only"):
        save(target, workdir / "b", "ans:u8", capture="driver-image")
    for backend, words in (("cpu", "put back by cpu"), ("decompression-engine", "decompression engine")):
        settings = replace(SETTINGS, decompress_backend=backend)  # type: ignore[arg-type]
        with pytest.raises(ckptpipe.CkptpipeError, match=words):
            save(target, workdir / "b", "ans:u8", settings=settings)
    monkeypatch.setenv("CKPTPIPE_NVCOMP", NOWHERE)
    with pytest.raises(ckptpipe.CkptpipeError, match=NOWHERE):
        save(target, workdir / "b", "ans:u8")
    assert world.calls(LOCK) == 0 and not (workdir / "b").exists()
    runs(world, target, runtime)


def test_the_image_of_a_driver_is_compressed_on_the_cpu(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path
) -> None:
    target = spawn(world, seed=COMPRESSIBLE)
    result = save(target, workdir, "deflate:1", capture="driver-image")
    assert result.sinks[0].codec_backend == "cpu"
    assert result.facts.gpu_scratch_bytes == 0
    runs(world, target, runtime)


def test_what_cannot_be_decoded_is_refused_before_the_target_is_touched(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = spawn(world, seed=COMPRESSIBLE)
    save(target, workdir, "ans:u8", leave="checkpointed")
    calls = world.calls(RESTORE)
    with pytest.raises(ckptpipe.CkptpipeError, match="decompression engine"):
        restore(workdir / "a", target, decompress_backend="decompression-engine")
    with pytest.raises(ckptpipe.UnsupportedImage, match="is coded with ans"):
        restore(workdir / "a", target, decompress_backend="cpu")
    with pytest.raises(ckptpipe.UnsupportedImage, match=r"is coded with ans.*OUT_OF_MEMORY"):
        restore(workdir / "a", target, settings=replace(SETTINGS, gpu_scratch_bytes=2 << 30))
    with monkeypatch.context() as without:
        without.setenv("CKPTPIPE_NVCOMP", NOWHERE)
        with pytest.raises(ckptpipe.UnsupportedImage, match=NOWHERE):
            restore(workdir / "a", target)
    assert world.process(target.pid).state == "CHECKPOINTED" and world.calls(RESTORE) == calls
    restore(workdir / "a", target)
    runs(world, target, runtime)


SMALL_SCRATCH = replace(SETTINGS, gpu_scratch_bytes=20 * MIB)
LARGE_SCRATCH = replace(SETTINGS, gpu_scratch_bytes=80 * MIB)


def saved_from_a_small_gpu(
    make_world: Callable[..., SimWorld], spawn: Spawn, workdir: Path, codec: str
) -> tuple[SimWorld, Target]:
    """The process fits onto its GPU, and the large scratch as well, but not both of them."""
    world = make_world(gpus=1, memory=128 * MIB)
    target = spawn(world, [(0, 70 * MIB)], seed=COMPRESSIBLE)
    save(target, workdir, codec, leave="checkpointed", settings=SMALL_SCRATCH)
    return world, target


def test_scratch_counts_in_the_preflight_of_a_restore(
    make_world: Callable[..., SimWorld], spawn: Spawn, workdir: Path, runtime: Path
) -> None:
    world, target = saved_from_a_small_gpu(make_world, spawn, workdir, "ans:u8")
    with pytest.raises(
        GpuUnsuitable, match=r"memory free beside the 83886080 that codecs take.*the image needs"
    ):
        restore(workdir / "a", target, settings=LARGE_SCRATCH)
    assert world.process(target.pid).state == "CHECKPOINTED"
    restore(workdir / "a", target, settings=SMALL_SCRATCH)
    runs(world, target, runtime)


def test_where_scratch_and_process_do_not_fit_the_cpu_decodes_what_it_can(
    make_world: Callable[..., SimWorld], spawn: Spawn, workdir: Path, runtime: Path
) -> None:
    world, target = saved_from_a_small_gpu(make_world, spawn, workdir, "deflate:0")
    with pytest.raises(GpuUnsuitable, match="that codecs take"):
        restore(workdir / "a", target, settings=LARGE_SCRATCH, decompress_backend="nvcomp-cuda")
    assert world.process(target.pid).state == "CHECKPOINTED"
    back = restore(workdir / "a", target, settings=LARGE_SCRATCH)
    assert back.codec_backend == "cpu" and back.facts.gpu_scratch_bytes == 0
    assert any("the memory that codecs take is needed" in note for note in back.facts.notes)
    runs(world, target, runtime)


def test_bad_bytes_are_read_again_and_a_good_copy_brings_it_back(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path
) -> None:
    target = spawn(world, seed=COMPRESSIBLE)
    save(target, workdir, "deflate:0", leave="checkpointed")
    shutil.copytree(workdir / "a", workdir / "copy")
    row = next(each for each in damage.rows(workdir / "a") if each.planes)
    damage.flip_stored(workdir / "a", row, row.stored_bytes - 1)
    with pytest.raises(ckptpipe.CaptureFailed, match=r"checksum.*stays RESTORING") as failure:
        restore(workdir / "a", target)
    assert damage.where(workdir / "a", row) in str(failure.value)
    assert isinstance(failure.value.__cause__, ckptpipe.ImageCorrupt)
    restore(workdir / "copy", target)
    runs(world, target, runtime)


def test_a_sink_that_fails_leaves_the_data_on_the_gpu_and_recover_compresses_it_elsewhere(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, break_sink: Plan
) -> None:
    target = spawn(world, seed=COMPRESSIBLE)
    faults = Faults()
    faults.fail("append", 3, StorageError("the disk is full"))
    break_sink("bad", faults)
    with pytest.raises(ckptpipe.CaptureFailed, match="stays CHECKPOINTING"):
        save(target, workdir / "bad", "deflate:0")
    result = recover(target, to=workdir / "good", name="a", compress="ans:u8", settings=SETTINGS)
    assert result.after == "RUNNING" and result.save is not None
    assert result.save.sinks[0].codec_backend == GPU
    runs(world, target, runtime)


def test_recovered_from_a_coded_image(world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path) -> None:
    target = spawn(world, seed=COMPRESSIBLE)
    save(target, workdir, "ans:u8", leave="checkpointed")
    assert recover(target, settings=SETTINGS).after == "RUNNING"
    runs(world, target, runtime)


@pytest.mark.parametrize("name", ["nvcompBatchedDeflateCompressAsync", "cuLaunchKernel"])
def test_an_encoder_that_fails_in_the_middle(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path, name: str
) -> None:
    target = spawn(world, seed=COMPRESSIBLE)
    error = "nvcompErrorInternal" if name.startswith("nvcomp") else "CUDA_ERROR_UNKNOWN"
    world.fault(name, pid=os.getpid(), nth=2, error=error)
    with pytest.raises(ckptpipe.CaptureFailed, match="stays CHECKPOINTING"):
        save(target, workdir, "deflate:0", transform="none")
    assert recover(target, to=workdir, name="b", settings=SETTINGS).after == "RUNNING"
    runs(world, target, runtime)


def test_a_target_that_dies_while_it_is_encoded(world: SimWorld, spawn: Spawn, workdir: Path) -> None:
    target = spawn(world, seed=COMPRESSIBLE)
    hold = world.fault("nvcompBatchedDeflateCompressAsync", pid=os.getpid(), nth=2, hold=True)

    async def main() -> None:
        saving = asyncio.ensure_future(
            ckptpipe.save(pid=target.pid, to=workdir, name="a", compress="deflate:0", settings=SETTINGS)
        )
        await asyncio.to_thread(hold.wait)
        target.kill()
        await asyncio.sleep(0)
        hold.release()
        with pytest.raises(ckptpipe.TargetError):
            await saving

    run(main())
    assert not list(workdir.rglob("manifest.json"))


def test_a_target_that_dies_while_it_is_decoded(world: SimWorld, spawn: Spawn, workdir: Path) -> None:
    target = spawn(world, seed=COMPRESSIBLE)
    save(target, workdir, "ans:u8", leave="checkpointed")
    hold = world.fault("nvcompBatchedANSDecompressAsync", pid=os.getpid(), nth=2, hold=True)

    async def main() -> None:
        restoring = asyncio.ensure_future(
            ckptpipe.restore(str(workdir / "a"), pid=target.pid, settings=SETTINGS)
        )
        await asyncio.to_thread(hold.wait)
        target.kill()
        await asyncio.sleep(0)
        hold.release()
        with pytest.raises(ckptpipe.TargetError):
            await restoring

    run(main())
    run(ckptpipe.verify(str(workdir / "a"), settings=SETTINGS))


def test_cancelled_while_it_encodes(world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path) -> None:
    target = spawn(world, seed=COMPRESSIBLE)
    hold = world.fault("nvcompBatchedDeflateCompressAsync", pid=os.getpid(), nth=2, hold=True)

    async def main() -> None:
        saving = asyncio.ensure_future(
            ckptpipe.save(pid=target.pid, to=workdir, name="a", compress="deflate:0", settings=SETTINGS)
        )
        await asyncio.to_thread(hold.wait)
        saving.cancel()
        await asyncio.sleep(0)
        hold.release()
        with pytest.raises(asyncio.CancelledError):
            await saving

    run(main())
    assert recover(target, to=workdir, name="b", compress="ans:u8", settings=SETTINGS).after == "RUNNING"
    runs(world, target, runtime)
