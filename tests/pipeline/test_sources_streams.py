"""Standard input, buffers and synthetic bytes as sources."""

from __future__ import annotations

import array
import asyncio
import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.errors import SourceError, UsageError
from ckptpipe.storage_backends.memory import forget
from tests.pipeline.runs import MIB, SMALL, run
from tests.pipeline.trees import write


def saved_bytes(spec: ckptpipe.SourceSpec, stream: str) -> bytes:
    """What a save of ``spec`` into memory gives back."""

    async def main() -> bytes:
        result = await ckptpipe.save(spec, to="memory:streams", name="i", settings=SMALL)
        buffer = bytearray(result.raw_bytes)
        await ckptpipe.restore(result.sinks[0].image_url, buffers={stream: buffer}, settings=SMALL)
        return bytes(buffer)

    try:
        return run(main())
    finally:
        forget("streams")


def feeding(data: bytes, read_all: Callable[[int], bytes], pieces: int = 40_001) -> bytes:
    """Run ``read_all(fd)`` while a thread writes ``data`` into the pipe piece by piece."""
    reader, writer = os.pipe()

    def feed() -> None:
        with open(writer, "wb", buffering=0) as pipe:
            for at in range(0, len(data), pieces):
                pipe.write(data[at : at + pieces])

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        return read_all(reader)
    finally:
        os.close(reader)
        thread.join()


@pytest.mark.parametrize("size", [0, 1, SMALL.chunk_bytes, 3 * MIB + 4097])
def test_a_pipe(size: int) -> None:
    data = os.urandom(size)
    spec = lambda fd: ckptpipe.SourceSpec("stdin", {"name": "dump", "fd": fd})  # noqa: E731
    assert feeding(data, lambda fd: saved_bytes(spec(fd), "dump")) == data


@pytest.mark.parametrize("start", [0, 4097])
def test_a_redirected_file_is_read_from_where_it_stands(workdir: Path, start: int) -> None:
    path = write(workdir / "file", os.urandom(MIB + 17))
    with path.open("rb") as file:
        file.seek(start)
        os.lseek(file.fileno(), start, os.SEEK_SET)
        spec = ckptpipe.SourceSpec("stdin", {"fd": file.fileno()})
        assert saved_bytes(spec, "stdin") == path.read_bytes()[start:]


def test_dev_null() -> None:
    with open("/dev/null", "rb") as file:
        assert saved_bytes(ckptpipe.SourceSpec("stdin", {"fd": file.fileno()}), "stdin") == b""


