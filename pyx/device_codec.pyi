"""Chunks of device memory, compressed and decompressed by the GPU (types of device_codec.pyx)."""

import asyncio
from collections.abc import Sequence
from typing import Literal, NamedTuple

from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.pyx.nvcomp import Nvcomp
from ckptpipe.pyx.staging import Lease

SCRATCH_BYTES: int  # 512 MiB
LANES: int

class StoredMismatch(CkptpipeError):
    """Stored bytes are not what was stored: no decoder has seen them."""

    found: int
    expected: int

class DecodeError(CkptpipeError):
    """A block was not decoded to what it must be."""

    plane: int
    block: int

class DecoderUnavailableError(CkptpipeError):
    """The decoder, or the encoder, that was asked for cannot run here."""

class ScratchTooSmallError(CkptpipeError):
    """Not even one chunk fits."""

    needed_bytes: int  # of scratch_bytes, at least

class EncodePlan(NamedTuple):
    """How chunks are encoded. Ids as in FORMAT.md."""

    codec_id: int
    level: int = 0  # deflate, gdeflate: 0 to 5
    ans_type: int = 0  # 0 u8, 1 f16, 2 fp8
    transform: int = 0  # 0 none, 1 planes2, 2 planes4
    block_bytes: int = 0  # 0: the codec's own

class Encoded(NamedTuple):
    """``planes`` empty and not ``zero``: the lease has the raw bytes. Else the stored ones; each plane is
    (codec, level, block_bytes, raw_bytes, stored_bytes, block_lengths)."""

    zero: bool
    raw_crc32c: int
    stored_bytes: int
    stored_crc32c: int
    transform: int
    planes: tuple[tuple[int, int, int, int, int, tuple[int, ...]], ...]

class DeviceCodec:
    """The codecs of one GPU; made inside the running loop that it reports to, by `create`."""

    @classmethod
    async def create(
        cls,
        device: int,
        context: int,
        *,
        scratch_bytes: int = ...,
        nvcomp: Nvcomp | None,
        chunk_bytes: int,
        decoder: Literal["auto", "decompression-engine", "nvcomp-cuda"] | str = "auto",
        stream: int = 0,
        lanes: int = 0,  # 0: up to LANES, fewer where the scratch is small
    ) -> DeviceCodec: ...
    @property
    def device(self) -> int: ...
    @property
    def backend(self) -> str: ...  # of encode: "nvcomp-cuda", "" without nvCOMP
    @property
    def decoder(self) -> str: ...  # of deflate: "decompression-engine", "nvcomp-cuda" or ""
    @property
    def why(self) -> str: ...  # why not the decompression engine, "" where it is
    @property
    def encodes(self) -> tuple[int, ...]: ...
    @property
    def decodes(self) -> tuple[int, ...]: ...
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def chunk_bytes(self) -> int: ...
    @property
    def lanes(self) -> int: ...
    @property
    def encoded(self) -> int: ...  # raw bytes
    @property
    def fetched(self) -> int: ...  # bytes that crossed the link for them
    @property
    def decoded_by(self) -> dict[str, int]: ...  # chunks
    @property
    def simulated(self) -> bool: ...
    @property
    def inflight(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    async def prepare(self, plan: EncodePlan) -> None: ...  # checks a plan; ScratchTooSmallError and the like
    def encode(
        self, lease: Lease, nbytes: int, device_address: int, plan: EncodePlan
    ) -> asyncio.Future[Encoded]: ...
    def decode(
        self,
        lease: Lease,
        stored_bytes: int,
        stored_crc32c: int,
        raw_bytes: int,
        transform: int,
        planes: Sequence[tuple[int, int, int, int, int, tuple[int, ...]]],
        device_address: int,
    ) -> asyncio.Future[int]: ...  # CRC32C of the raw bytes
    async def drain(self) -> None: ...
    async def aclose(self) -> None: ...
    async def __aenter__(self) -> DeviceCodec: ...
    async def __aexit__(self, *exc: object) -> None: ...

def live_codecs() -> int: ...  # codecs that hold threads, streams and scratch memory in this process now
