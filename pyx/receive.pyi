"""Bytes out of a stream socket, without the GIL: into memory, or through a small buffer into a file."""

import sys

if sys.version_info >= (3, 12):
    from collections.abc import Buffer
else:
    from typing_extensions import Buffer

PIECE_BYTES: int

class Body:
    """``nbytes`` of a stream socket, received once by `run`.

    ``crc32c``: of what came before them. ``through``: `run` gets a buffer of at least `PIECE_BYTES` that each
    piece goes through, on to ``offset`` of the descriptor ``file``, or nowhere (-1); else the memory for all.
    """

    def __init__(
        self,
        socket: int,
        nbytes: int,
        *,
        crc32c: int = 0,
        through: bool = False,
        file: int = -1,
        offset: int = 0,
    ) -> None: ...
    @property
    def done(self) -> int:
        """Bytes that are where they belong, and in `crc32c`."""

    @property
    def crc32c(self) -> int: ...
    @property
    def arrived(self) -> int:
        """Bytes out of the socket so far; may be read while `run` is under way."""

    def stop(self) -> None:
        """`run` ends soon, from any thread: within a tenth of a second, at once where the socket is shut down."""

    def run(self, memory: Buffer, early: Buffer = b"") -> bool:
        """Receive; returns True where all came, False where it was stopped. ``early``: the first of the bytes, which
        somebody else has taken from the socket.

        ConnectionError: the connection ended or broke. OSError (`io_error`, without a path): writing failed.
        """
