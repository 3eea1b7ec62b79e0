"""Which of an image's codecs the GPUs of a restore decode: found out, with the codecs open, before a target is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda import codec_device
from ckptpipe.pipeline.cuda.links import Links
from ckptpipe.pipeline.decoding import CPU, ENGINE, require_cpu, uses
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.image.codec_use import CodecUse
from ckptpipe.pipeline.image.reader import ImageReader
from ckptpipe.pipeline.image.records import PlaneRecord
from ckptpipe.pyx.errors import CkptpipeError


@dataclass(frozen=True, slots=True)
class GpuDecoding:
    """``codecs``: ids of those that the GPUs decode; what has others in it, or none of them, is the CPU's."""

    codecs: frozenset[int] = frozenset()

    def takes(self, planes: Sequence[PlaneRecord]) -> bool:
        return bool(self.codecs) and all(plane.codec in self.codecs for plane in planes if plane.codec)


async def plan_decoding(
    links: Links, context: GraphContext, reader: ImageReader, streams: Sequence[str] | None = None
) -> GpuDecoding:
    """For a restore into memory of the GPUs of ``links``, as ``decompress_backend`` says.

    ``auto``: the GPUs where they can, and the CPU with a note where they cannot. UnsupportedImage where nobody can;
    UsageError or CkptpipeError where what was forced cannot run. Codecs take their scratch memory here.
    """
    asked = context.settings.decompress_backend
    used = await uses(reader, streams)
    if asked == CPU or (asked == "auto" and not used.keys() & codec_device.READS):
        require_cpu(reader, used)
        return GpuDecoding()
    try:
        await links.open_codecs(context, asked)
    except CkptpipeError as error:
        if asked != "auto":
            raise
        require_cpu(reader, used, error)
        context.notes.append(f"the CPU decodes: {error}")
        return GpuDecoding()
    return GpuDecoding(readable(links, asked, reader, used))


def readable(links: Links, asked: str, reader: ImageReader, used: Mapping[int, CodecUse]) -> frozenset[int]:
    """Ids of the codecs that every GPU decodes. UsageError where a forced decoder lacks one that is needed."""
    found = frozenset.intersection(
        *(codec_device.reads(link.codec) for link in links if link.codec is not None)
    )
    if asked == "auto":
        require_cpu(reader, {codec: use for codec, use in used.items() if codec not in found})
        return found
    longest = min(link.gpu.decompress_max_bytes for link in links)
    for use in used.values():
        if use.codec not in found:
            raise UsageError(
                f"{reader.url}: {use.chunks} chunks are coded with {use.name}, which {asked} does not decode here",
                cure="leave out --decompress-backend: what can be decoded nowhere else is then found a decoder for",
            )
        if asked == ENGINE and use.longest_block > longest:
            raise UsageError(
                f"{reader.url}: {use.name} blocks of {use.longest_block} bytes are longer than the {longest} that the "
                "decompression engine takes",
                cure="leave out --decompress-backend, or take nvcomp-cuda",
            )
    return found
