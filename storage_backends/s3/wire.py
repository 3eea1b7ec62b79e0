"""One HTTP/1.1 connection that receives bodies into the caller's memory or file, and sends them from there.

Only what ranged GETs, PUTs and small requests need: one request at a time, answers with Content-Length. Chunked
answers are read where they are documents.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptpipe.storage_backends.abc import Landing
from ckptpipe.storage_backends.s3.file_piece import FilePiece

HEAD_MAX = 65536  # bytes of status line and headers
HEAD_READ = 16384
ERROR_MAX = 65536  # bytes of an error document that are read; the rest goes with the connection
_DIGITS = 19  # of a number of bytes, at most: of 2**63 - 1


class WireError(ConnectionError):
    """The connection broke, or what came is not HTTP/1.1."""


class StaleConnection(WireError):
    """A kept connection was closed before the first byte of an answer: nobody saw the request fail."""


@dataclass(slots=True)
class Answer:
    """``received``: bytes of the body that lie in the destination, or ``text`` where there is none. ``crc32cs``:
    after them, where a thread received them: of memory, or of each landing."""

    status: int
    headers: dict[str, str]
    received: int = 0
    crc32cs: list[int] = field(default_factory=list)
    text: bytearray = field(default_factory=bytearray)
    cut: bool = False
    keep: bool = True

    def length(self) -> int | None:
        return number_of_bytes(self.headers.get("content-length", ""))

    @property
    def chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()


def number_of_bytes(text: str) -> int | None:
    """As a header has it; None where it is none, or more than there can be."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None


class Wire(ABC):
    """`PlainWire` over TCP, `SecureWire` over TLS. Whoever has one calls from the loop."""

    def __init__(self) -> None:
        self._answer: Answer | None = None

    @property
    @abstractmethod
    def open(self) -> bool:
        """Neither side is known to have closed it."""

    @property
    def finished(self) -> bool:
        """The last answer was taken whole, and the server keeps the connection."""
        answer = self._answer
        return answer is not None and answer.keep and answer.length() == answer.received

    @abstractmethod
    def bytes_moved(self) -> int:
        """Received since ever, and what the peer has of what is being sent: it changes while there is progress."""

    @abstractmethod
    async def ask(self, request: bytes, body: Sequence[memoryview | FilePiece] = ()) -> Answer:
        """Send ``request``, and after it ``body``; the answer's head. Then call `body`, or `abort`.

        An answer that comes before the body is sent ends the sending, and the connection with it. When this
        returns or raises, nobody reads from ``body`` any more. WireError; StaleConnection; StorageError where a file
        shrinks meanwhile.
        """

    @abstractmethod
    async def body(
        self, destination: memoryview | Sequence[Landing] | None, nbytes: int, crc32cs: Sequence[int] = ()
    ) -> None:
        """Receive ``nbytes`` of the body into ``destination`` (None: a document, into the answer).

        ``crc32cs``: what the checksum of memory, or those of landings, go on from; none where nobody wants any.
        Landings have ``nbytes`` together. When this returns or raises, nothing is written to them any more, nor to
        memory as long as a thread did it. WireError; IoError of a file."""

    @abstractmethod
    def idle(self) -> bool:
        """Make it ready for the next request; False where it cannot be kept."""

    @abstractmethod
    def abort(self) -> None:
        """Close at once: nothing is written to a destination once it is `closed`."""

    @abstractmethod
    async def closed(self) -> None:
        """After `abort`: the descriptor is gone and the destination is in nobody's hands."""


async def ended(job: asyncio.Future[Any]) -> None:
    """Wait for what a thread does. Its error is seen, also where a cancellation is what the caller raises."""
    await asyncio.wait({job})
    if not job.cancelled():
        job.exception()


def take_head(came: bytearray) -> Answer | None:
    """The final answer's head out of the first of ``came``; None where it is not there yet. WireError."""
    while True:
        end = came.find(b"\r\n\r\n")
        if end < 0:
            if len(came) > HEAD_MAX:
                raise WireError("the answer's headers are too long")
            return None
        try:
            answer = _parse_head(bytes(came[:end]))
        except ValueError as error:
            raise WireError(str(error)) from None
        del came[: end + 4]
        if not 100 <= answer.status < 200:
            return answer


def _parse_head(head: bytes) -> Answer:
    lines = head.decode("latin-1").split("\r\n")
    version, _, rest = lines[0].partition(" ")
    status = rest[:3]
    if not version.startswith("HTTP/1.") or not (status.isascii() and status.isdigit()):
        raise ValueError("the answer is not HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise ValueError("the answer has a broken header")
        headers[name.lower()] = value.strip()
    keep = headers.get("connection", "").lower() != "close" and version == "HTTP/1.1"
    return Answer(int(status), headers, keep=keep)
