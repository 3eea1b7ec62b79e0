"""Deflate on the CPU: raw RFC 1951 streams, one a block.

Decoding is ISA-L's (PyPI: isal): of the libraries tried it is the fastest on streams that GPUs write, nearly all of
which are Huffman codes of literals (one core, GB/s of 64 KiB blocks of bf16 exponents: ISA-L 0.95, libdeflate 0.45,
zlib-ng 0.27, zlib 0.23; of text with matches 1.95, 1.9, 1.4 and 0.9). Its binding makes a new object of every block
and takes the GIL twice, which many threads notice, so whole planes go to the library's own entry points in one call.
Where isal is not installed, or has hidden these, its Python functions or zlib's do the same more slowly.

Levels are nvCOMP's, 0 to 5. On the CPU 0 codes by entropy alone (`pyx/deflate`), which is what planes of weights want;
1 to 3 are ISA-L's levels (zlib's 1, 2 and 4 where it is missing), 4 and 5 zlib's 6 and 9, and from 1 on each block is
coded by entropy alone where that is shorter.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from ckptpipe.pipeline.codecs.abc import Codec
from ckptpipe.pipeline.codecs.choice import DEFLATE_DEFAULT_LEVEL
from ckptpipe.pyx.deflate import Inflater, literals_blocks, literals_size, open_isal

_RAW = -15  # a raw stream with the whole window of 32 KiB
_MEMORY = 9
_ZLIB_LEVELS = (1, 1, 2, 4, 6, 9)
_ISAL_LEVELS = range(1, 4)


class DeflateCodec(Codec):
    """One final RFC 1951 stream a block, nothing after it."""

    name: ClassVar[str] = "deflate"
    id: ClassVar[int] = 2
    backend: ClassVar[str] = "cpu"

    def __init__(self, level: int = DEFLATE_DEFAULT_LEVEL, *, library: str = "") -> None:
        """``library``: one of `libraries`, "" for the first of them."""
        self.level = level
        self.library = library or libraries()[0]
        self._inflater: Inflater | None = None

    def clone(self) -> DeflateCodec:
        return DeflateCodec(self.level, library=self.library)

    @property
    def inflater(self) -> Inflater | None:
        """ISA-L's decoder, None where another library decodes."""
        if self._inflater is None and self.library == "isal":
            self._inflater = Inflater()
        return self._inflater

    def compress_into(self, source: memoryview, destination: memoryview) -> int:
        lengths = self.compress_blocks(source, destination, max(source.nbytes, 1))
        return lengths[0] if lengths else 0

    def compress_blocks(
        self, source: memoryview, destination: memoryview, block_bytes: int
    ) -> tuple[int, ...]:
        if self.level == 0:
            return literals_blocks(source, destination, block_bytes)
        compress = _compressor(self.level, self.library)
        lengths = []
        at = 0
        for start in range(0, source.nbytes, block_bytes):
            self.checkpoint()
            with source[start : start + block_bytes] as block, destination[at:] as room:
                coded = compress(block)
                stored = len(coded)
                if literals_size(block) < stored:
                    stored = sum(literals_blocks(block, room, block_bytes))
                elif stored <= room.nbytes:
                    room[:stored] = coded
                else:
                    stored = 0
            if not stored:
                return ()
            lengths.append(stored)
            at += stored
        return tuple(lengths)

    def decompress_into(self, source: memoryview, destination: memoryview) -> None:
        self.decompress_blocks(source, (source.nbytes,), destination, max(destination.nbytes, 1))

    def decompress_blocks(
        self, source: memoryview, lengths: Sequence[int], destination: memoryview, block_bytes: int
    ) -> None:
        if self.inflater is not None:
            self.inflater.blocks(source, lengths, destination, block_bytes)
            return
        module = zlib if self.library == "zlib" else _isal()
        at = 0
        for number, stored in enumerate(lengths):
            start = number * block_bytes
            with source[at : at + stored] as block, destination[start : start + block_bytes] as room:
                problem = _inflate(module, block, room)
            if problem:
                raise ValueError(f"deflate block {number} of {len(lengths)} {problem}")
            at += stored


@functools.cache
def libraries() -> tuple[str, ...]:
    """What decodes here, the fastest first: ``isal`` (its own entry points), ``isal-python``, ``zlib``."""
    try:
        from isal import igzip_lib
    except ImportError:
        return ("zlib",)
    found = open_isal(igzip_lib.__file__) and _known_answer()
    return ("isal", "isal-python", "zlib") if found else ("isal-python", "zlib")


def _known_answer() -> bool:
    """Whether the entry points decode what zlib has coded, and tell where it was changed."""
    raw = bytes(range(256)) * 5 + bytes(3000) + b"".join(b"%d " % number for number in range(3000))
    inflater, room = Inflater(), bytearray(len(raw))
    for level in (0, 1, 9):
        coder = zlib.compressobj(level, zlib.DEFLATED, _RAW)
        coded = coder.compress(raw) + coder.flush()
        try:
            inflater.blocks(coded, (len(coded),), room, len(raw))
        except ValueError:
            return False
        if room != raw:
            return False
        for bad in (coded[:-2], coded + b"x"):
            try:
                inflater.blocks(bad, (len(bad),), room, len(raw))
            except ValueError:
                continue
            return False
    return True


def _isal() -> Any:
    from isal import isal_zlib

    return isal_zlib


def _compressor(level: int, library: str) -> Callable[[memoryview], bytes]:
    """Codes one block, with matches."""
    if library != "zlib" and level in _ISAL_LEVELS:
        compress = _isal().compress
        return lambda block: bytes(compress(block, level, _RAW))

    def with_zlib(block: memoryview) -> bytes:
        coder = zlib.compressobj(_ZLIB_LEVELS[level], zlib.DEFLATED, _RAW, _MEMORY)
        return coder.compress(block) + coder.flush()

    return with_zlib


def _inflate(module: Any, block: memoryview, room: memoryview) -> str:
    """Decode one block with a module that has zlib's functions; what is wrong with it, "" when nothing is."""
    wanted = room.nbytes
    decoder = module.decompressobj(_RAW)
    try:
        raw = decoder.decompress(block, wanted + 1)
    except module.error:
        return "is damaged"
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
