"""The body of a PUT: several memory ranges sent one after another, straight from where they lie.

botocore wants a file (`read`, `seek`, `tell`), aiohttp a Payload; this is both. Nothing is copied, and a
request that is sent again begins at the first byte again.
"""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Sequence

import aiohttp.payload
from aiohttp.abc import AbstractStreamWriter

from ckptpipe.pyx.staging import Lease

# One write to the transport. uvloop queues a view as it is, whatever its size; asyncio before 3.12 copies
# what the socket does not take at once, so there pieces stay near the size of a socket's buffer.
_PIECE = 8 << 20
_PIECE_COPIED = 1 << 18


class PartBody(aiohttp.payload.Payload):
    """``ranges``: (lease, bytes of it) in order.

    Views are taken from the leases for one attempt at a time: `begin` before, `end` after, so that a lease
    can be released when the answer is there. What the transport still queues keeps its own hold.
    """

    def __init__(self, ranges: Sequence[tuple[Lease, int]], *, sha256: str = "") -> None:
        self._ranges = tuple(ranges)
        self._views: list[memoryview] = []
        self.sha256 = sha256  # of the whole body in hex, where payloads are signed
        self._transport: asyncio.Transport | None = None
        self.sent = 0  # bytes queued by the attempt that runs
        self.times = 0  # how often sending began: aiohttp sends again by itself where a kept connection broke
        self._position = 0
        super().__init__(None)
        self._size = sum(nbytes for _, nbytes in self._ranges)

    def begin(self) -> None:
        self.end()
        self._position = 0
        self.sent = 0
        for lease, nbytes in self._ranges:
            whole = memoryview(lease)
            self._views.append(whole[:nbytes])
            whole.release()

    def end(self) -> None:
        """Give the views up. A second call does nothing."""
        views, self._views = self._views, []
        for view in views:
            _let_go(view)

    def cut(self) -> None:
        """The attempt failed: close its connection at once. A transport that is merely closed goes on to send
        what it queues, for ever to a peer that takes nothing, and holds the memory all that time."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    # What botocore asks of a file.

    def __len__(self) -> int:
        assert self._size is not None
        return self._size

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self)}[whence]
        self._position = min(max(base + offset, 0), len(self))
        return self._position

    def read(self, nbytes: int | None = -1) -> bytes:
        """Copies: for whoever hashes bodies. Sending does not come here."""
        end = len(self) if nbytes is None or nbytes < 0 else min(self._position + nbytes, len(self))
        taken = []
        start = 0
        for view in self._views:
            low, high = max(self._position - start, 0), min(end - start, len(view))
            if low < high:
                taken.append(view[low:high])
            start += len(view)
        self._position = end
        return b"".join(taken)

    # What aiohttp asks of a payload.

    async def write(self, writer: AbstractStreamWriter) -> None:
        await self.write_with_length(writer, None)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        self.sent = 0
        self.times += 1
        self._transport = getattr(writer, "transport", None)
        # aiohttp joins buffered headers and the first piece, a copy on some versions of Python.
        send_headers = getattr(writer, "send_headers", None)
        if send_headers is not None:
            send_headers()
        piece = _PIECE if _queues_views() else _PIECE_COPIED
        for view in self._views:
            for start in range(0, len(view), piece):
                queued = view[start : start + piece]
                try:
                    await writer.write(queued)
                    self.sent += len(queued)
                    await writer.drain()
                finally:
                    # Not left to the frame: an error keeps frames, and with them the memory.
                    _let_go(queued)
                    del queued

    def on_the_wire(self) -> int:
        """Bytes that the kernel has taken: what the stall time-out watches."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return self.sent
        return self.sent - transport.get_write_buffer_size()

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("the body of a part is not text")

    async def as_bytes(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        raise TypeError("the body of a part is sent, not converted")

    def __repr__(self) -> str:
        return f"<PartBody {len(self)} bytes in {len(self._ranges)} ranges>"


def _let_go(view: memoryview) -> None:
    try:
        view.release()
    except BufferError:
        pass  # the transport still queues it: the hold goes when that does


def _queues_views() -> bool:
    return sys.version_info >= (3, 12) or type(asyncio.get_running_loop()).__module__.startswith("uvloop")
