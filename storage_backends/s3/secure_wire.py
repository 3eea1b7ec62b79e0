"""A wire over TLS: whatever goes over it is en- and decrypted by a thread, one at a time, and none while it is idle.

On the loop TLS would be one core's work for all connections together.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

from ckptpipe.pyx.receive import PIECE_BYTES
from ckptpipe.storage_backends.abc import Landing
from ckptpipe.storage_backends.s3.chunked import Chunked
from ckptpipe.storage_backends.s3.file_piece import FilePiece, shrank, unreadable
from ckptpipe.storage_backends.s3.hot_piece import hot_piece
from ckptpipe.storage_backends.s3.secure_body import SecureBody
from ckptpipe.storage_backends.s3.secure_stream import NotSent, SecureStream
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

T = TypeVar("T")


class SecureWire(Wire):
    """Made by `over`."""

    def __init__(self, stream: SecureStream, threads: Executor) -> None:
        super().__init__()
        self._stream = stream
        self._threads = threads
        self._job: asyncio.Future[None] | None = None  # what a thread does with the stream
        self._head = bytearray()  # what was read and belongs to nobody yet
        self._space = memoryview(bytearray(HEAD_READ))
        self._used = False
        self._between = False  # it is idle: nothing may come

    @classmethod
    async def over(cls, stream: SecureStream, threads: Executor) -> SecureWire:
        """Shake hands; ``stream`` is closed where that fails. OSError; ssl.SSLError where the certificate or the
        protocol is wrong. ``threads``: those that do everything over it."""
        wire = cls(stream, threads)
        try:
            await wire._by_thread(stream.handshake)
        except BaseException:
            stream.close()
            raise
        return wire

    @property
    def open(self) -> bool:
        stream = self._stream
        return not (stream.closed or stream.stopped or (self._between and not self._silent()))

    def _silent(self) -> bool:
        """Whether the server has sent nothing since the last answer, not even its end; its tickets do not count."""
        try:
            return not self._stream.read_now(self._space)
        except WireError:
            return False

    def bytes_moved(self) -> int:
        return self._stream.received + self._stream.sent - self._stream.unacknowledged()

    async def ask(self, request: bytes, body: Sequence[memoryview | FilePiece] = ()) -> Answer:
        if not self.open:
            raise StaleConnection("the connection is closed")
        self._between = False
        self._head.clear()
        self._answer = None
        try:
            await self._by_thread(lambda: self._exchange(request, body))
        except WireError as error:
            if self._used and self._answer is None and not self._head:
                raise StaleConnection(str(error)) from error
            raise
        finally:
            self._used = True
        answer = self._answer
        assert answer is not None
        return answer

    async def body(
        self, destination: memoryview | Sequence[Landing] | None, nbytes: int, crc32cs: Sequence[int] = ()
    ) -> None:
        answer = self._answer
        assert answer is not None
        if destination is None and answer.chunked:
            await self._by_thread(lambda: self._chunked(answer, nbytes or ERROR_MAX))
            return
        early = bytes(self._head[:nbytes])
        del self._head[: len(early)]
        if destination is None:
            answer.text += early
            answer.received = len(early)
            if answer.received < nbytes:
                await self._by_thread(lambda: self._document(answer, nbytes))
        elif isinstance(destination, memoryview):
            with destination[:nbytes] as memory:
                await self._receive(answer, SecureBody(self._stream, memory, crc32cs, early))
        else:
            await self._receive(answer, SecureBody(self._stream, destination, crc32cs, early))
        if self._head or self._stream.unread:
            answer.keep = False  # more came than the answer said

    async def _receive(self, answer: Answer, body: SecureBody) -> None:
        try:
            await self._by_thread(body.run)
        finally:
            answer.received, answer.crc32cs = body.done, body.crc32cs

    def idle(self) -> bool:
        self._between = True
        return not self._head and self.open

    def abort(self) -> None:
        self._stream.stop()
        if self._job is None:
            self._stream.close()

    async def closed(self) -> None:
        if self._job is not None:
            await asyncio.wait({self._job})
        self._stream.close()

    async def _by_thread(self, work: Callable[[], None]) -> None:
        """``work`` on a thread; when this ends, no thread is in it. The connection has ended then, where it was
        cancelled."""
        assert self._job is None
        submitted = self._threads.submit(work)
        self._job = job = asyncio.wrap_future(submitted)
        try:
            await asyncio.wait({job})
        finally:
            if not job.done():
                self._stream.stop()
                submitted.cancel()  # where no thread was free
            try:
                await shielded(ended(job))
            finally:
                self._job = None
                if self._stream.stopped:
                    self._stream.close()
        job.result()

    # On a thread.

    def _exchange(self, request: bytes, body: Sequence[memoryview | FilePiece]) -> None:
        whole = False
        try:
            whole = self._send(request, body)
        except NotSent:
            if self._stream.stopped:
                raise
            # The end of the connection, or an answer before it, is there to be read.
        finally:
            if not whole:
                self._stream.reset_at_end()
        while self._answer is None:
            self._head += self._space[: self._stream.read(self._space)]
            self._answer = take_head(self._head)
        if not whole:
            if self._answer.status < 300:
                raise WireError("the server answered before it had the whole request")
            self._answer.keep = False

    def _send(self, request: bytes, body: Sequence[memoryview | FilePiece]) -> bool:
        """False where an answer ended it. StorageError where a file has become shorter."""
        if not self._write(memoryview(request)):
            return False
        for item in body:
            sent = self._send_file(item) if isinstance(item, FilePiece) else self._send_memory(item)
            if not sent:
                return False
        return True

    def _send_memory(self, memory: memoryview) -> bool:
        for start in range(0, len(memory), PIECE_BYTES):
            with memory[start : start + PIECE_BYTES] as piece:
                if not self._write(piece):
                    return False
        return True

    def _send_file(self, item: FilePiece) -> bool:
        file, sent = item.file, 0
        with memoryview(hot_piece()) as hot:
            while sent < item.nbytes:
                with hot[: min(PIECE_BYTES, item.nbytes - sent)] as room:
                    try:
                        count = os.preadv(file.fileno(), [room], item.offset + sent)
                    except OSError as error:
                        raise unreadable(file, error) from error
                if not count:
                    raise shrank(file, os.fstat(file.fileno()).st_size)
                with hot[:count] as piece:
                    if not self._write(piece):
                        return False
                sent += count
        return True

    def _write(self, piece: memoryview) -> bool:
        return self._stream.write(piece, self._answered)

    def _answered(self) -> bool:
        """Read what comes while a request is sent: whether it is an answer, which ends the sending."""
        count = self._stream.read_now(self._space)
        self._head += self._space[:count]
        self._answer = take_head(self._head)
        return self._answer is not None

    def _document(self, answer: Answer, nbytes: int) -> None:
        try:
            while (missing := nbytes - answer.received) > 0:
                count = self._stream.read(self._space[:missing], missing)
                answer.text += self._space[:count]
                answer.received += count
        finally:
            self._stream.expect_anything()

    def _chunked(self, answer: Answer, most: int) -> None:
        """A document in chunks, into the answer's text: to its end, ``most`` bytes or the connection's end."""
        answer.keep = False
        chunks = Chunked()
        try:
            chunks.feed(self._head, answer.text)
            while not chunks.done and len(answer.text) <= most:
                self._head += self._space[: self._stream.read(self._space)]
                chunks.feed(self._head, answer.text)
        except (ValueError, WireError):
            pass  # what came may tell enough
        answer.cut = not chunks.done
