"""Arrays on GPUs of this process, saved by name and restored into such arrays; what is refused before anything moves."""

from __future__ import annotations

import asyncio
import ctypes
import os
from pathlib import Path

import pytest
from cuda.bindings import driver

import ckptpipe
from ckptpipe.pipeline.cuda.device_array import device_array
from tests.pipeline.cuda.device_arrays import Allocate, Interface, Packed
from tests.pipeline.cuda.runs import SETTINGS
from tests.pipeline.runs import run
from tests.simcuda import STALLED, SimWorld
from tests.simcuda.driver import call

MIB = 1 << 20


def save(buffers: dict[str, object], to: object, **options: object) -> ckptpipe.SaveResult:
    return run(ckptpipe.save(device_buffers=buffers, to=to, name="a", settings=SETTINGS, **options))  # type: ignore[arg-type]


def restore(url: Path, buffers: dict[str, object]) -> ckptpipe.ReadResult:
    return run(ckptpipe.restore(str(url), device_buffers=buffers, settings=SETTINGS))


@pytest.mark.parametrize("compress", ["none", "zstd:1"])
def test_there_and_back_by_every_protocol(allocate: Allocate, workdir: Path, compress: str) -> None:
    contents = [os.urandom(3 * MIB + 8), bytes(MIB) + os.urandom(300_000), os.urandom(64), b""]
    kept = [allocate(k % 2, data) for k, data in enumerate(contents)]
    buffers: dict[str, object] = {
        "weights/a": Interface(kept[0], (len(contents[0]) // 8,), "<f8", stream=1),
        "b": Packed(kept[1], (4, len(contents[1]) // 8), bits=16),
        "c": Packed(kept[2], (4, 4), bits=32, versioned=False),
        "empty": Interface(kept[3], (0, 5)),
    }
    result = save(buffers, workdir, compress=compress)
    assert result.facts.capture == "device-buffers (simulated)"
    assert result.raw_bytes == sum(map(len, contents)) and result.streams == 4
    assert result.zero_chunks >= 4
    streams = run(ckptpipe.show(str(workdir / "a")))["streams"]
    assert [(s["name"], s["bytes"], s["kind"]) for s in streams] == [
        (f"device/{name}", len(data), "gpu") for name, data in zip(buffers, contents, strict=True)
    ]
    run(ckptpipe.restore(str(workdir / "a"), to=workdir / "files"))
    assert (workdir / "files" / "device" / "weights" / "a").read_bytes() == contents[0]
    for memory in kept:
        memory.write(os.urandom(memory.nbytes))
    back = restore(
        workdir / "a",
        {name if k % 2 else f"device/{name}": array for k, (name, array) in enumerate(buffers.items())},
    )
    assert back.facts.capture == "device-buffers (simulated)"
    assert [memory.read() for memory in kept] == contents


def test_some_of_them_into_memory_of_another_gpu(allocate: Allocate, workdir: Path) -> None:
    one, two = os.urandom(MIB), os.urandom(2 * MIB)
    save({"one": Interface(allocate(0, one)), "two": Interface(allocate(0, two))}, workdir)
    other = allocate(1, bytes(2 * MIB))
    restore(workdir / "a", {"two": Interface(other)})
    assert other.read() == two


def test_host_buffers_go_into_device_buffers(allocate: Allocate, workdir: Path) -> None:
    data = os.urandom(MIB)
    run(ckptpipe.save({"x": data}, to=workdir, name="a", settings=SETTINGS))
    memory = allocate(0, bytes(MIB))
    restore(workdir / "a", {"x": Interface(memory)})
    assert memory.read() == data


@pytest.mark.parametrize("protocol", ["interface", "dlpack", "interface without a stream"])
def test_what_the_producer_has_enqueued_is_waited_for(
    world: SimWorld, allocate: Allocate, workdir: Path, protocol: str
) -> None:
    """The copy that fills the array stands still while it is handed over, and goes on when the save waits for it."""
    data = os.urandom(MIB)
    memory = allocate(0, bytes(MIB))
    call(driver.cuCtxSetCurrent(memory.context))
    explicit = protocol == "interface"
    stream = call(driver.cuStreamCreate(1)) if explicit or protocol != "dlpack" else driver.CUstream(1)
    pinned = int(call(driver.cuMemHostAlloc(MIB, 0)))
    ctypes.memmove(pinned, data, MIB)
    world.link(0, to_device=STALLED)
    call(driver.cuMemcpyHtoDAsync(memory.address, pinned, MIB, stream))
    array = (
        Packed(memory, (MIB,))
        if protocol == "dlpack"
        else Interface(memory, stream=int(stream) if explicit else None)
    )
    waits = world.fault(
        "cuCtxSynchronize" if protocol == "interface without a stream" else "cuStreamSynchronize",
        pid=os.getpid(),
    )

    async def main() -> None:
        saving = asyncio.ensure_future(
            ckptpipe.save(device_buffers={"x": array}, to=workdir, name="a", settings=SETTINGS)
        )
        await asyncio.to_thread(waits.wait)
        assert not saving.done()
        world.link(0, to_device=0)
        await saving

    run(main())
    run(ckptpipe.restore(str(workdir / "a"), to=workdir / "files"))
    assert (workdir / "files" / "device" / "x").read_bytes() == data
    if isinstance(array, Packed):
        assert array.streams == [1]
    call(driver.cuCtxSetCurrent(memory.context))
    call(driver.cuMemFreeHost(pinned))
    if protocol != "dlpack":
        call(driver.cuStreamDestroy(stream))


def test_arrays_that_cannot_be_copied_as_they_are(allocate: Allocate, workdir: Path) -> None:
    memory = allocate(0, bytes(4096))
    refused: list[tuple[object, str]] = [
        (b"bytes", r"no array on a GPU"),
        (object(), r"no array on a GPU"),
        (Interface(memory, (4, 4), "<f4", strides=(32, 4)), r"not contiguous.*contiguous"),
        (Interface(memory, (4, 4), "<f4", strides=(4, 16)), r"not contiguous"),
        (Interface(memory, (4,), "<f4", mask=Interface(memory)), r"mask"),
        (Interface(memory, (4,), "float"), r"bad __cuda_array_interface__"),
        (Packed(memory, (4, 4), strides=(1, 4)), r"not contiguous"),
        (Packed(memory, (4, 4), strides=(8, 1)), r"not contiguous"),
        (Packed(memory, (4,), device=(1, 0)), r"the CPU's memory"),
        (Packed(memory, (4,), device=(3, 0)), r"pinned host memory"),
        (Packed(memory, (4,), device=(13, 0)), r"managed memory"),
        (Packed(memory, (4,), device=(10, 0)), r"device type 10"),
        (Packed(memory, (4,), device=(2, 1)), r"says device 1, its memory is on device 0"),
        (Packed(memory, (4,), major=2), r"DLPack 2"),
    ]
    for array, words in refused:
        with pytest.raises(ckptpipe.UsageError, match=words):
            save({"x": array}, workdir)
    nowhere = Interface(memory)
    nowhere.__cuda_array_interface__["data"] = (0x1000, False)
    with pytest.raises(ckptpipe.UsageError, match=r"no memory of a GPU"):
        save({"x": nowhere}, workdir)
    for name in ("", "/a", "a/../b", "x" * 300):
        with pytest.raises(ckptpipe.UsageError, match=r"cannot name a stream"):
            save({name: Interface(memory)}, workdir)
    with pytest.raises(ckptpipe.UsageError, match=r"no device buffer"):
        save({}, workdir)
    assert not list(workdir.iterdir())


def test_strides_that_do_not_matter(allocate: Allocate) -> None:
    memory = allocate(0, bytes(4096))
    for array in (
        Interface(memory, (1, 4), "<f4", strides=(9999, 4)),
        Interface(memory, (2, 2, 4), "|u1", strides=(8, 4, 1)),
        Packed(memory, (16, 1), strides=(1, 77)),
    ):
        assert device_array("x", array).nbytes == 16
    assert device_array("x", Packed(memory, (), bits=64)).nbytes == 8
    assert device_array("x", Packed(memory, (7,), bits=4)).nbytes == 4, "half bytes are rounded up"
    assert device_array("x", Packed(memory, (0, 3), strides=(1, 9))).nbytes == 0
    assert device_array("x", Packed(memory, (4,), offset=32)).address == memory.address + 32


def test_a_library_that_refuses_the_one_protocol_is_asked_for_the_other(allocate: Allocate) -> None:
    """PyTorch raises for a bfloat16 tensor's __cuda_array_interface__, and gives DLPack."""

    class Both(Packed):
        @property
        def __cuda_array_interface__(self) -> dict[str, object]:
            raise TypeError("bfloat16 has no type string")

    assert device_array("x", Both(allocate(0, bytes(64)), (32,), bits=16)).nbytes == 64


def test_what_a_restore_refuses(allocate: Allocate, workdir: Path) -> None:
    memory, data = allocate(0, bytes(8192)), os.urandom(4096)
    save({"x": Interface(allocate(0, data)), "y": Interface(allocate(1, data))}, workdir)
    readonly = Interface(memory, (4096,))
    readonly.__cuda_array_interface__["data"] = (memory.address, True)
    refused: list[tuple[dict[str, object], str]] = [
        ({"x": readonly}, r"read-only"),
        ({"x": Packed(memory, (4096,), flags=1)}, r"read-only"),
        ({"x": Interface(memory, (4095,))}, r"4096 bytes in the image, its buffer has 4095"),
        ({"z": Interface(memory, (4096,))}, r"no stream 'z'"),
        ({"x": Interface(memory, (4096,)), "device/x": Packed(memory, (4096,), offset=4096)}, r"one stream"),
        ({"x": Interface(memory, (4096,)), "y": Packed(memory, (4096,), offset=4095)}, r"overlap"),
    ]
    for buffers, words in refused:
        with pytest.raises(ckptpipe.UsageError, match=words):
            restore(workdir / "a", buffers)
    assert memory.read() == bytes(8192)
    restore(workdir / "a", {"x": Interface(memory, (4096,)), "y": Packed(memory, (4096,), offset=4096)})
    assert memory.read() == data + data


def test_bad_bytes_are_found_where_they_have_arrived(allocate: Allocate, workdir: Path) -> None:
    data = os.urandom(MIB)
    memory = allocate(0, data)
    save({"x": Interface(memory)}, workdir)
    stored = next((workdir / "a").glob("data-*"))
    with open(stored, "r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))
    memory.write(bytes(MIB))
    with pytest.raises(ckptpipe.ImageCorrupt, match=r"device/x chunk (\d) .*offset 0"):
        restore(workdir / "a", {"x": Interface(memory)})


def test_a_copy_that_fails(world: SimWorld, allocate: Allocate, workdir: Path) -> None:
    memory = allocate(0, os.urandom(MIB))
    world.fault("cuMemcpyDtoHAsync", pid=os.getpid(), nth=2, error="CUDA_ERROR_UNKNOWN")
    with pytest.raises(ckptpipe.CkptpipeError, match=r"UNKNOWN"):
        save({"x": Interface(memory)}, workdir)
    assert not list(workdir.rglob("*-*"))
    save({"x": Interface(memory)}, workdir)
