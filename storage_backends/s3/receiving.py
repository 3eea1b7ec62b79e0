"""The bytes of one answer's body on their way out of a TCP socket, received by a thread of their own.

On the loop a body costs a wake-up for every few hundred KiB, and its bytes have left the cache before a worker takes
their checksum and the kernel writes them to a file. Here each piece is received, checksummed and written by one
thread, without the GIL.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Executor

from ckptpipe.pyx.errors import IoError, io_error
from ckptpipe.pyx.receive import PIECE_BYTES, Body
from ckptpipe.storage_backends.abc import Landing

_own = threading.local()  # each thread's piece of a body that is kept nowhere in memory


class Receiving:
    """``nbytes`` from a descriptor of its own of the (non-blocking) socket ``fileno`` to ``target``; ``early`` of them
    are in hand. ``done`` and ``crc32c``, which goes on from the one given, are right once it has ended, however that
    was. Begun once; ends the connection where it is stopped."""

    def __init__(
        self, fileno: int, nbytes: int, target: memoryview | Landing, crc32c: int, early: bytes
    ) -> None:
        self._target = target
        self._early = early
        through = isinstance(target, Landing)
        file, offset = (target.fd, target.offset) if isinstance(target, Landing) else (-1, 0)
        self._socket = socket.socket(fileno=os.dup(fileno))
        self._body = Body(
            self._socket.fileno(), nbytes, crc32c=crc32c, through=through, file=file, offset=offset
        )

    @property
    def done(self) -> int:
        return self._body.done

    @property
    def crc32c(self) -> int:
        return self._body.crc32c

    @property
    def arrived(self) -> int:
        """Bytes that have come; may be read meanwhile."""
        return self._body.arrived

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
            self._body.stop()
            if job.cancel():  # no thread was free
                self._socket.close()
            else:
                try:
                    self._socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # the peer was quicker, or the thread has ended

        return asyncio.wrap_future(job), stop

    def _run(self) -> bool:
        target = self._target
        try:
            if isinstance(target, Landing):
                return self._body.run(_piece(), self._early)
            return self._body.run(target, self._early)
        except IoError as error:
            assert isinstance(target, Landing)
            raise io_error(error.errno or 0, error.operation, target.path) from None
        finally:
            self._socket.close()


def _piece() -> bytearray:
    try:
        piece: bytearray = _own.piece
    except AttributeError:
        piece = _own.piece = bytearray(PIECE_BYTES)
    return piece