def test_a_closed_standard_input() -> None:
    """Its number may long belong to another file, such as the loop's own epoll."""
    script = (
        "import ckptpipe\n"
        "try: ckptpipe.save_blocking('-', to='null:')\n"
        "except ckptpipe.SourceError as error: print(error)\n"
    )
    command = ["/bin/sh", "-c", 'exec "$0" -c "$1" <&-', sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert "standard input cannot be read" in done.stdout, done


def test_a_descriptor_that_is_none_and_a_directory(workdir: Path) -> None:
    with pytest.raises(SourceError, match="cannot be read"):
        saved_bytes(ckptpipe.SourceSpec("stdin", {"fd": 100_000}), "stdin")
    fd = os.open(workdir, os.O_RDONLY)
    with pytest.raises(SourceError, match="is a directory"):
        saved_bytes(ckptpipe.SourceSpec("stdin", {"fd": fd}), "stdin")
    os.close(fd)


def test_a_writer_that_never_ends_can_be_cancelled() -> None:
    reader, writer = os.pipe()

    async def main() -> None:
        spec = ckptpipe.SourceSpec("stdin", {"fd": reader})
        told = asyncio.Event()
        task = asyncio.create_task(
            ckptpipe.save(spec, to="memory:endless", settings=SMALL, progress=lambda _: told.set())
        )
        await told.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    os.close(reader)
    os.close(writer)
    forget("endless")


def test_dash_is_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptpipe.pipeline.build import source_spec

    assert source_spec("-").kind == source_spec(["-"]).kind == "stdin"
    assert source_spec(["-", "x"]).kind == "files"


def test_buffers_of_many_kinds() -> None:
    matrix = memoryview(bytearray(os.urandom(6 * 7 * 8))).cast("d", shape=[6, 7])
    buffers = {"bytes": b"abc", "array": array.array("i", range(1000)), "matrix": matrix}

    async def main() -> None:
        result = await ckptpipe.save(buffers, to="memory:kinds", name="i", settings=SMALL)
        into = {"bytes": bytearray(3), "array": array.array("i", bytes(4000)), "matrix": bytearray(336)}
        await ckptpipe.restore(result.sinks[0].image_url, buffers=into, settings=SMALL)
        assert into["bytes"] == b"abc" and into["array"] == buffers["array"]
        assert bytes(into["matrix"]) == bytes(matrix)

    run(main())
    forget("kinds")


@pytest.mark.parametrize(
    ("buffers", "problem"),
    [
        ({"a": "text"}, "contiguous"),
        ({"a": memoryview(bytes(100))[::2]}, "contiguous"),
        ({"../a": b""}, "cannot name a stream"),
        ({"/a": b""}, "cannot name a stream"),
        ({"": b""}, "cannot name a stream"),
    ],
)
def test_buffers_that_cannot_be_saved(buffers: dict[str, object], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        run(ckptpipe.save(buffers, to="memory:bad", settings=SMALL))


def test_an_array_in_fortran_order_is_refused_both_ways() -> None:
    """Its bytes in memory, put into an array in C's order, are another matrix."""
    testbuffer = pytest.importorskip("_testbuffer")  # CPython's own; numpy leaves threads behind
    flags = testbuffer.ND_FORTRAN | testbuffer.ND_WRITABLE
    matrix = testbuffer.ndarray(list(range(6)), shape=[2, 3], format="B", flags=flags)
    with pytest.raises(UsageError, match=r"'m' cannot be read .* C order"):
        run(ckptpipe.save({"m": matrix}, to="memory:order", settings=SMALL))

    async def main() -> None:
        result = await ckptpipe.save({"m": bytes(6)}, to="memory:order", name="i", settings=SMALL)
        with pytest.raises(UsageError, match=r"'m' cannot be written as contiguous bytes.* C order"):
            await ckptpipe.restore(result.sinks[0].image_url, buffers={"m": matrix}, settings=SMALL)

    run(main())
    forget("order")


def test_a_buffer_is_free_again_after_the_save() -> None:
    data = bytearray(os.urandom(MIB))
    run(ckptpipe.save({"a": data}, to="null:", settings=SMALL))
    data.extend(b"x")  # BufferError while anybody holds it
    forget()


@pytest.mark.parametrize("pattern", ["random", "zeros"])
def test_synthetic_bytes(pattern: str) -> None:
    spec = ckptpipe.SourceSpec("synthetic", {"bytes": 3 * MIB + 5, "pattern": pattern})
    result = run(ckptpipe.save(spec, to="memory:synthetic", settings=SMALL))
    assert result.raw_bytes == 3 * MIB + 5 and result.chunks == 49
    assert result.zero_chunks == (49 if pattern == "zeros" else 0)
    forget("synthetic")
    with pytest.raises(UsageError, match="random, zeros"):
        run(ckptpipe.save(ckptpipe.SourceSpec("synthetic", {"bytes": 1, "pattern": "?"}), to="null:"))


class Named(ctypes.Structure):
    """Its format has an O in it, which is no type."""

    _fields_ = [("O", ctypes.c_int)]


class Holding(ctypes.Structure):
    _fields_ = [("number", ctypes.c_long), ("some", ctypes.py_object)]


def test_buffers_of_python_objects_are_refused(workdir: Path) -> None:
    """What lies in them are addresses, of no use to anybody else."""
    for buffer in ((ctypes.py_object * 3)(), Holding()):
        with pytest.raises(UsageError, match=r"'a' cannot be read .*references to Python objects"):
            run(ckptpipe.save({"a": buffer}, to="memory:", settings=SMALL))
        image = {"a": bytes(ctypes.sizeof(buffer))}
        run(ckptpipe.save(image, to=workdir, name="i", overwrite=True, settings=SMALL))
        with pytest.raises(UsageError, match=r"'a' cannot be written .*references to Python objects"):
            run(ckptpipe.restore(str(workdir / "i"), buffers={"a": buffer}, settings=SMALL))
    run(ckptpipe.save({"a": Named(7)}, to=workdir, name="named", settings=SMALL))
