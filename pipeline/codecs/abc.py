"""What a codec is: a pure function on bytes, run off the loop without the GIL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar


class Codec(ABC):
    """One compression format. Instances are not shared between threads (`clone` makes one a thread)."""

    name: ClassVar[str]
    id: ClassVar[int]  # in the index's plane records; never reused
    backend: ClassVar[str]  # cpu | nvcomp-cuda | decompression-engine

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
