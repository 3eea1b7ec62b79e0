"""TLS on one TCP connection, as threads use it: one at a time, which sleeps without the GIL until bytes can move.

OpenSSL en- and decrypts without the GIL, a record (16 KiB) at a time where it reads, all that it is given where it
writes (SSL_read(3), SSL_write(3)).
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from ckptpipe.pyx.receive import PIECE_BYTES
from ckptpipe.storage_backends.s3.tcp import LowWater, reset_at_end, unacknowledged
from ckptpipe.storage_backends.s3.wire import WireError

_LOOK = 100  # milliseconds after which a thread that waits looks whether it shall stop
_RECORD = 17 << 10  # bytes, at most, of a record and what is around it (RFC 8446, section 5.2)
_LOST = select.POLLERR | select.POLLHUP


class NotSent(WireError):
    """The connection takes no more; what came before may be there to be read."""


class SecureStream:
    """Takes the connected, non-blocking ``made`` over. ``received`` and ``sent``: bytes of what lies within TLS.

    After `stop`, from any thread, whoever waits here ends with a WireError; `close` it then.
    """

    def __init__(self, made: socket.socket, context: ssl.SSLContext, host: str) -> None:
        self._socket = context.wrap_socket(
            made, server_hostname=host, do_handshake_on_connect=False, suppress_ragged_eofs=False
        )
        self._poll = select.poll()
        self._poll.register(self._socket, 0)
        self._low_water = LowWater(self._socket)
        self.stopped = False
        self.received = 0
        self.sent = 0

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    @property
    def unread(self) -> bool:
        """Decrypted bytes are left that nobody has read."""
        return self._socket.pending() > 0

    def handshake(self) -> None:
        """ssl.SSLError, OSError."""
        while True:
            try:
                self._socket.do_handshake()
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT)
            except ssl.SSLEOFError as error:  # it fell silent, which is no word against us
                raise ConnectionResetError("the connection was closed within the handshake") from error
            else:
                return

    def read(self, space: memoryview, more: int = 0) -> int:
        """Bytes of ``space``, at least one, that have come. ``more``: bytes that are still to come, these among them:
        the thread need not wake before a good part of them is there."""
        while True:
            try:
                count = self._read(space)
                if count:
                    return count
                self._low_water.set(min(more - _RECORD, PIECE_BYTES))  # a record may have come in part
                self._wait(select.POLLIN)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT)

    def read_now(self, space: memoryview) -> int:
        """The same, 0 where nothing has come. TLS's own messages, such as tickets, are read on the way."""
        try:
            return self._read(space)
        except ssl.SSLWantWriteError:
            return 0

    def _read(self, space: memoryview) -> int:
        try:
            count = self._socket.recv_into(space, len(space))
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLWantWriteError:
            raise
        except OSError as error:
            raise WireError(_reason(error)) from None
        if not count:
            raise WireError("the connection was closed")
        self.received += count
        return count

    def write(self, piece: memoryview, came: Callable[[], bool]) -> bool:
        """Give all of ``piece`` to the kernel: True. ``came()`` is called where something can be read meanwhile, and
        must then do so: where it returns True, the rest is not sent; its errors are passed on. NotSent."""
        start = 0
        while start < len(piece):
            events = self._wait(select.POLLIN | select.POLLOUT)
            if events & select.POLLIN and came():
                return False
            if not events & (select.POLLOUT | _LOST):
                continue
            try:
                # After a record that the kernel has taken in part the same bytes come again, from where they were.
                with piece[start:] as rest:
                    count = self._socket.send(rest)
            except ssl.SSLWantWriteError:
                continue
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN)
                continue
            except OSError as error:
                raise NotSent(_reason(error)) from None
            start += count
            self.sent += count
        return True

    def _wait(self, events: int) -> int:
        if self.stopped:
            raise WireError("the connection was given up")
        self._poll.modify(self._socket, events)
        ready = self._poll.poll(_LOOK)
        return ready[0][1] if ready else 0

    def expect_anything(self) -> None:
        """Wake at the first byte again."""
        self._low_water.set(1)

    def unacknowledged(self) -> int:
        """Encrypted bytes that the peer does not have yet."""
        return unacknowledged(self._socket)

    def stop(self) -> None:
        self.stopped = True
        with suppress(OSError):  # the peer was quicker
            # Not the SSLSocket's own, which takes TLS away from the thread that is in it.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def reset_at_end(self) -> None:
        reset_at_end(self._socket)

    def close(self) -> None:
        """Only where no thread is in it. Idempotent."""
        self._socket.close()


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return "the connection was closed"
    if isinstance(error, ssl.SSLError):
        said = (error.reason or "it broke").lower().replace("_", " ")
        return f"TLS: {said}"
    return error.strerror or str(error)
