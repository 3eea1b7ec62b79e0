"""What a codec is: a pure function on bytes, run off the loop without the GIL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar


class Stopped(Exception):
    """Nobody waits for the result any more: the codec stopped half-way."""


def go_on() -> None:
    """The checkpoint of work that nothing stops."""


class Codec(ABC):
    """One compression format. Instances are not shared between threads (`clone` makes one a thread)."""

    name: ClassVar[str]
    id: ClassVar[int]  # in the index's plane records; never reused
    backend: ClassVar[str]  # cpu | nvcomp-cuda | decompression-engine
    checkpoint: Callable[[], None] = staticmethod(go_on)
    """Called from time to time by codecs that take long; raises `Stopped` where the work is to end."""

    @abstractmethod
    def clone(self) -> Codec: ...

    @abstractmethod
    def compress_into(self, source: memoryview, destination: memoryview) -> int:
        """Bytes written, or 0 where they do not fit into ``destination`` (the chunk is then stored raw)."""

    @abstractmethod
    def decompress_into(self, source: memoryview, destination: memoryview) -> None:
        """Fill ``destination`` exactly; ValueError where the input is damaged or gives another length.

        Memory stays bounded whatever the input claims (zstd windows, declared sizes).
        """

    def compress_blocks(
        self, source: memoryview, destination: memoryview, block_bytes: int
    ) -> tuple[int, ...]:
        """Code each block of ``block_bytes`` of ``source`` on its own, one behind the other into ``destination``.

        The stored lengths of the blocks; none where they do not fit.
        """
        lengths = []
        at = 0
        for start in range(0, source.nbytes, block_bytes):
            with source[start : start + block_bytes] as block, destination[at:] as room:
                stored = self.compress_into(block, room)
            if not stored:
                return ()
            lengths.append(stored)
            at += stored
        return tuple(lengths)

    def decompress_blocks(
        self, source: memoryview, lengths: Sequence[int], destination: memoryview, block_bytes: int
    ) -> None:
        """The inverse: fill ``destination`` from blocks of these stored lengths. ValueError names the block.

        ``lengths`` add up to ``source`` and are as many as ``destination`` has blocks.
        """
        at = 0
        for number, stored in enumerate(lengths):
            start = number * block_bytes
            with source[at : at + stored] as block, destination[start : start + block_bytes] as room:
                try:
                    self.decompress_into(block, room)
                except ValueError as error:
                    if len(lengths) == 1:
                        raise
                    raise ValueError(f"block {number} of {len(lengths)}: {error}") from error
            at += stored
