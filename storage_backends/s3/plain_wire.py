"""A wire over TCP: bodies are sent and received by threads of their own (`Sending`, `Receiving`), and what is small
by the loop, which reads straight into the caller's memory (`asyncio.BufferedProtocol`).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import cast

from ckptpipe.storage_backends.abc import Landing
from ckptpipe.storage_backends.s3.chunked import Chunked
from ckptpipe.storage_backends.s3.file_piece import FilePiece
from ckptpipe.storage_backends.s3.receiving import Receiving
from ckptpipe.storage_backends.s3.sending import Sending
from ckptpipe.storage_backends.s3.tcp import LowWater, reset_at_end, unacknowledged
from ckptpipe.storage_backends.s3.wire import (
    ERROR_MAX,
    HEAD_READ,
    Answer,
    StaleConnection,
    Wire,
    WireError,
    ended,
    take_head,
)
from ckptpipe.storage_backends.shielded import shielded

# A body is read when this much of it has come, or all that is missing: at every segment the loop would wake for
# 64 KiB. No more, so that a slow connection still shows its progress.
_LOW_WATER = 1 << 18
_BESIDE_HEAD = 1 << 16  # a body up to this size is not worth a thread


class PlainWire(Wire, asyncio.BufferedProtocol):
    def __init__(self, senders: Executor) -> None:
        """``senders``: whose threads send and receive bodies."""
        super().__init__()
        self._senders = senders
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._head = bytearray()
        self._space = memoryview(bytearray(HEAD_READ))
        self._view: memoryview | None = None  # of the destination, while a body goes there
        self._lent: memoryview | None = None  # the piece of it that the loop reads into
        self._want = 0  # bytes of the body that are still to come
        self._begun: asyncio.Future[Answer] | None = None
        self._done: asyncio.Future[None] | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._used = False
        self._into_view = False
        self._moved = 0
        self._sending: Sending | None = None  # while a request's body is on its way
        self._receiving: Receiving | None = None  # while an answer's is, on a thread
        self._socket: socket.socket | None = None  # the transport's
        self._low_water: LowWater | None = None  # the socket's

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def bytes_moved(self) -> int:
        moved = self._moved
        if self._receiving is not None:
            moved += self._receiving.arrived
        if self._sending is not None:
            moved += self._sending.sent
            if self._socket is not None and self.open:
                moved -= unacknowledged(self._socket)
        return moved

    # The caller's side.

    async def ask(self, request: bytes, body: Sequence[memoryview | FilePiece] = ()) -> Answer:
        if self._transport is None or self._transport.is_closing():
            raise StaleConnection("the connection is closed")
        self._head.clear()
        self._answer = None
        begun: asyncio.Future[Answer] = self._loop.create_future()
        self._begun = begun
        views = [item for item in body if not isinstance(item, FilePiece)]
        try:
            if len(views) < len(body) or sum(map(len, views)) > _BESIDE_HEAD:
                return await self._ask_with(request, body)
            self._transport.write(b"".join((request, *views)))
            return await begun
        finally:
            self._begun = None
            self._used = True
            if begun.done() and not begun.cancelled():
                begun.exception()  # seen, also where something else is raised

    async def _ask_with(self, request: bytes, body: Sequence[memoryview | FilePiece]) -> Answer:
        begun = self._begun
        assert begun is not None and self._socket is not None
        self._sending = sending = Sending(self._socket.fileno(), [request, *body])
        sent, stop = sending.begin(self._senders)
        try:
            await asyncio.wait((begun, sent), return_when=asyncio.FIRST_COMPLETED)
            # Where sending failed, the end of the connection, or an answer before it, comes by itself.
            answer = await begun
            if answer.status < 300:
                await sent  # the server has it all: the thread is about to see that, too
            return answer
        finally:
            if not sent.done():
                stop()
            complete = await shielded(_outcome(sent))
            self._sending = None
            if not complete:
                if self._answer is not None:
                    self._answer.keep = False
                if self._socket is not None and self.open:
                    reset_at_end(self._socket)

    async def body(
        self, destination: memoryview | Sequence[Landing] | None, nbytes: int, crc32cs: Sequence[int] = ()
    ) -> None:
        answer = self._answer
        assert answer is not None and self._transport is not None
        if isinstance(destination, memoryview):
            if nbytes > _BESIDE_HEAD and crc32cs:
                with destination[:nbytes] as memory:
                    await self._by_thread(answer, memory, nbytes, crc32cs)
                return
        elif destination is not None:
            await self._by_thread(answer, destination, nbytes, crc32cs)
            return
        if destination is None and answer.chunked:
            await self._chunked(answer, nbytes or ERROR_MAX)
            return
        self._want = nbytes
        self._view = destination
        early = len(self._head)
        if early:
            taken = min(early, nbytes)
            with memoryview(self._head) as head:
                if destination is not None:
                    destination[:taken] = head[:taken]
                else:
                    answer.text += head[:taken]
            answer.received = taken
            self._want -= taken
            del self._head[:taken]
        try:
            if self._want:
                self._done = self._loop.create_future()
                if destination is not None:
                    self._set_low_water(min(self._want, _LOW_WATER))
                self._transport.resume_reading()
                await self._done
        finally:
            self._done = None
            self._view = None
            self._let_go()
            self._set_low_water(1)
        if self._head:
            answer.keep = False  # more came than the answer said

    async def _by_thread(
        self, answer: Answer, target: memoryview | Sequence[Landing], nbytes: int, crc32cs: Sequence[int]
    ) -> None:
        if self._socket is None or not self.open:
            raise WireError("the connection is closed")
        early = bytes(self._head[:nbytes])
        del self._head[: len(early)]
        if self._head:
            answer.keep = False  # more came than the answer said
        self._receiving = receiving = Receiving(self._socket.fileno(), target, crc32cs, early)
        came, stop = receiving.begin(self._senders)
        try:
            await asyncio.wait({came})
        finally:
            if not came.done():
                stop()
            await shielded(ended(came))
            self._receiving = None
            self._moved += receiving.arrived
            answer.received, answer.crc32cs = receiving.done, receiving.crc32cs
        try:
            whole = came.result()
        except ConnectionError as error:
            raise WireError(str(error)) from error
        assert whole

    async def _chunked(self, answer: Answer, most: int) -> None:
        """A document in chunks, into the answer's text: to its end, ``most`` bytes or the connection's end."""
        answer.keep = False
        chunks = Chunked()
        try:
            chunks.feed(self._head, answer.text)
            while not chunks.done and len(answer.text) <= most:
                self._done = self._loop.create_future()
                self._want = -1
                assert self._transport is not None
                self._transport.resume_reading()
                await self._done
                chunks.feed(self._head, answer.text)
        except (ValueError, WireError):
            pass  # what came may tell enough
        finally:
            self._done = None
            self._want = 0
        answer.cut = not chunks.done

    def idle(self) -> bool:
        if self._head or self._transport is None or self._transport.is_closing():
            return False
        self._answer = None  # nothing may come
        self._transport.resume_reading()
        return True

    def abort(self) -> None:
        self._view = None
        self._want = 0
        if self._transport is not None:
            self._transport.abort()

    async def closed(self) -> None:
        if self._transport is not None:
            await asyncio.shield(self._closed)

    def _let_go(self) -> None:
        """Of the piece lent to the loop: not left to frames, which an error keeps."""
        lent, self._lent = self._lent, None
        if lent is not None:
            try:
                lent.release()
            except BufferError:
                pass  # the loop is in the middle of a read, and lets go by itself

    # The loop's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class
        self._socket = made = transport.get_extra_info("socket")
        self._low_water = LowWater(made)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._view is not None and self._want > 0:
            self._into_view = True
            assert self._answer is not None
            start = self._answer.received
            self._let_go()
            self._lent = self._view[start : start + self._want]
            return self._lent
        self._into_view = False
        return self._space

    def buffer_updated(self, nbytes: int) -> None:
        self._moved += nbytes
        if self._into_view:
            self._arrived(nbytes)
            return
        self._head += self._space[:nbytes]
        if self._begun is not None and not self._begun.done():
            self._parse()
        elif self._done is not None and not self._done.done():
            answer = self._answer
            assert answer is not None
            if self._want < 0:  # a chunk: whoever waits looks
                self._done.set_result(None)
                return
            taken = min(len(self._head), self._want)
            answer.text += self._head[:taken]
            del self._head[:taken]
            self._arrived(taken)
        elif self._answer is None:
            self._lost(WireError("bytes came that nobody asked for"))
        else:
            # Between head and body: wait for the caller to say where the body goes.
            self._pause()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)
        self._socket = self._low_water = None
        self._fail(
            WireError(
                f"the connection was closed ({type(error).__name__})"
                if error
                else "the connection was closed"
            )
        )
        self._view = None

    # Parts.

    def _arrived(self, nbytes: int) -> None:
        answer = self._answer
        if answer is None or self._want <= 0:
            return
        answer.received += nbytes
        self._want -= nbytes
        if self._low_water is not None and 0 < self._want < self._low_water.nbytes:
            self._set_low_water(self._want)
        if self._want == 0 and self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _set_low_water(self, nbytes: int) -> None:
        if self._low_water is not None and self.open:
            self._low_water.set(nbytes)

    def _pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _parse(self) -> None:
        try:
            answer = take_head(self._head)
        except WireError as error:
            self._lost(error)
            return
        if answer is None:
            return
        self._answer = answer
        self._pause()
        assert self._begun is not None
        self._begun.set_result(answer)

    def _lost(self, error: WireError) -> None:
        self._fail(error)
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: WireError) -> None:
        if self._begun is not None and not self._begun.done():
            stale = self._used and not self._head
            self._begun.set_exception(StaleConnection(str(error)) if stale else error)
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


async def _outcome(sent: asyncio.Future[bool]) -> bool:
    await asyncio.wait({sent})
    return not sent.cancelled() and sent.result()
