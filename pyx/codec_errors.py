"""Errors of a GPU's codecs: bytes that are not what was stored, decoders that cannot run, memory that is too small."""

from __future__ import annotations

from ckptpipe.pyx.errors import CkptpipeError


class StoredMismatch(CkptpipeError):
    """The stored bytes have another checksum: no decoder has seen them."""

    def __init__(self, found: int, expected: int) -> None:
        super().__init__(f"stored bytes have the checksum {found:08x} instead of {expected:08x}")
        self.found = found
        self.expected = expected

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.found, self.expected)


class DecodeError(CkptpipeError):
    """A block was not decoded to what it must be, although its chunk's stored bytes have the right checksum."""

    def __init__(self, message: str, plane: int, block: int) -> None:
        super().__init__(message)
        self.plane = plane
        self.block = block

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.plane, self.block)


class DecoderUnavailableError(CkptpipeError):
    """The decoder, or the encoder, that was asked for cannot run here."""

    exit_code = 2


class ScratchTooSmallError(CkptpipeError):
    """The scratch memory does not hold one chunk. ``needed_bytes``: the least that would do."""

    def __init__(self, scratch_bytes: int, needed_bytes: int) -> None:
        least = -(-needed_bytes // (1 << 20))
        super().__init__(
            f"{scratch_bytes} bytes of GPU scratch memory do not hold one chunk",
            cure=f"allow at least {least} MiB (--gpu-scratch {least}MiB), or use smaller chunks",
        )
        self.scratch_bytes = scratch_bytes
        self.needed_bytes = needed_bytes

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.scratch_bytes, self.needed_bytes)
