"""The bytes of one request on their way into a TCP socket, sent by a thread of their own, from memory or from files.

A write of megabytes is a copy that takes as long as the kernel needs for it: on the loop it would hold everything
else up, through a transport it comes with a wake-up for every few hundred KiB. Here the kernel gets all that is
left in one call, and the thread sleeps, without the GIL, until a good share of the socket's buffer is free. What a
file has in the page cache is not copied at all (sendfile(2)).
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress

from ckptpipe.storage_backends.errors import StorageError
from ckptpipe.storage_backends.s3.file_piece import FilePiece, shrank, unreadable

_LOOK = 100  # milliseconds after which a thread that waits looks whether it shall stop
_TOGETHER = 64  # ranges given to one call (sendmsg(2) takes IOV_MAX, 1024)
_COPIED = 1 << 18  # bytes read at a time from a file system without sendfile


class Sending:
    """``ranges`` through a descriptor of its own of the (non-blocking) socket ``fileno``. Begun once."""

    def __init__(self, fileno: int, ranges: Sequence[bytes | memoryview | FilePiece]) -> None:
        self._socket = socket.socket(fileno=os.dup(fileno))
        self._ranges = [
            item if isinstance(item, FilePiece) else memoryview(item) for item in ranges if len(item)
        ]
        self._stopped = False
        self.sent = 0  # bytes that the kernel has taken

    def begin(self, threads: Executor) -> tuple[asyncio.Future[bool], Callable[[], object]]:
        """Send on one of ``threads``: a future that is True where all was sent, and what makes it end soon. Nobody
        may cancel the future: the thread has the memory until it is done."""
        try:
            job = threads.submit(self._run)
        except BaseException:
            self._close()
            raise

        def stop() -> None:
            self._stopped = True
            if job.cancel():  # no thread was free
                self._close()

        return asyncio.wrap_future(job), stop

    def _run(self) -> bool:
        """An error of the connection ends it, too: whoever reads from the connection learns it. StorageError where a
        file has become shorter; the connection is ended then."""
        try:
            return self._send_all()
        except StorageError:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            raise
        except OSError:
            return False
        finally:
            self._close()

    def _close(self) -> None:
        """Let go of the memory and the descriptor."""
        ranges, self._ranges = self._ranges, []
        for item in ranges:
            if isinstance(item, memoryview):
                item.release()
        self._socket.close()

    def _send_all(self) -> bool:
        waiting = select.poll()
        waiting.register(self._socket, select.POLLOUT)
        first, start = 0, 0
        while first < len(self._ranges):
            if self._stopped:
                return False
            try:
                count = self._send_some(first, start)
            except BlockingIOError:
                count = 0
            self.sent += count
            start += count
            while first < len(self._ranges) and start >= len(self._ranges[first]):
                start -= len(self._ranges[first])
                first += 1
            if first < len(self._ranges):
                waiting.poll(_LOOK)
        return True

    def _send_some(self, first: int, start: int) -> int:
        """From byte ``start`` of range ``first`` as much as the kernel takes."""
        item = self._ranges[first]
        if isinstance(item, FilePiece):
            return self._send_file(item, start)
        together: list[memoryview] = []
        flags = 0
        for following in self._ranges[first + 1 : first + _TOGETHER]:
            if isinstance(following, FilePiece):
                flags = socket.MSG_MORE  # a head fills a segment together with what comes from the file
                break
            together.append(following)
        with item[start:] as rest:
            return self._socket.sendmsg([rest, *together], (), flags)

    def _send_file(self, piece: FilePiece, start: int) -> int:
        at, nbytes, file = piece.offset + start, piece.nbytes - start, piece.file.fileno()
        try:
            count = os.sendfile(self._socket.fileno(), file, at, nbytes)
        except (BlockingIOError, ConnectionError):
            raise
        except (
            OSError
        ):  # of the connection, or a file that cannot be spliced, or not be read: sending it tells
            try:
                copied = os.pread(file, min(nbytes, _COPIED), at)
            except OSError as error:
                raise unreadable(piece.file, error) from error
            count = self._socket.send(copied) if copied else 0
        if count == 0:
            raise shrank(piece.file, os.fstat(file).st_size)
        return count
