"""The bytes of one answer's body on their way out of a TCP socket, received by a thread of their own.

On the loop a body costs a wake-up for every few hundred KiB, and its bytes have left the cache before a worker takes
their checksum and the kernel writes them to a file. Here each piece is received, checksummed and written by one
thread, without the GIL.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress

from ckptpipe.pyx.errors import IoError, io_error
from ckptpipe.pyx.receive import Body
from ckptpipe.storage_backends.abc import Landing
from ckptpipe.storage_backends.s3.hot_piece import hot_piece


class Receiving:
    """A body from a descriptor of its own of the (non-blocking) socket ``fileno`` to ``target``; ``early`` of it is in
    hand. ``done`` bytes and ``crc32cs``, which go on from those given, are right once it has ended, however that was.
    Begun once; ends the connection where it is stopped."""

    def __init__(
        self, fileno: int, target: memoryview | Sequence[Landing], crc32cs: Sequence[int], early: bytes
    ) -> None:
        self._early = early
        self._socket = socket.socket(fileno=os.dup(fileno))
        number = self._socket.fileno()
        self._parts: list[tuple[memoryview | Landing, Body]]
        if isinstance(target, memoryview):
            self._parts = [(target, Body(number, len(target), crc32c=crc32cs[0]))]
        else:
            self._parts = [
                (to, Body(number, to.nbytes, crc32c=crc32c, through=True, file=to.fd, offset=to.offset))
                for to, crc32c in zip(target, crc32cs, strict=True)
            ]

    @property
    def done(self) -> int:
        return sum(body.done for _, body in self._parts)

    @property
    def crc32cs(self) -> list[int]:
        return [body.crc32c for _, body in self._parts]

    @property
    def arrived(self) -> int:
        """Bytes that have come; may be read meanwhile."""
        return sum(body.arrived for _, body in self._parts)

    def begin(self, threads: Executor) -> tuple[asyncio.Future[bool], Callable[[], object]]:
        """Receive on one of ``threads``: a future that is True where all came, and what makes it end soon. Nobody
        may cancel the future: the thread has memory and file until it is done.

        ConnectionError; IoError of the file."""
        try:
            job = threads.submit(self._run)
        except BaseException:
            self._socket.close()
            raise

        def stop() -> None:
            for _, body in self._parts:
                body.stop()
            if job.cancel():  # no thread was free
                self._socket.close()
            else:
                with suppress(OSError):  # the peer was quicker, or the thread has ended
                    self._socket.shutdown(socket.SHUT_RDWR)

        return asyncio.wrap_future(job), stop

    def _run(self) -> bool:
        early = self._early
        try:
            for target, body in self._parts:
                memory = target if isinstance(target, memoryview) else hot_piece()
                nbytes = target.nbytes
                try:
                    whole = body.run(memory, early[:nbytes])
                except IoError as error:
                    assert isinstance(target, Landing)
                    raise io_error(error.errno or 0, error.operation, target.path) from None
                if not whole:
                    return False
                early = early[nbytes:]
            return True
        finally:
            self._socket.close()
