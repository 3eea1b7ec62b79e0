"""Deflate streams, many to a call and without the GIL."""

import sys
from collections.abc import Sequence

if sys.version_info >= (3, 12):
    from collections.abc import Buffer
else:
    from typing_extensions import Buffer

MOST: int  # bytes of a block, at most
BLOCK_OF_CHUNK_MOST: int  # of a plane, for Inflater.chunk

def open_isal(path: str) -> bool: ...
def literals_size(data: Buffer) -> int: ...
def literals_blocks(source: Buffer, destination: Buffer, block_bytes: int) -> tuple[int, ...]: ...

class Inflater:  # RuntimeError before open_isal
    def blocks(
        self, source: Buffer, lengths: Sequence[int], destination: Buffer, block_bytes: int
    ) -> None: ...  # ValueError names the block
    def chunk(
        self,
        source: Buffer,
        planes: Sequence[tuple[int, Sequence[int]]],  # stored bytes, lengths of blocks (none: not coded)
        destination: Buffer,
        block_bytes: int,
    ) -> int: ...  # CRC32C of the destination; ValueError names plane and block
