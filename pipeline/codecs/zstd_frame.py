"""What a zstd frame says of itself, read without decoding it (RFC 8878, section 3.1.1).

Three uses: a window or a size that we would not allocate is refused before a decoder sees the frame; the
frame's own length tells whether anything follows it; and the declared content size can be compared with
what an index says, so that a decoder writes straight into its destination.
"""

from __future__ import annotations

from dataclasses import dataclass

MAGIC = 0xFD2FB528
SKIPPABLE = range(0x184D2A50, 0x184D2A60)
BLOCK_MAX = 128 << 10
_RLE, _RESERVED = 1, 3


@dataclass(frozen=True, slots=True)
class FrameFacts:
    """``window`` in bytes (the content size of a single-segment frame); ``nbytes`` of the whole frame."""

    content_size: int
    window: int
    checksum: bool
    nbytes: int


def read_frame(data: memoryview) -> FrameFacts:
    """Facts of the frame at the start of ``data``. ValueError where it is no complete zstd frame, declares
    no content size, or needs a dictionary."""
    size = data.nbytes
    if size < 6:
        raise ValueError(f"{size} bytes are no zstd frame")
    magic = int.from_bytes(data[:4], "little")
    if magic in SKIPPABLE:
        raise ValueError("a skippable frame where a zstd frame belongs")
    if magic != MAGIC:
        raise ValueError("no zstd frame: wrong magic number")
    descriptor = data[4]
    if descriptor & 0x08:
        raise ValueError("a reserved bit of the zstd frame header is set")
    single, checksum = bool(descriptor & 0x20), bool(descriptor & 0x04)
    content_bytes = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
    dictionary_bytes = (0, 1, 2, 4)[descriptor & 3]
    position = 5 + (0 if single else 1)
    header_end = position + dictionary_bytes + content_bytes
    if size < header_end + 3:
        raise ValueError("the zstd frame ends inside its header")
    if content_bytes == 0:
        raise ValueError("the zstd frame declares no content size")
    if int.from_bytes(data[position : position + dictionary_bytes], "little"):
        raise ValueError("the zstd frame needs a dictionary")
    content = int.from_bytes(data[header_end - content_bytes : header_end], "little")
    if content_bytes == 2:
        content += 256
    if single:
        window = content
    else:
        exponent, mantissa = data[5] >> 3, data[5] & 7
        base = 1 << (10 + exponent)
        window = base + (base >> 3) * mantissa
    end = _walk_blocks(data, header_end, 16 + content // 256) + (4 if checksum else 0)
    if end > size:
        raise ValueError("the zstd frame is cut short")
    return FrameFacts(content, window, checksum, end)


def _walk_blocks(data: memoryview, position: int, most: int) -> int:
    """Where the last block ends. ``most`` bounds the work: writers make no blocks of a few bytes each."""
    size = data.nbytes
    for _ in range(most):
        if position + 3 > size:
            raise ValueError("the zstd frame is cut short")
        header = data[position] | data[position + 1] << 8 | data[position + 2] << 16
        kind, length = header >> 1 & 3, header >> 3
        if kind == _RESERVED:
            raise ValueError("the zstd frame has a block of a reserved type")
        if length > BLOCK_MAX:
            raise ValueError(f"the zstd frame has a block of {length} bytes, {BLOCK_MAX} is the most")
        position += 3 + (1 if kind == _RLE else length)
        if header & 1:
            return position
    raise ValueError(f"the zstd frame has more than {most} blocks")
