"""Chunks of device memory, compressed and decompressed by the GPU (types of device_codec.pyx)."""

import asyncio
from collections.abc import Sequence
from typing import Literal

from ckptpipe.pyx.codec_errors import DecodeError as DecodeError
from ckptpipe.pyx.codec_errors import DecoderUnavailableError as DecoderUnavailableError
from ckptpipe.pyx.codec_errors import ScratchTooSmallError as ScratchTooSmallError
from ckptpipe.pyx.codec_errors import StoredMismatch as StoredMismatch
from ckptpipe.pyx.encode_plan import Encoded as Encoded
from ckptpipe.pyx.encode_plan import EncodePlan as EncodePlan
from ckptpipe.pyx.encode_plan import Plane
from ckptpipe.pyx.loop_work import LoopWork
from ckptpipe.pyx.nvcomp import Nvcomp
from ckptpipe.pyx.staging import Lease

SCRATCH_BYTES: int  # 512 MiB
LANES: int

class DeviceCodec(LoopWork):
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
        links: int = 0,  # streams of copies to the host: 1 or 2, 0 for 2
    ) -> DeviceCodec: ...
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
    def links(self) -> int: ...
    @property
    def encoded(self) -> int: ...  # raw bytes
    @property
    def fetched(self) -> int: ...  # bytes that crossed the link for them
    @property
    def decoded_by(self) -> dict[str, int]: ...  # chunks
    @property
    def simulated(self) -> bool: ...
    @property
    def running(self) -> int: ...
    @property
    def batches(self) -> int: ...  # that lanes have begun: chunks of one are worked on side by side
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
        planes: Sequence[Plane],
        device_address: int,
    ) -> asyncio.Future[int]: ...  # CRC32C of the raw bytes
    def decode_loaded(
        self,
        loaded_address: int,
        stored_bytes: int,
        stored_crc32c: int,
        raw_bytes: int,
        transform: int,
        planes: Sequence[tuple[int, int, int, int, int, tuple[int, ...]]],
        device_address: int,
    ) -> asyncio.Future[int]: ...  # of stored bytes on the device, from a multiple of 256 on

def live_codecs() -> int: ...  # codecs that hold threads, streams and scratch memory in this process now
