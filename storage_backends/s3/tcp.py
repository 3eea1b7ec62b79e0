"""What is asked of a TCP socket beside its bytes (tcp(7), socket(7)); whoever asks holds it open meanwhile."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from contextlib import suppress

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, for no time


class LowWater:
    """Bytes (SO_RCVLOWAT) that must have come before whoever waits to read is woken; an end or an error of the
    connection wakes always. ``nbytes``: what the kernel was told last, 1 at first; 0 where it has no such thing."""

    def __init__(self, made: socket.socket) -> None:
        self._socket = made
        self.nbytes = 1

    def set(self, nbytes: int) -> None:
        """Less than 1 is 1."""
        nbytes = max(nbytes, 1)
        if nbytes == self.nbytes or not self.nbytes:
            return
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
        except OSError:
            self.nbytes = 0  # not the kernel's TCP: every segment wakes
            return
        self.nbytes = nbytes


def unacknowledged(made: socket.socket) -> int:
    """Bytes in the socket's buffer that the peer does not have (SIOCOUTQ); none in one that is closed."""
    space = bytearray(4)
    try:
        fcntl.ioctl(made.fileno(), termios.TIOCOUTQ, space)
    except (OSError, ValueError):  # closed
        return 0
    return int.from_bytes(space, "little")


def reset_at_end(made: socket.socket) -> None:
    """The connection is to end by RST: half of a request in its buffers is of no use to anybody."""
    with suppress(OSError):
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def tune(made: socket.socket, stall_timeout: float) -> None:
    """Give a connection up where sent bytes stay unacknowledged for ``stall_timeout`` seconds; small requests go out
    at once. OSError."""
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_timeout * 1000))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
