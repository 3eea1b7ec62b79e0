"""Bytes of a stream socket on their way into memory and files."""

from __future__ import annotations

import errno
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptpipe.pyx.checksum import crc32c
from ckptpipe.pyx.receive import PIECE_BYTES, Body

DATA = random.Random(1).randbytes(3 * PIECE_BYTES + 1001)


@contextmanager
def sent(data: bytes, *, then_close: bool = False) -> Iterator[socket.socket]:
    """The receiving end of a TCP connection over which ``data`` comes, in writes of odd sizes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()

    def send() -> None:
        try:
            for start in range(0, len(data), 100_003):
                theirs.sendall(data[start : start + 100_003])
            if then_close:
                theirs.close()
        except OSError:
            pass  # the test has what it wanted

    thread = threading.Thread(target=send)
    thread.start()
    ours.setblocking(False)
    try:
        yield ours
    finally:
        ours.close()
        thread.join()
        theirs.close()


def into_memory(ours: socket.socket, path: Path, early: bytes) -> tuple[Body, bytes]:
    memory = bytearray(len(DATA))
    body = Body(ours.fileno(), len(DATA))
    assert body.run(memory, early) is True
    return body, bytes(memory)


def into_file(ours: socket.socket, path: Path, early: bytes) -> tuple[Body, bytes]:
    path.write_bytes(b"before")
    with path.open("r+b") as file:
        body = Body(ours.fileno(), len(DATA), through=True, file=file.fileno(), offset=1234)
        assert body.run(bytearray(PIECE_BYTES), early) is True
    found = path.read_bytes()
    assert found[:1234] == b"before" + bytes(1228)
    return body, found[1234:]


@pytest.mark.parametrize("way", [into_memory, into_file])
@pytest.mark.parametrize("early", [0, 777])
def test_all_of_it(
    way: Callable[[socket.socket, Path, bytes], tuple[Body, bytes]], early: int, tmp_path: Path
) -> None:
    with sent(DATA[early:] + b"the next answer") as ours:
        body, found = way(ours, tmp_path / "file", DATA[:early])
        assert found == DATA
        assert (body.done, body.arrived, body.crc32c) == (len(DATA), len(DATA) - early, crc32c(DATA))
        ours.setblocking(True)
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
        assert ours.recv(15, socket.MSG_WAITALL) == b"the next answer"


def test_nowhere_and_on_from_a_checksum() -> None:
    with sent(DATA) as ours:
        body = Body(ours.fileno(), len(DATA), crc32c=crc32c(b"before"), through=True)
        assert body.run(bytearray(PIECE_BYTES)) is True
        assert body.crc32c == crc32c(b"before" + DATA)


def test_an_end_in_the_middle_keeps_what_came(tmp_path: Path) -> None:
    with sent(DATA[:-500], then_close=True) as ours, (tmp_path / "file").open("wb") as file:
        body = Body(ours.fileno(), len(DATA), through=True, file=file.fileno())
        with pytest.raises(ConnectionError, match="closed"):
            body.run(bytearray(PIECE_BYTES))
        assert (body.done, body.crc32c) == (len(DATA) - 500, crc32c(DATA[:-500]))
    assert (tmp_path / "file").read_bytes() == DATA[:-500]


def test_it_stops_from_another_thread() -> None:
    with sent(DATA[:-500]) as ours:
        body = Body(ours.fileno(), len(DATA))
        ended: list[bool] = []
        memory = bytearray(len(DATA))
        thread = threading.Thread(target=lambda: ended.append(body.run(memory)))
        thread.start()
        while body.arrived < len(DATA) - 500:
            thread.join(0.001)
        body.stop()
        thread.join()
        assert ended == [False]
        assert (body.done, memory[: body.done]) == (len(DATA) - 500, DATA[:-500])


def test_a_file_that_takes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with sent(DATA) as ours, (tmp_path / "file").open("rb") as file:
        body = Body(ours.fileno(), len(DATA), through=True, file=file.fileno())
        with pytest.raises(OSError, match="write") as raised:
            body.run(bytearray(PIECE_BYTES))
        assert raised.value.errno == errno.EBADF
        assert (body.done, body.crc32c) == (0, 0)


def test_a_full_device() -> None:
    file = os.open("/dev/full", os.O_WRONLY)
    with sent(DATA) as ours:
        body = Body(ours.fileno(), len(DATA), through=True, file=file)
        with pytest.raises(OSError, match="write") as raised:
            body.run(bytearray(PIECE_BYTES))
        assert raised.value.errno == errno.ENOSPC
    os.close(file)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="through a buffer"):
        Body(0, 10, file=1)
    with pytest.raises(ValueError, match="10 bytes"):
        Body(0, 10).run(bytearray(9))
    with pytest.raises(ValueError, match="10 bytes"):
        Body(0, 10).run(bytearray(20), bytes(11))
    with pytest.raises(ValueError, match="10 bytes"):
        Body(0, 10, through=True).run(bytearray(PIECE_BYTES - 1))
    with pytest.raises(BufferError):
        Body(0, 10).run(bytes(10))
    with sent(DATA) as ours:
        body = Body(ours.fileno(), 10)
        body.run(bytearray(10))
        with pytest.raises(RuntimeError, match="once"):
            body.run(bytearray(10))
