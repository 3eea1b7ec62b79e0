"""The bytes of one answer's body on their way out of TLS: each piece is decrypted, checksummed and written by one
thread, as `Receiving` does it over TCP."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckptpipe.pyx.checksum import crc32c
from ckptpipe.pyx.errors import io_error
from ckptpipe.pyx.receive import PIECE_BYTES
from ckptpipe.storage_backends.abc import Landing
from ckptpipe.storage_backends.s3.hot_piece import hot_piece
from ckptpipe.storage_backends.s3.secure_stream import SecureStream


class SecureBody:
    """A body out of ``stream`` to ``target``; ``early`` of it is in hand. ``done`` bytes and ``crc32cs``, which go on
    from those given (none: of memory, where nobody wants it), are right once `run` has ended, however that was."""

    def __init__(
        self,
        stream: SecureStream,
        target: memoryview | Sequence[Landing],
        crc32cs: Sequence[int],
        early: bytes = b"",
    ) -> None:
        self._stream = stream
        self._target = target
        self._early = memoryview(early)
        self._left = target.nbytes if isinstance(target, memoryview) else sum(to.nbytes for to in target)
        self.crc32cs = list(crc32cs)
        self.done = 0

    def run(self) -> None:
        """Receive, on a thread. WireError; IoError of a file."""
        try:
            if isinstance(self._target, memoryview):
                self._into_memory(self._target)
            else:
                for number, to in enumerate(self._target):
                    self._through(number, to)
        finally:
            self._stream.expect_anything()

    def _into_memory(self, memory: memoryview) -> None:
        while self.done < len(memory):
            with memory[self.done : self.done + PIECE_BYTES] as piece:
                self._fill(0, piece, None, 0)

    def _through(self, number: int, to: Landing) -> None:
        begin = self.done
        while (landed := self.done - begin) < to.nbytes:
            at = to.offset + landed
            # Pieces end where pages of the file do.
            wanted = min(PIECE_BYTES - at % PIECE_BYTES, to.nbytes - landed)
            with memoryview(hot_piece()) as hot, hot[:wanted] as piece:
                self._fill(number, piece, to, at)

    def _fill(self, number: int, piece: memoryview, to: Landing | None, at: int) -> None:
        """All of ``piece``; what has come of it counts also where the connection breaks."""
        filled = 0
        try:
            while filled < len(piece):
                with piece[filled:] as rest:
                    filled += self._read(rest)
        finally:
            if filled:
                with piece[:filled] as came:
                    value = crc32c(came, self.crc32cs[number]) if self.crc32cs else 0
                    if to is not None and to.fd >= 0:
                        _write(came, to, at)
                if self.crc32cs:
                    self.crc32cs[number] = value
                self.done += filled

    def _read(self, space: memoryview) -> int:
        count = min(len(self._early), len(space))
        if count:
            space[:count] = self._early[:count]
            self._early = self._early[count:]
        else:
            count = self._stream.read(space, self._left)
        self._left -= count
        return count


def _write(piece: memoryview, to: Landing, at: int) -> None:
    written = 0
    while written < len(piece):
        try:
            with piece[written:] as rest:
                written += os.pwrite(to.fd, rest, at + written)
        except OSError as error:
            raise io_error(error.errno or 0, "write", to.path) from None
