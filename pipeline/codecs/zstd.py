"""zstd on the CPU, from one buffer straight into another.

`stream_reader(...).readinto` is the one call of python-zstandard that writes into a buffer of ours; it lets
go of the GIL while it works. Decoding a frame whose declared content size fits takes libzstd's single-pass
route, which writes to the destination itself and allocates no window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

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
        pieces: Any = _Pieces(source, self.checkpoint)  # the stubs ask for more than is called
        step = SLOW_PIECE if self.level >= SLOW_LEVEL else PIECE
        with self._compressor.stream_reader(pieces, size=source.nbytes, read_size=step) as reader:
            while written < destination.nbytes:
                with destination[written:] as rest:
                    count = reader.readinto(rest)
                if not count:
                    return written
                written += count
            return 0 if reader.read(1) else written

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


class _Pieces:
    """A buffer as a file, which has a checkpoint before each piece and copies nothing."""

    def __init__(self, source: memoryview, checkpoint: Callable[[], None]) -> None:
        self._source = source
        self._checkpoint = checkpoint
        self._at = 0

    def read(self, size: int) -> memoryview:
        self._checkpoint()
        start = self._at
        self._at = min(start + size, self._source.nbytes)
        return self._source[start : self._at]
