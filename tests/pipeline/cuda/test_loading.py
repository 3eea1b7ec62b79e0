"""Restores from local files go straight into device memory: without a ring, verified, with the errors of any restore."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptpipe
from ckptpipe.pipeline.chunk import Chunk, FilePlace
from ckptpipe.pipeline.cuda.loading import THREADS_MIN, load, load_plan
from ckptpipe.pyx import cuda
from ckptpipe.pyx.cuda_load import THREADS, cpus_of, threads_for
from ckptpipe.storage_backends.abc import Backend
from ckptpipe.storage_backends.errors import StorageError
from ckptpipe.storage_backends.local import LocalBackend
from tests.pipeline.cuda.device_arrays import Allocate, Interface, Memory
from tests.pipeline.cuda.runs import KIB, SETTINGS, cancelled_while_the_gpu_fetches
from tests.pipeline.runs import run
from tests.simcuda import SimWorld

CHUNK = 256 * KIB
NBYTES = 9 * CHUNK + 1000


@pytest.fixture
def folder() -> Iterator[Path]:
    """On a tmpfs: read through the page cache, whatever the tests' own folder lies on."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


def noise(nbytes: int = NBYTES, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def save(buffers: dict[str, object], to: Path, **options: Any) -> None:
    run(ckptpipe.save(device_buffers=buffers, to=to, name="a", settings=SETTINGS, **options))


async def restoring(url: object, buffers: dict[str, object], **options: Any) -> ckptpipe.ReadResult:
    return await ckptpipe.restore(str(url), device_buffers=buffers, **({"settings": SETTINGS} | options))


def restore(url: object, buffers: dict[str, object], **options: Any) -> ckptpipe.ReadResult:
    return run(restoring(url, buffers, **options))


def flip(folder: Path, offset: int = 0) -> None:
    largest = max(folder.glob("data-*"), key=lambda path: path.stat().st_size)
    with open(largest, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def test_no_ring_is_made(world: SimWorld, allocate: Allocate, folder: Path) -> None:
    data = [noise(), bytes(3 * CHUNK) + noise(CHUNK + 5), b""]
    memory = [allocate(k % 2, part) for k, part in enumerate(data)]
    buffers: dict[str, object] = {f"x{k}": Interface(each) for k, each in enumerate(memory)}
    save(buffers, folder)
    for each in memory:
        each.write(b"\xee" * each.nbytes)
    registered = world.calls("cuMemHostRegister")
    moved = [world.moved(gpu)[1] for gpu in range(2)]
    result = restore(folder / "a", buffers)
    assert [each.read() for each in memory] == data
    assert result.facts.ring_bytes == 0
    assert world.calls("cuMemHostRegister") == registered + 2, "small buffers of each GPU's loader"
    assert (result.raw_bytes, result.chunks, result.zero_chunks) == (sum(map(len, data)), 15, 3)
    assert [world.moved(gpu)[1] - moved[gpu] for gpu in range(2)] == [len(data[0]), CHUNK + 5], (
        "zeros do not cross the link"
    )
    assert cuda.pinned_bytes() == 0


def test_coded_chunks_beside_raw_ones_go_through_the_ring(allocate: Allocate, folder: Path) -> None:
    data = b"".join(noise(CHUNK, k) if k % 2 else bytes([k]) * CHUNK for k in range(8))
    memory = allocate(0, data)
    save({"x": Interface(memory)}, folder, compress="zstd:1")
    memory.write(bytes(len(data)))
    result = restore(folder / "a", {"x": Interface(memory)})
    assert memory.read() == data
    assert result.facts.ring_bytes > 0
    assert result.stored_bytes < len(data)


def test_what_cannot_be_loaded_is_read_into_the_ring(
    world: SimWorld, allocate: Allocate, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = noise()
    memory = allocate(0, data)
    save({"x": Interface(memory)}, folder)
    memory.write(bytes(NBYTES))
    streams = world.calls("cuStreamCreate")
    monkeypatch.setattr(LocalBackend, "local_file", Backend.local_file)  # as of a store that has no files
    result = restore(folder / "a", {"x": Interface(memory)})
    assert memory.read() == data
    assert result.facts.ring_bytes > 0
    assert world.calls("cuStreamCreate") == streams + 4, "of the queue alone"


@pytest.mark.parametrize("checksum", ["device", "host"])
@pytest.mark.parametrize("offset", [0, CHUNK + 77])
def test_a_flipped_bit_is_found(
    world: SimWorld, allocate: Allocate, folder: Path, checksum: str, offset: int
) -> None:
    data = noise()
    memory = allocate(0, data)
    save({"x": Interface(memory)}, folder)
    flip(folder / "a", offset)
    if checksum == "host":
        world.fault("cuModuleLoadData", pid=os.getpid(), error=222)
    with pytest.raises(
        ckptpipe.ImageCorrupt, match=r"device/x chunk \d+ \(data-.*stored bytes have the checksum"
    ):
        restore(folder / "a", {"x": Interface(memory)})
    flip(folder / "a", offset)
    restore(folder / "a", {"x": Interface(memory)})
    assert memory.read() == data


async def at_the_gpu(world: SimWorld, url: Path, memory: Memory, meanwhile: Callable[[], object]) -> None:
    """A restore with something done when the image is open and checked, and no byte of it is read."""
    held = world.fault("cuDevicePrimaryCtxRetain", pid=os.getpid(), hold=True)
    task = asyncio.ensure_future(restoring(url, {"x": Interface(memory)}))
    try:
        await asyncio.to_thread(held.wait)
        meanwhile()
    finally:
        held.release()
        held.cancel()
    await task


def test_a_file_that_was_cut_off_meanwhile(world: SimWorld, allocate: Allocate, folder: Path) -> None:
    memory = allocate(0, noise())
    save({"x": Interface(memory)}, folder)
    stored = max((folder / "a").glob("data-*"), key=lambda path: path.stat().st_size)
    size = stored.stat().st_size

    def cut() -> None:
        os.truncate(stored, size - CHUNK)

    words = r"stream device/x chunk \d+ \(data-.* cannot be read: .*ends at byte \d+, \d+ were to be read"
    with pytest.raises(ckptpipe.ImageIncomplete, match=words) as caught:
        run(at_the_gpu(world, folder / "a", memory, cut))
    assert str(stored) in str(caught.value)


def test_an_image_that_was_deleted_meanwhile_is_no_damage(
    world: SimWorld, allocate: Allocate, folder: Path
) -> None:
    memory = allocate(0, noise())
    save({"x": Interface(memory)}, folder)

    def delete() -> None:
        (folder / "a" / "manifest.json").unlink()
        for path in (folder / "a").glob("data-*"):
            os.truncate(path, 4096)

    with pytest.raises(ckptpipe.CkptpipeError, match="was deleted while it was read"):
        run(at_the_gpu(world, folder / "a", memory, delete))


def test_what_the_kernel_answers_is_a_storage_error() -> None:
    class File:
        path = "/mnt/image/data-1"
        size = 1 << 20

        def fileno(self) -> int:
            return -1

        def share(self) -> File:
            return self

        def release(self) -> None:
            return

    class Queue:
        async def load(self, *_: object, scan: bool) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def main() -> None:
        chunk = Chunk(0, 3, 4096, 0, None)
        chunk.place = FilePlace(File(), 0)
        assert not chunk.zero
        with pytest.raises(StorageError, match="read /mnt/image/data-1: Input/output error") as caught:
            await load(None, chunk, Queue(), 4096)  # type: ignore[arg-type]
        assert "kernel log" in caught.value.cure
        chunk.release()

    run(main())


@pytest.mark.parametrize(
    "call", ["cuMemcpyHtoDAsync", "cuEventRecord", "cuEventQuery", "cuLaunchKernel", "cuMemHostRegister"]
)
def test_a_driver_that_refuses(world: SimWorld, allocate: Allocate, folder: Path, call: str) -> None:
    data = noise()
    memory = allocate(0, data)
    save({"x": Interface(memory)}, folder)
    nth = 1 if call == "cuMemHostRegister" else 3
    fault = world.fault(call, pid=os.getpid(), nth=nth, error="CUDA_ERROR_UNKNOWN")
    with pytest.raises(ckptpipe.CkptpipeError, match=f"{call}: CUDA_ERROR_UNKNOWN"):
        restore(folder / "a", {"x": Interface(memory)})
    assert fault.fired == 1
    assert cuda.pinned_bytes() == 0
    restore(folder / "a", {"x": Interface(memory)})
    assert memory.read() == data


def test_a_cancelled_restore_leaves_nothing(world: SimWorld, allocate: Allocate, folder: Path) -> None:
    data = noise()
    memory = allocate(0, data)
    save({"x": Interface(memory)}, folder)

    async def main() -> None:
        await cancelled_while_the_gpu_fetches(world, restoring(folder / "a", {"x": Interface(memory)}))

    run(main())
    assert cuda.pinned_bytes() == 0
    restore(folder / "a", {"x": Interface(memory)})
    assert memory.read() == data


def test_threads_are_shared_out() -> None:
    assert [threads_for(cpus) for cpus in (1, 2, 8, 16, 128)] == [1, 1, 6, 12, THREADS]
    assert load_plan(0, 1, None, CHUNK).threads == max(THREADS_MIN, threads_for(len(cpus_of(None))))
    assert load_plan(12, 4, None, CHUNK).threads == 3
    assert load_plan(3, 8, None, CHUNK).threads == THREADS_MIN
    assert load_plan(1000, 1, None, CHUNK).threads == THREADS
    assert cpus_of(None) == cpus_of(9999) == os.sched_getaffinity(0)
    assert cpus_of(0) <= os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("chunk", "buffers", "copy", "part"),
    [(64 << 20, 5, 8 << 20, 256 << 10), (5 << 20, 8, 5 << 20, 256 << 10), (4097, 64, 8192, 8192)],
)
def test_buffers_are_no_longer_than_chunks(chunk: int, buffers: int, copy: int, part: int) -> None:
    plan = load_plan(0, 1, None, chunk)
    assert (plan.buffers, plan.copy_bytes, plan.part_bytes) == (buffers, copy, part)
