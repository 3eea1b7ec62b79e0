"""Deflate on the CPU: raw RFC 1951 streams, one a block.

Levels are nvCOMP's, 0 to 5. On the CPU 0 codes by entropy alone (Huffman codes, no matches), which is what planes of
weights want.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import ClassVar

from ckptpipe.pipeline.codecs.abc import Codec
from ckptpipe.pipeline.codecs.choice import DEFLATE_DEFAULT_LEVEL

_RAW = -15  # a raw stream with the whole window of 32 KiB
_MEMORY = 9


class DeflateCodec(Codec):
    """One final RFC 1951 stream a block, nothing after it."""

    name: ClassVar[str] = "deflate"
    id: ClassVar[int] = 2
    backend: ClassVar[str] = "cpu"

    def __init__(self, level: int = DEFLATE_DEFAULT_LEVEL) -> None:
        self.level = level

    def clone(self) -> DeflateCodec:
        return DeflateCodec(self.level)

    def compress_into(self, source: memoryview, destination: memoryview) -> int:
        lengths = self.compress_blocks(source, destination, max(source.nbytes, 1))
        return lengths[0] if lengths else 0

    def compress_blocks(
        self, source: memoryview, destination: memoryview, block_bytes: int
    ) -> tuple[int, ...]:
        lengths = []
        at = 0
        for start in range(0, source.nbytes, block_bytes):
            with source[start : start + block_bytes] as block:
                coded = self._compress(block)
            end = at + len(coded)
            if end > destination.nbytes:
                return ()
            destination[at:end] = coded
            lengths.append(len(coded))
            at = end
        return tuple(lengths)

    def _compress(self, block: memoryview) -> bytes:
        strategy = zlib.Z_DEFAULT_STRATEGY if self.level else zlib.Z_HUFFMAN_ONLY
        coder = zlib.compressobj((1, 1, 2, 4, 6, 9)[self.level], zlib.DEFLATED, _RAW, _MEMORY, strategy)
        return coder.compress(block) + coder.flush()

    def decompress_into(self, source: memoryview, destination: memoryview) -> None:
        self.decompress_blocks(source, (source.nbytes,), destination, max(destination.nbytes, 1))

    def decompress_blocks(
        self, source: memoryview, lengths: Sequence[int], destination: memoryview, block_bytes: int
    ) -> None:
        at = 0
        for number, stored in enumerate(lengths):
            start = number * block_bytes
            with source[at : at + stored] as block, destination[start : start + block_bytes] as room:
                problem = _inflate(block, room)
            if problem:
                raise ValueError(f"deflate block {number} of {len(lengths)} {problem}")
            at += stored


def _inflate(block: memoryview, room: memoryview) -> str:
    """Decode one block with zlib; what is wrong with it, "" when nothing is."""
    wanted = room.nbytes
    decoder = zlib.decompressobj(_RAW)
    try:
        raw = decoder.decompress(block, wanted + 1)
    except zlib.error as error:
        return f"is damaged: {error}"
    if len(raw) > wanted:
        return f"gives more than {wanted} bytes"
    if not decoder.eof:
        return "ends before its stream does"
    if decoder.unused_data:
        return f"has {len(decoder.unused_data)} bytes after its stream"
    if len(raw) != wanted:
        return f"gives {len(raw)} bytes where {wanted} belong"
    room[:] = raw
    return ""
