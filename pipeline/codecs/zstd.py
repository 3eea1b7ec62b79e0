"""zstd on the CPU, without the GIL, from one buffer into another.

Encoding takes pieces, with a checkpoint before each, since a chunk may take minutes at the highest levels. What comes
out of a piece is copied to its place: a `stream_reader` would write there itself, but one that is given up before its
end keeps the last piece for ever, and with it the memory that it lies in. Decoding does use it: `readinto` on a frame
whose declared content size fits takes libzstd's single-pass route, which writes to the destination itself and allocates
no window.
"""

from __future__ import annotations

from typing import ClassVar

import zstandard

from ckptpipe.pipeline.codecs.abc import Codec
from ckptpipe.pipeline.codecs.choice import ZSTD_DEFAULT_LEVEL
from ckptpipe.pipeline.codecs.zstd_frame import read_frame

CHUNK_WINDOW_MAX = 64 << 20  # bytes; a chunk is no larger
SLOW_LEVEL = 10
PIECE, SLOW_PIECE = 1 << 20, 128 << 10
"""Bytes coded between two checkpoints, the smaller number from `SLOW_LEVEL` on (a MB takes up to a second there)."""


class ZstdCodec(Codec):
    """One zstd frame a call: content size on, content checksum off (the index has a CRC32C of both sides)."""

    name: ClassVar[str] = "zstd"
    id: ClassVar[int] = 1
    backend: ClassVar[str] = "cpu"

    def __init__(self, level: int = ZSTD_DEFAULT_LEVEL, *, max_window: int = CHUNK_WINDOW_MAX) -> None:
        self.level = level
        self.max_window = max_window
        self._compressor: zstandard.ZstdCompressor | None = None
        self._decompressor: zstandard.ZstdDecompressor | None = None

    def clone(self) -> ZstdCodec:
        return ZstdCodec(self.level, max_window=self.max_window)

    def compress_into(self, source: memoryview, destination: memoryview) -> int:
        """Bytes written, 0 where the frame does not fit. The work stops as soon as ``destination`` is full."""
        if not destination.nbytes:
            return 0
        if self._compressor is None:
            self._compressor = zstandard.ZstdCompressor(
                level=self.level, write_content_size=True, write_checksum=False, write_dict_id=False
            )
        written = 0
        step = SLOW_PIECE if self.level >= SLOW_LEVEL else PIECE
        coder = self._compressor.compressobj(size=source.nbytes)
        for start in range(0, source.nbytes, step):
            self.checkpoint()
            with source[start : start + step] as piece:
                coded = coder.compress(piece)
            if written + len(coded) > destination.nbytes:
                return 0
            destination[written : written + len(coded)] = coded
            written += len(coded)
        coded = coder.flush()
        if written + len(coded) > destination.nbytes:
            return 0
        destination[written : written + len(coded)] = coded
        return written + len(coded)

    def decompress_into(self, source: memoryview, destination: memoryview) -> None:
        wanted = destination.nbytes
        facts = read_frame(source)
        if facts.nbytes != source.nbytes:
            raise ValueError(f"{source.nbytes - facts.nbytes} bytes follow the zstd frame")
        if facts.content_size != wanted:
            raise ValueError(f"the zstd frame declares {facts.content_size} bytes where {wanted} belong")
        if facts.window > self.max_window:
            raise ValueError(
                f"the zstd frame wants a window of {facts.window} bytes, {self.max_window} is the most"
            )
        if self._decompressor is None:
            self._decompressor = zstandard.ZstdDecompressor(max_window_size=self.max_window)
        filled = 0
        try:
            with self._decompressor.stream_reader(source, read_across_frames=False) as reader:
                while filled < wanted:
                    with destination[filled:] as rest:
                        count = reader.readinto(rest)
                    if not count:
                        break
                    filled += count
                surplus = bool(reader.read(1)) if filled == wanted else False
        except zstandard.ZstdError as error:
            raise ValueError(f"damaged zstd frame: {error}") from error
        if filled != wanted:
            raise ValueError(f"the zstd frame gives {filled} bytes where {wanted} belong")
        if surplus:
            raise ValueError(f"the zstd frame gives more than {wanted} bytes")
