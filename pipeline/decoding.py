"""Who decodes the chunks of an image: decided, and refused where nobody can, before anything is written."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from ckptpipe.pipeline.codecs import DECODABLE
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.errors import UnsupportedImage
from ckptpipe.pipeline.image.codec_use import CodecUse, codecs_used
from ckptpipe.pipeline.image.reader import ImageReader
from ckptpipe.pipeline.image.records import ChunkRecord, PlaneRecord
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.pyx.staging import Lease

NVCOMP, ENGINE, CPU = "nvcomp-cuda", "decompression-engine", "cpu"
CURE = "on a machine with an NVIDIA GPU: pip install 'ckptpipe[gpu]', and do it there"


class BadChunk(Exception):
    """A chunk's bytes are not what was saved; the text says in what way."""


class HostDecoder(Protocol):
    """Decodes into host memory what the CPU does not decode, or shall not."""

    def takes(self, planes: Sequence[PlaneRecord]) -> bool: ...

    async def decode(self, row: ChunkRecord, stored: Lease, raw: Lease) -> None:
        """Fill ``raw[:row.raw_bytes]``, both checksums checked. BadChunk where one is another."""

    def decoded_by(self) -> dict[str, int]:
        """Chunks by who decoded them, as a result names it."""
        ...


def differs(what: str, found: int, wanted: int) -> str:
    return f"{what} bytes have the checksum {found:08x}, the index says {wanted:08x}"


def coded_with(reader: ImageReader, use: CodecUse) -> str:
    """For a message: where a codec is met first."""
    return f"{reader.url}: stream {reader.manifest.streams[use.stream].name} chunk {use.chunk} is coded with {use.name}"


def require_cpu(
    reader: ImageReader, used: Mapping[int, CodecUse], reason: CkptpipeError | None = None
) -> None:
    """UnsupportedImage where the CPU does not have one of the codecs. ``reason``: why no GPU decodes it."""
    for use in used.values():
        if use.codec not in DECODABLE:
            why = f" ({reason.message})" if reason is not None else ""
            raise UnsupportedImage(
                f"{coded_with(reader, use)}, which only a GPU with nvCOMP decodes{why}", cure=CURE
            ) from reason


@asynccontextmanager
async def decoding_for_host(
    reader: ImageReader, context: GraphContext, streams: Sequence[str] | None
) -> AsyncIterator[HostDecoder | None]:
    """For a restore into files or buffers, as ``decompress_backend`` says: None where the CPU decodes all.

    ``auto`` is the CPU where it has the codecs, a GPU where it has not. UnsupportedImage where neither has;
    UsageError or CkptpipeError where what was forced cannot run.
    """
    asked = context.settings.decompress_backend
    used = codecs_used(reader.index, reader.select(streams))
    if asked == CPU or (asked == "auto" and used.keys() <= DECODABLE):
        require_cpu(reader, used)
        yield None
        return
    from ckptpipe.pipeline.cuda.host_decoder import gpu_decoder

    async with gpu_decoder(reader, context, streams) as decoder:
        yield decoder


@asynccontextmanager
async def decoding_for_verify(
    reader: ImageReader, context: GraphContext
) -> AsyncIterator[tuple[HostDecoder | None, frozenset[int]]]:
    """As `decoding_for_host`, of all streams; and with ``auto``, the codecs that nobody here decodes, in place of an
    error: the stored bytes of their chunks can be verified all the same."""
    async with AsyncExitStack() as stack:
        try:
            decoder = await stack.enter_async_context(decoding_for_host(reader, context, None))
        except UnsupportedImage:
            if context.settings.decompress_backend != "auto":
                raise
            used = codecs_used(reader.index, reader.select(None))
            decoder, left = None, frozenset(used.keys() - DECODABLE)
        else:
            left = frozenset()
        yield decoder, left
