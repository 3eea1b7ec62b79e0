"""`recompress`: a stored image rewritten in place with a better codec, at leisure."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptpipe.pipeline.blocking import blocking
from ckptpipe.pipeline.codecs import Encoding, parse_compress, parse_transform
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.decoding import decoding_for_host
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.graph_run import run_linked
from ckptpipe.pipeline.image.reader import ImageReader
from ckptpipe.pipeline.image.saveid import new_save_id
from ckptpipe.pipeline.leisure import at_leisure
from ckptpipe.pipeline.opening import Options, reading
from ckptpipe.pipeline.progress import Progress, ProgressCallback
from ckptpipe.pipeline.result import RunFacts, SaveResult, SinkResult
from ckptpipe.pipeline.settings import Settings, TransformName
from ckptpipe.pipeline.sinks.replacement import NotSmaller, ReplacementSink
from ckptpipe.pipeline.sources.image import ImageSource
from ckptpipe.pipeline.stages.abc import CodingStage
from ckptpipe.pipeline.stages.auto import AutoStage
from ckptpipe.pipeline.stages.compress import CompressStage
from ckptpipe.pipeline.stages.limit import LimitStage
from ckptpipe.pipeline.stages.prove import ProveStage
from ckptpipe.storage_backends.quantities import format_bytes

WORTH = 0.01
"""With auto, an image that would not shrink by this share of its stored bytes is left as it is."""


class SameSource(ImageSource):
    """An image as the source of itself: what the manifest says of where its bytes came from stays true."""

    def facts(self) -> dict[str, Any]:
        return dict(self.reader.manifest.source)

    def process(self) -> dict[str, Any] | None:
        process = self.reader.manifest.process
        return None if process is None else dict(process)


async def recompress(
    url: str,
    *,
    compress: str = "auto",
    transform: TransformName | None = None,
    nice: bool = False,
    rate: float | None = None,
    threads: int = 0,
    options: Options | None = None,
    settings: Settings | None = None,
    progress: ProgressCallback | None = None,
) -> SaveResult:
    """Rewrite the image at ``url`` in place, its chunks coded anew; its contents stay what they are.

    ``compress``: a codec that the CPU writes, or ``auto``: the smallest result that a few seconds a GB buy, and none
    where the image is as small already. ``nice``: CPUs and disks go to everything else first. ``rate``: raw bytes a
    second at most. ``threads``: cores at most (0: all).

    The old image stands until the new one, with a save id of its own, is whole and takes its place in one step; every
    coded chunk has been decoded again by then, and every raw CRC32C compared. Name, process, tree and source are kept.
    Raises ImageReplaced where another image took its place meanwhile, which is then left alone; ImageNotFound,
    ImageCorrupt, UnsupportedImage, UsageError and StorageError as `copy` does.
    """
    if not parse_compress(compress).compresses and transform not in (None, "none"):
        raise UsageError("a transform is of no use without a codec", cure="leave the transform out")
    if rate is not None and rate <= 0:
        raise UsageError(f"at {rate:g} bytes a second nothing would ever move", cure="take a positive rate")
    if threads < 0:
        raise UsageError(f"{threads} threads are not possible", cure="take 1 or more, or 0 for all CPUs")
    chosen = settings or Settings()
    if threads:
        chosen = replace(chosen, codec_threads=threads, workers=threads)
    encoding = Encoding(parse_compress(compress), parse_transform(transform or chosen.transform))

    async def work(tell: ProgressCallback | None) -> SaveResult:
        async with reading(url, options, chosen) as (reader, context):
            return await _recompress(reader, context, encoding, rate, options or {}, tell)

    if not nice:
        return await work(progress)
    tell = None if progress is None else _from_thread(progress)
    return await at_leisure(lambda: work(tell))


def _from_thread(progress: ProgressCallback) -> ProgressCallback:
    loop = asyncio.get_running_loop()

    def tell(latest: Progress) -> None:
        loop.call_soon_threadsafe(progress, latest)

    return tell


async def _recompress(
    reader: ImageReader,
    context: GraphContext,
    encoding: Encoding,
    rate: float | None,
    options: Mapping[str, object],
    progress: ProgressCallback | None,
) -> SaveResult:
    sink_bytes = context.backend_context.inflight_bytes
    async with decoding_for_host(reader, context, None) as decoder:
        source = SameSource(reader, decode=True, decoder=decoder)
        auto = encoding.codec.auto
        stage: CodingStage
        if auto:
            stage = AutoStage(
                "compress", context, sink_bytes=sink_bytes, transform=encoding.transform, leisure=True
            )
        else:
            stage = CompressStage("compress", encoding, context, sink_bytes=sink_bytes)
        sink = ReplacementSink(
            reader,
            context,
            save_id=new_save_id(),
            options=options,
            compress=stage,
            gain=WORTH if auto else -float("inf"),
        )
        limits = [] if rate is None else [LimitStage("limit", rate)]
        before = reader.manifest.totals.stored_bytes
        try:
            result = await run_linked(
                source,
                context,
                [*limits, stage, ProveStage("prove", context)],
                sink,
                phase="recompress",
                name=reader.manifest.name,
                progress=progress,
            )
        except NotSmaller:
            return _left_alone(reader, source, context)
        result.facts.notes.append(f"stored bytes before: {format_bytes(before)}")
        return result


def _left_alone(reader: ImageReader, source: ImageSource, context: GraphContext) -> SaveResult:
    totals, facts = reader.manifest.totals, RunFacts(capture=source.kind)
    context.describe(facts)
    facts.notes.append("the image is as small as auto makes it; it was left as it is")
    sink = SinkResult(
        url=reader.url,
        image_url=reader.url,
        policy="required",
        ok=True,
        digest=reader.digest,
        save_id=reader.manifest.save_id,
        stored_bytes=totals.stored_bytes,
        index_bytes=reader.manifest.index.bytes,
        objects=len(reader.manifest.objects),
        codec=str(reader.manifest.codec.get("name", "none")),
    )
    return SaveResult(
        name=reader.manifest.name,
        raw_bytes=totals.raw_bytes,
        streams=len(reader.manifest.streams),
        chunks=totals.chunks,
        zero_chunks=totals.zero_chunks,
        sinks=[sink],
        facts=facts,
    )


recompress_blocking = blocking(recompress)
