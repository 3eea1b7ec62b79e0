"""The codecs of a GPU (nvCOMP, its decompression engine): what they can do here, and how one is made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from ckptpipe.pipeline.codecs.encoding import Encoding
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda.driver import CudaDriver, Gpu
from ckptpipe.pipeline.decoding import CPU, NVCOMP, BadChunk, differs
from ckptpipe.pipeline.image.records import PlaneRecord
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.pyx.staging import Lease

if TYPE_CHECKING:
    from ckptpipe.pyx.device_codec import DeviceCodec, EncodePlan

WRITES = frozenset({"deflate", "ans", "gdeflate"})
"""Names of the codecs that a GPU writes."""

PLACES_MIN, PLACES_MAX = 8, 32
"""Chunks that are loaded, or have been and are not decoded yet, on one GPU."""


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
    driver: CudaDriver, gpu: Gpu, context: int, run: GraphContext, decoder: str = "auto", taken: int = 0
) -> DeviceCodec:
    """The codec of one GPU, with the scratch memory that the settings of ``run`` say, less the bytes that are ``taken``.

    Raises as `DeviceCodec.create` does, and CkptpipeError where there is neither nvCOMP nor a decompression engine to
    decode with.
    """
    from ckptpipe.pyx.device_codec import DeviceCodec

    try:
        library = await driver.run(find_nvcomp)
    except CkptpipeError:
        if decoder == NVCOMP or (decoder == "auto" and not gpu.decompress_mask):
            raise
        library = None
    return await DeviceCodec.create(
        gpu.ordinal,
        context,
        scratch_bytes=run.settings.gpu_scratch_bytes - taken,
        nvcomp=library,
        chunk_bytes=run.chunk_bytes,
        decoder=decoder,
    )


def places(run: GraphContext) -> int:
    """How many chunks of stored bytes may wait on a GPU beside its codec: 0 where scratch is too small for some."""
    count = min(PLACES_MAX, run.settings.gpu_scratch_bytes // 2 // run.chunk_bytes)
    return count if count >= PLACES_MIN else 0


def encode_plan(encoding: Encoding) -> EncodePlan:
    """What `DeviceCodec.encode` is asked for."""
    from ckptpipe.pyx.device_codec import EncodePlan

    choice = encoding.codec
    return EncodePlan(
        codec_id=choice.id,
        level=0 if choice.name == "ans" else choice.level or 0,
        ans_type=(choice.level or 0) if choice.name == "ans" else 0,
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


async def decode(codec: DeviceCodec, coded: _Coded, stored: Lease | int, address: int) -> None:
    """Decode ``stored`` (a lease, or where its bytes lie on the device) to ``address``. BadChunk where either checksum
    is another, or the decoder complains."""
    from ckptpipe.pyx.device_codec import DecodeError, StoredMismatch

    facts = coded.stored_bytes, coded.stored_crc32c, coded.raw_bytes, coded.transform, coded.planes, address
    try:
        if isinstance(stored, int):
            found = await codec.decode_loaded(stored, *facts)
        else:
            found = await codec.decode(stored, *facts)
    except StoredMismatch as error:
        raise BadChunk(differs("stored", error.found, coded.stored_crc32c)) from error
    except DecodeError as error:
        raise BadChunk(f"cannot be decoded: {error}") from error
    if found != coded.raw_crc32c:
        raise BadChunk(differs("decoded", found, coded.raw_crc32c))


def shown(backends: Iterable[str], simulated: bool) -> str:
    """Names of backends for a result: nothing that a simulation did is passed off as a GPU's."""
    return ", ".join(f"{each} (simulated)" if simulated and each != CPU else each for each in backends)
