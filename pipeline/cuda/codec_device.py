"""The codecs of a GPU (nvCOMP, its decompression engine): what they can do here, and how one is made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from ckptpipe.pipeline.codecs.choice import ANS_TYPES
from ckptpipe.pipeline.codecs.encoding import Encoding
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda.driver import CudaDriver, Gpu
from ckptpipe.pipeline.decoding import CPU, ENGINE, NVCOMP, BadChunk, differs
from ckptpipe.pipeline.image.records import PlaneRecord
from ckptpipe.pyx.cuda import CudaError
from ckptpipe.pyx.cuda_errors import OUT_OF_MEMORY
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.pyx.staging import Lease
from ckptpipe.storage_backends.quantities import format_bytes

if TYPE_CHECKING:
    from ckptpipe.pyx.device_codec import DeviceCodec, EncodePlan

WRITES = frozenset({"deflate", "ans", "gdeflate"})
"""Names of the codecs that a GPU writes."""
ENGINE_FORMATS = {1: 2, 2: 6, 4: 5}
"""Bits of the decompression engine's mask (attribute 136), and the ids of the codecs that they stand for."""


class NoGpuCodec(CkptpipeError):
    """A codec of the GPU cannot be had here."""


def find_nvcomp() -> Any:
    """nvCOMP, loaded once a process. CkptpipeError, with the cure, where it is not installed. Blocking."""
    from ckptpipe.pyx import nvcomp

    return nvcomp.load()


def why_no_encoder() -> CkptpipeError | None:
    """Why nothing can be encoded on a GPU here, None where it can. Blocking."""
    try:
        find_nvcomp()
    except CkptpipeError as error:
        return error
    return None


async def create(
    driver: CudaDriver, gpu: Gpu, context: int, run: GraphContext, decoder: str = "auto"
) -> tuple[DeviceCodec, frozenset[int]]:
    """The codec of one GPU, with the scratch memory that the settings of ``run`` say, and the ids of what it decodes.

    NoGpuCodec where that is more than is free; CkptpipeError and UsageError as `DeviceCodec.create` has them.
    """
    from ckptpipe.pyx.device_codec import DeviceCodec

    try:
        library = await driver.run(find_nvcomp)
    except CkptpipeError:
        if decoder == NVCOMP or not gpu.decompress_mask:
            raise
        library = None
    scratch = run.settings.gpu_scratch_bytes
    try:
        codec = await DeviceCodec.create(
            gpu.ordinal,
            context,
            scratch_bytes=scratch,
            nvcomp=library,
            chunk_bytes=run.chunk_bytes,
            decoder=decoder,
        )
    except CudaError as error:
        if error.code != OUT_OF_MEMORY:
            raise
        free, _ = await driver.memory(context)
        raise NoGpuCodec(
            f"{gpu.uuid} ({gpu.name}) has {format_bytes(free)} of memory free, its codecs want {format_bytes(scratch)} of "
            f"scratch: {error.message}",
            cure="let codecs have less (--gpu-scratch), free memory on that GPU, or do without: --compress none or zstd on "
            "a save, --decompress-backend cpu on a restore",
        ) from error
    reads = frozenset[int]()
    if codec.decoder == ENGINE:
        reads = frozenset(number for bit, number in ENGINE_FORMATS.items() if gpu.decompress_mask & bit)
    if library is not None and decoder != ENGINE:
        reads |= frozenset(library.formats)
    return codec, reads


def encode_plan(encoding: Encoding) -> EncodePlan:
    """What `DeviceCodec.encode` is asked for."""
    from ckptpipe.pyx.device_codec import EncodePlan

    choice = encoding.codec
    return EncodePlan(
        codec_id=choice.id,
        level=choice.level or 0,
        ans_type=ANS_TYPES[choice.level or 0] if choice.name == "ans" else "",
        transform=encoding.transform,
        block_bytes=encoding.block_bytes,
    )


class _Coded(Protocol):
    """What a chunk and an index row have in common."""

    @property
    def stored_bytes(self) -> int: ...
    @property
    def stored_crc32c(self) -> int: ...
    @property
    def raw_bytes(self) -> int: ...
    @property
    def raw_crc32c(self) -> int: ...
    @property
    def transform(self) -> int: ...
    @property
    def planes(self) -> tuple[PlaneRecord, ...]: ...


async def decode(codec: DeviceCodec, coded: _Coded, stored: Lease, address: int) -> None:
    """Decode ``stored`` to ``address``. BadChunk where either checksum is another, or the decoder complains."""
    from ckptpipe.pyx.device_codec import DecodeError, StoredMismatch

    try:
        found = await codec.decode(
            stored,
            coded.stored_bytes,
            coded.stored_crc32c,
            coded.raw_bytes,
            coded.transform,
            coded.planes,
            address,
        )
    except StoredMismatch as error:
        raise BadChunk(differs("stored", error.found, coded.stored_crc32c)) from error
    except DecodeError as error:
        raise BadChunk(f"cannot be decoded: {error}") from error
    if found != coded.raw_crc32c:
        raise BadChunk(differs("decoded", found, coded.raw_crc32c))


def shown(backends: Iterable[str], simulated: bool) -> str:
    """Names of backends for a result: nothing that a simulation did is passed off as a GPU's."""
    return ", ".join(f"{each} (simulated)" if simulated and each != CPU else each for each in backends)
