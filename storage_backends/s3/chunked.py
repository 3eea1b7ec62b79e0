"""The chunked coding of HTTP/1.1 bodies (RFC 9112, section 7.1), taken apart as it comes."""

from __future__ import annotations

_END = b"\r\n"
_LINE_MAX = 4096  # bytes of a line with a size, or of a trailer


class Chunked:
    """``done``: the last chunk and the trailers have come."""

    def __init__(self) -> None:
        self.done = False
        self._left = 0  # bytes of the chunk that are still to come, with its line's end
        self._last = False

    def feed(self, raw: bytearray, into: bytearray) -> None:
        """Move what ``raw`` has of the body to ``into``. ValueError where it is not chunked."""
        while not self.done:
            if self._left:
                data = max(0, min(len(raw), self._left - len(_END)))
                taken = min(len(raw), self._left)
                into += raw[:data]
                if raw[data:taken] != _END[len(_END) - (self._left - data) :][: taken - data]:
                    raise ValueError("a chunk does not end where it should")
                del raw[:taken]
                self._left -= taken
                if self._left:
                    return
            line, found, _ = bytes(raw[:_LINE_MAX]).partition(b"\r\n")
            if not found:
                if len(raw) >= _LINE_MAX:
                    raise ValueError("the line of a chunk is too long")
                return
            del raw[: len(line) + 2]
            if self._last:
                self.done = not line
                continue
            size = line.partition(b";")[0].strip()
            if not size or any(letter not in b"0123456789abcdefABCDEF" for letter in size):
                raise ValueError("the body is not in chunks")
            count = int(size, 16)
            self._last = count == 0
            self._left = count + len(_END) if count else 0
