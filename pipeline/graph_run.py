"""One run of a graph, from its opening to its result: a save, or the reading of an image."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from ckptpipe.pipeline import build
from ckptpipe.pipeline.context import GraphContext, Meter
from ckptpipe.pipeline.graph import Graph, Node
from ckptpipe.pipeline.image.entries import chunk_count
from ckptpipe.pipeline.image.reader import ImageReader
from ckptpipe.pipeline.image.saveid import new_save_id
from ckptpipe.pipeline.progress import ProgressCallback
from ckptpipe.pipeline.result import ReadResult, RunFacts, SaveResult, SinkResult
from ckptpipe.pipeline.sinks.abc import Sink
from ckptpipe.pipeline.sinks.image import ImageSink
from ckptpipe.pipeline.sinks.nothing import NothingSink
from ckptpipe.pipeline.sources.abc import Source
from ckptpipe.pipeline.sources.image import Counts, ImageSource
from ckptpipe.pipeline.spec import GraphSpec
from ckptpipe.pipeline.stages.abc import Stage
from ckptpipe.storage_backends.shielded import shielded

_UNDER_WAY = 16  # chunks of a restore, half read and half written: touching more memory only costs


async def save_graph(
    spec: GraphSpec, source: Source, context: GraphContext, phase: str, progress: ProgressCallback | None
) -> SaveResult:
    """What ``spec`` says behind ``source``, as one save."""
    save_id = new_save_id()
    name = spec.image_name or save_id

    async def link() -> Graph:
        taken = await source.take_stages(spec)
        return build.link(spec, source, context, save_id=save_id, image_name=name, phase=phase, taken=taken)

    return await _save(link, source, context, name, progress)


async def run_linked(
    source: Source,
    context: GraphContext,
    stages: Sequence[Stage],
    sink: ImageSink,
    *,
    phase: str,
    name: str,
    progress: ProgressCallback | None,
) -> SaveResult:
    """Source, stages and sink, one behind the other, as one save."""

    async def link() -> Graph:
        graph = Graph(source, context, phase=phase)
        reads = ""
        for stage in stages:
            graph.add_stage(stage, reads)
            reads = stage.name
        graph.add_sink(sink, reads)
        return graph

    return await _save(link, source, context, name, progress)


async def _save(
    link: Callable[[], Awaitable[Graph]],
    source: Source,
    context: GraphContext,
    name: str,
    progress: ProgressCallback | None,
) -> SaveResult:
    meter = Meter()
    try:
        await _open(source, context)
        graph = await link()
        try:
            await graph.run(progress)
            sinks = [_sink_result(node) for node in graph.sinks]
        finally:
            await shielded(graph.aclose())
        return SaveResult(
            name=name,
            raw_bytes=sum(stream.nbytes for stream in source.streams),
            streams=len(source.streams),
            chunks=_chunks(source, context),
            zero_chunks=max(
                (node.work.zero_chunks for node in graph.sinks if isinstance(node.work, ImageSink)), default=0
            ),
            sinks=sinks,
            facts=_facts(context, meter, source, graph),
        )
    finally:
        await shielded(source.aclose())


async def _open(source: Source, context: GraphContext) -> None:
    await source.open(context)
    if source.total_bytes is not None:
        context.expect(_chunks(source, context))
    await context.prepare()


def _chunks(source: Source, context: GraphContext) -> int:
    return sum(chunk_count(stream.nbytes, context.chunk_bytes) for stream in source.streams)


def _sink_result(node: Node) -> SinkResult:
    assert isinstance(node.work, Sink)
    result = node.work.result()
    if node.error is not None:
        result.ok, result.error = False, str(node.error)
    return result


async def read_graph(
    source: ImageSource, sink: Sink, context: GraphContext, phase: str, progress: ProgressCallback | None
) -> ReadResult:
    meter = Meter()
    await _open(source, context)
    source.land_in(sink.landing)
    if not source.reader.index.has_coded:
        context.expect(_UNDER_WAY)
    graph = Graph(source, context, phase=phase)
    graph.add_sink(sink)
    try:
        await graph.run(progress)
    finally:
        await shielded(graph.aclose())
        await shielded(source.aclose())
    target = "" if isinstance(sink, NothingSink) else sink.url
    facts = _facts(context, meter, source, graph)
    return read_result(source.reader, source.counts, facts, target=target, notes=sink.result().notes)


def read_result(
    reader: ImageReader, counts: Counts, facts: RunFacts, *, target: str = "", notes: Sequence[str] = ()
) -> ReadResult:
    """Of anything that read an image."""
    report = reader.backend.report()
    return ReadResult(
        image_url=reader.url,
        digest=reader.digest,
        save_id=reader.manifest.save_id,
        raw_bytes=counts.raw_bytes,
        stored_bytes=counts.stored_bytes,
        streams=counts.streams,
        chunks=counts.chunks,
        zero_chunks=counts.zero_chunks,
        codec_backend=counts.codec_backend,
        chunks_not_decoded=counts.not_decoded,
        engine=report.engine,
        direct=report.direct,
        retries=report.retries,
        facts=facts,
        target=target,
        notes=[*reader.manifest.notes, *report.notes, *notes],
    )


def _facts(context: GraphContext, meter: Meter, source: Source, graph: Graph) -> RunFacts:
    facts = RunFacts(capture=source.kind)
    facts.copy_seconds = graph.copy_seconds
    meter.read(facts)
    context.describe(facts)
    facts.notes.extend(source.notes())
    return facts
