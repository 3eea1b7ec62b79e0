"""The codec that changes nothing."""

from __future__ import annotations

from typing import ClassVar

from ckptpipe.pipeline.codecs.abc import Codec


class NoneCodec(Codec):
    """Copies. The graph stores raw chunks without calling it; it is here so that every id has a codec."""

    name: ClassVar[str] = "none"
    id: ClassVar[int] = 0
    backend: ClassVar[str] = "cpu"

    def clone(self) -> NoneCodec:
        return NoneCodec()

    def compress_into(self, source: memoryview, destination: memoryview) -> int:
        if source.nbytes > destination.nbytes:
            return 0
        destination[: source.nbytes] = source
        return source.nbytes

    def decompress_into(self, source: memoryview, destination: memoryview) -> None:
        if source.nbytes != destination.nbytes:
            raise ValueError(f"{source.nbytes} stored bytes where {destination.nbytes} belong")
        destination[:] = source
