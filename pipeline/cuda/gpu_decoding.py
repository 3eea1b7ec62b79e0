"""Which of an image's codecs the GPUs of a restore decode: found out, with the codecs open, before a target is touched."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckptpipe.pipeline.codecs import CODEC_IDS, DECODABLE
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda.links import Links
from ckptpipe.pipeline.decoding import CPU, ENGINE, coded_with, require_cpu
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.image.codec_use import codecs_used, longest_block
from ckptpipe.pipeline.image.reader import ImageReader
from ckptpipe.pipeline.image.records import PlaneRecord
from ckptpipe.pyx.errors import CkptpipeError

ZSTD = CODEC_IDS["zstd"]


@dataclass(frozen=True, slots=True)
class GpuDecoding:
    """``codecs``: ids of those that the GPUs decode; a chunk with another one in it is the CPU's.

    ``loads``: also what is passed on by its place in a local file. ``needs_ring``: some coded chunks have to be read
    into slots, by whoever decodes them.
    """

    codecs: frozenset[int] = frozenset()
    loads: bool = False
    needs_ring: bool = True

    def takes(self, planes: Sequence[PlaneRecord]) -> bool:
        return bool(self.codecs) and all(plane.codec in self.codecs for plane in planes if plane.codec)


async def plan_decoding(
    links: Links,
    context: GraphContext,
    reader: ImageReader,
    streams: Sequence[str] | None = None,
    *,
    loads: bool = False,
) -> GpuDecoding:
    """For a restore into memory of the GPUs of ``links``, as ``decompress_backend`` says. ``loads``: the sink loads
    chunks from local files.

    ``auto``: the GPUs where they can, and the CPU with a note where they cannot; zstd is the CPU's, since its blocks
    are whole chunks, of which a GPU decodes too few at a time. UnsupportedImage where nobody can; UsageError or
    CkptpipeError where what was forced cannot run. Codecs take their scratch memory here.
    """
    asked = context.settings.decompress_backend
    used = codecs_used(reader.index, reader.select(streams))
    if asked == CPU or (asked == "auto" and not used.keys() - {ZSTD}):
        require_cpu(reader, used)
        return GpuDecoding(needs_ring=bool(used))
    try:
        await links.open_codecs(context, asked, loads=loads)
    except CkptpipeError as error:
        if asked != "auto":
            raise
        require_cpu(reader, used, error)
        context.notes.append(f"the CPU decodes: {error}")
        return GpuDecoding()
    found = await readable(links, context, reader, streams)
    loads = loads and all(link.places is not None for link in links)
    return replace(found, loads=loads, needs_ring=bool(used) and not (loads and used.keys() <= found.codecs))


async def leave_to_cpu(
    links: Links, context: GraphContext, reader: ImageReader, reason: CkptpipeError
) -> GpuDecoding | None:
    """Without codecs on the GPUs, whose memory is short: None where they hold none, or the CPU cannot or shall not."""
    used = codecs_used(reader.index, reader.select(None))
    opened = any(link.codec is not None for link in links)
    if not opened or context.settings.decompress_backend != "auto" or not used.keys() <= DECODABLE:
        return None
    await links.close_codecs(context)
    context.notes.append(f"the CPU decodes, since the memory that codecs take is needed: {reason.message}")
    return GpuDecoding()


async def readable(
    links: Links, context: GraphContext, reader: ImageReader, streams: Sequence[str] | None
) -> GpuDecoding:
    """What the open codecs of ``links`` decode. UsageError where one that was forced lacks what is needed."""
    asked = context.settings.decompress_backend
    positions = reader.select(streams)
    used = codecs_used(reader.index, positions)
    found = frozenset.intersection(*(frozenset(link.codec.decodes) for link in links if link.codec))
    if asked == "auto":
        found -= {ZSTD}
        require_cpu(reader, {codec: use for codec, use in used.items() if codec not in found})
        return GpuDecoding(found)
    for use in used.values():
        if use.codec not in found:
            raise UsageError(
                f"{coded_with(reader, use)}, which {asked} does not decode here",
                cure="leave out --decompress-backend",
            )
    if asked == ENGINE:
        longest = min(link.gpu.decompress_max_bytes for link in links)
        there = await asyncio.to_thread(longest_block, reader.index, positions, used.keys())
        if there > longest:
            raise UsageError(
                f"{reader.url}: blocks of {there} bytes are longer than the {longest} that the decompression engine takes",
                cure="leave out --decompress-backend, or take nvcomp-cuda",
            )
    return GpuDecoding(found)
