"""Frames over a Unix socket: four bytes of length, big-endian, then one JSON object in UTF-8.

A frame may carry file descriptors (SCM_RIGHTS). Exactly a frame is read at a time, never a byte of the next
one, so that descriptors belong to the frame with which they came.
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

from ckptpipe.pipeline.controller.errors import ProtocolError

FRAME_MAX = 1 << 20  # bytes of one frame, without its length
DESCRIPTORS_MAX = 64  # with one frame; the kernel allows 253 (SCM_MAX_FD)

_LENGTH = struct.Struct(">I")
_READ = 64 << 10  # at a time: memory is taken for what has come, not for what was announced
_AT_ONCE = 4096
_ANCILLARY = socket.CMSG_SPACE(DESCRIPTORS_MAX * array.array("i").itemsize)


class Received:
    """One frame. It owns its descriptors: `close`, or use it as a context; `take` hands one over."""

    def __init__(self, values: dict[str, Any], descriptors: list[int]) -> None:
        self.values = values
        self.descriptors = descriptors

    def take(self) -> list[int]:
        """All descriptors, which are the caller's from now on."""
        taken, self.descriptors = self.descriptors, []
        return taken

    def close(self) -> None:
        for descriptor in self.take():
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Channel:
    """One end of a connection. One task may receive and others send; a cancelled `receive` loses nothing."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._sending = asyncio.Lock()
        self._broken = False
        self._header = bytearray()
        self._body = bytearray()
        self._need = -1  # of the body; -1: the length is not known yet
        self._descriptors: list[int] = []

    async def send(self, values: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """ProtocolError where the frame would be too large; OSError where the peer has gone."""
        frame = encode(values)
        async with self._sending:
            if self._broken:
                raise BrokenPipeError("half a frame was sent before")
            self._broken = True  # until all of it is out, whatever happens in between
            rest = memoryview(frame)
            ancillary = (
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            )
            while rest:
                try:
                    sent = self.socket.sendmsg([rest], ancillary, socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    await self._ready(self._loop().add_writer, self._loop().remove_writer)
                    continue
                rest, ancillary = rest[sent:], []
            self._broken = False

    def try_send(self, values: Mapping[str, Any]) -> bool:
        """Send a small frame where the socket takes it whole now. False: it did not, and nothing was sent."""
        frame = encode(values)
        if len(frame) > _AT_ONCE or self._broken or self._sending.locked():
            return False
        try:
            sent = self.socket.send(frame, socket.MSG_NOSIGNAL)
        except OSError:  # full, or the peer has gone: whoever receives sees that
            return False
        self._broken = sent != len(frame)  # a Unix socket takes a small message whole
        return not self._broken

    async def readable(self) -> None:
        """Wait until something comes, or the peer closes."""
        await self._ready(self._loop().add_reader, self._loop().remove_reader)

    async def receive(self) -> Received | None:
        """The next frame; None where the peer closed the connection between two frames."""
        while len(self._header) < _LENGTH.size:
            part = await self._read(_LENGTH.size - len(self._header))
            if not part:
                if not self._header and not self._descriptors:
                    return None
                raise ProtocolError("the connection ended within a frame")
            self._header += part
        if self._need < 0:
            (need,) = _LENGTH.unpack(self._header)
            if not 0 < need <= FRAME_MAX:
                raise ProtocolError(f"a frame of {need} bytes; 1 to {FRAME_MAX} are allowed")
            self._need = need
        while len(self._body) < self._need:
            part = await self._read(min(self._need - len(self._body), _READ))
            if not part:
                raise ProtocolError("the connection ended within a frame")
            self._body += part
        values = decode(bytes(self._body))
        received = Received(values, self._descriptors)
        self._header, self._body, self._need, self._descriptors = bytearray(), bytearray(), -1, []
        return received

    def close(self) -> None:
        self._broken = True
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []
        self.socket.close()

    async def _read(self, most: int) -> bytes:
        while True:
            try:
                data, ancillary, flags, _ = self.socket.recvmsg(most, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
                break
            except BlockingIOError:
                await self._ready(self._loop().add_reader, self._loop().remove_reader)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found = array.array("i")
                found.frombytes(content[: len(content) - len(content) % found.itemsize])
                self._descriptors += found
        if flags & socket.MSG_CTRUNC or len(self._descriptors) > DESCRIPTORS_MAX:
            raise ProtocolError(f"more than {DESCRIPTORS_MAX} descriptors with one frame")
        return data

    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def _ready(self, add: Callable[..., object], remove: Callable[..., object]) -> None:
        """Wait until the socket can be read or written."""
        ready: asyncio.Future[None] = self._loop().create_future()
        number = self.socket.fileno()
        if number < 0:
            raise BrokenPipeError("the connection was closed")

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        add(number, wake)
        try:
            await ready
        finally:
            remove(number)


def encode(values: Mapping[str, Any]) -> bytes:
    body = json.dumps(values, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(body) > FRAME_MAX:
        raise ProtocolError(f"a frame of {len(body)} bytes; {FRAME_MAX} is the most")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    """The object that a frame holds; ProtocolError for anything else."""
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        # The text of a peer is not repeated: it may hold what should not be in a log.
        raise ProtocolError(f"a frame that is no JSON ({type(error).__name__})") from None
    if type(found) is not dict:
        raise ProtocolError("a frame that is no JSON object")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return made
