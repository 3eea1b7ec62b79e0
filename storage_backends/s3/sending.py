"""The bytes of one request on their way into a TCP socket, sent by a thread of their own.

A write of megabytes is a copy that takes as long as the kernel needs for it: on the loop it would hold everything
else up, through a transport it comes with a wake-up for every few hundred KiB. Here the kernel gets all that is
left in one call, and the thread sleeps, without the GIL, until a good share of the socket's buffer is free.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

_LOOK = 100  # milliseconds after which a thread that waits looks whether it shall stop
_TOGETHER = 64  # ranges given to one call (sendmsg(2) takes IOV_MAX, 1024)


class Sending:
    """``ranges`` through a descriptor of its own of the (non-blocking) socket ``fileno``. Begun once."""

    def __init__(self, fileno: int, ranges: Sequence[bytes | memoryview]) -> None:
        self._socket = socket.socket(fileno=os.dup(fileno))
        self._ranges = [memoryview(item) for item in ranges if len(item)]
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
        """An error of the connection ends it, too: whoever reads from the connection learns it."""
        try:
            return self._send_all()
        except OSError:
            return False
        finally:
            self._close()

    def _close(self) -> None:
        """Let go of the memory and the descriptor."""
        ranges, self._ranges = self._ranges, []
        for view in ranges:
            view.release()
        self._socket.close()

    def _send_all(self) -> bool:
        waiting = select.poll()
        waiting.register(self._socket, select.POLLOUT)
        first, start = 0, 0
        while first < len(self._ranges):
            if self._stopped:
                return False
            with self._ranges[first][start:] as rest:
                try:
                    count = self._socket.sendmsg([rest, *self._ranges[first + 1 : first + _TOGETHER]])
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
