"""From a specification to a graph: makes sources, stages and sinks and links them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ckptpipe.pipeline.codecs import CodecChoice, Encoding, choice_of, parse_compress, parse_transform
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.graph import Graph
from ckptpipe.pipeline.image.layout import is_image_name
from ckptpipe.pipeline.settings import Settings
from ckptpipe.pipeline.sinks.files import FilesSink
from ckptpipe.pipeline.sinks.image import ImageSink
from ckptpipe.pipeline.sources.abc import Source
from ckptpipe.pipeline.sources.buffers import BuffersSource
from ckptpipe.pipeline.sources.files import FilesSource
from ckptpipe.pipeline.sources.stdin import StdinSource
from ckptpipe.pipeline.sources.synthetic import SyntheticSource
from ckptpipe.pipeline.spec import SOURCE, GraphSpec, SinkSpec, SourceSpec, StageSpec
from ckptpipe.pipeline.stages.abc import ChoosingStage, CodingStage
from ckptpipe.pipeline.stages.auto import AutoStage
from ckptpipe.pipeline.stages.compress import CompressStage
from ckptpipe.pipeline.stages.encoded import EncodedStage
from ckptpipe.pipeline.stages.limit import LimitStage


def source_spec(sources: object) -> SourceSpec:
    """What `save` was given: a spec, a path, several paths, or {name: buffer}."""
    if isinstance(sources, SourceSpec):
        return sources
    if sources == "-":
        return SourceSpec("stdin", {})
    if isinstance(sources, str | os.PathLike):
        return SourceSpec("files", {"paths": [os.fspath(sources)]})
    if isinstance(sources, Mapping):
        return SourceSpec("buffers", {"buffers": sources})
    if isinstance(sources, Sequence) and not isinstance(sources, bytes | bytearray | memoryview):
        paths = list(sources)
        if paths == ["-"]:
            return SourceSpec("stdin", {})
        return SourceSpec("files", {"paths": paths})
    raise UsageError(
        f"a {type(sources).__name__} cannot be saved",
        cure='pass a path, a list of paths, or {"name": buffer}',
    )


def make_source(spec: SourceSpec) -> Source:
    """The source of every kind but ``image``, which needs its backend to be opened first."""
    params = spec.params
    if spec.kind == "files":
        return FilesSource(params["paths"])
    if spec.kind == "stdin":
        return StdinSource(params.get("name", "stdin"), params.get("fd", 0))
    if spec.kind == "synthetic":
        return SyntheticSource(int(params["bytes"]), params.get("pattern", "random"))
    if spec.kind == "buffers":
        return BuffersSource(params["buffers"])
    raise UsageError(f"source kind {spec.kind!r} is not known")


def sink_specs(
    to: object, compress: str, transform: str = ""
) -> tuple[tuple[StageSpec, ...], tuple[SinkSpec, ...]]:
    """Stages and sinks of a save to one or several URLs, all compressed the same way (once). ``transform`` "": as
    the settings say."""
    given = [to] if isinstance(to, str | os.PathLike | SinkSpec) else list(to)  # type: ignore[call-overload]
    if not given:
        raise UsageError("no sink", cure="name at least one URL with --to")
    choice = parse_compress(compress)
    params: dict[str, Any] = {"codec": choice.name, "level": choice.level}
    if transform:
        parse_transform(transform)
        params["transform"] = transform
    stages = (StageSpec("compress", "compress", SOURCE, params),) if choice.compresses else ()
    reads = stages[0].name if stages else SOURCE
    sinks = tuple(
        item if isinstance(item, SinkSpec) and item.reads != SOURCE else _reading(item, reads)
        for item in given
    )
    return stages, sinks


def _reading(item: str | os.PathLike[str] | SinkSpec, reads: str) -> SinkSpec:
    if not isinstance(item, SinkSpec):
        return SinkSpec(os.fspath(item), reads=reads)
    return SinkSpec(item.url, item.name, reads, item.kind, item.policy, item.deadline, item.options)


def link(
    spec: GraphSpec,
    source: Source,
    context: GraphContext,
    *,
    save_id: str,
    image_name: str,
    phase: str,
    taken: Mapping[str, tuple[EncodedStage, object]] | None = None,
) -> Graph:
    """Link the graph of ``spec``. Nothing is opened yet. ``taken``: what `Source.take_stages` gave."""
    if not is_image_name(image_name):
        raise UsageError(
            f"{image_name!r} cannot name an image",
            cure="take letters, digits, '.', '_' and '-', at most 128, the first a letter or digit",
        )
    graph = Graph(source, context, phase=phase)
    encoders: dict[str, CodingStage | None] = {SOURCE: None}
    limits = {SOURCE: math.inf}  # bytes a second between a node's encoder and what reads from the node
    for stage in in_order(spec.stages):
        made, wants = (taken or {}).get(stage.name) or (_make_stage(stage, context), None)
        graph.add_stage(made, _edge(stage.reads), wants=wants)
        if isinstance(made, LimitStage):
            encoders[stage.name] = encoders[stage.reads]
            limits[stage.name] = min(limits[stage.reads], made.rate)
        else:
            encoders[stage.name], limits[stage.name] = made, math.inf
    read = {stage.reads for stage in spec.stages} | {sink.reads for sink in spec.sinks}
    for stage in spec.stages:
        if stage.name not in read:
            raise UsageError(
                f"nothing reads from stage {stage.name!r}", cure="let a sink read it, or drop it"
            )
    for number, sink in enumerate(spec.sinks):
        if sink.reads not in encoders:
            raise UsageError(f"sink {sink.url} reads from {sink.reads!r}, which is no node of this graph")
        name = sink.name or f"sink {number + 1}"
        if sink.kind == "files":
            graph.add_sink(FilesSink(sink.url, context, overwrite=spec.overwrite), _edge(sink.reads))
            continue
        image = ImageSink(
            name,
            sink.url,
            context,
            save_id=save_id,
            image_name=image_name,
            overwrite=spec.overwrite,
            policy=sink.policy,
            deadline=sink.deadline,
            options=sink.options,
            compress=encoders[sink.reads],
        )
        graph.add_sink(image, _edge(sink.reads))
        encoder = encoders[sink.reads]
        if isinstance(encoder, ChoosingStage):
            encoder.feeds(image, limits[sink.reads])
    return graph


def in_order(stages: Sequence[StageSpec]) -> list[StageSpec]:
    """Stages sorted so that each comes behind what it reads. UsageError for unknown nodes and cycles."""
    known, rest, ordered = {SOURCE}, list(stages), list[StageSpec]()
    while rest:
        ready = [stage for stage in rest if stage.reads in known]
        if not ready:
            names = ", ".join(f"{stage.name} (reads {stage.reads})" for stage in rest)
            raise UsageError(f"stages that read from no node, or in a circle: {names}")
        for stage in ready:
            ordered.append(stage)
            known.add(stage.name)
            rest.remove(stage)
    return ordered


def _edge(reads: str) -> str:
    return "" if reads == SOURCE else reads


def codec_of(spec: StageSpec) -> CodecChoice:
    """The codec of a compress stage. UsageError where there is none of that name."""
    return choice_of(spec.params["codec"], spec.params.get("level"))


def encoding_of(spec: StageSpec, settings: Settings) -> Encoding:
    """What a compress stage is to do; the transform is the settings' where the stage has none of its own."""
    transform = spec.params.get("transform") or settings.transform
    return Encoding(codec_of(spec), parse_transform(transform))


def _make_stage(spec: StageSpec, context: GraphContext) -> CodingStage | LimitStage:
    params: Mapping[str, Any] = spec.params
    if spec.kind == "limit":
        return LimitStage(spec.name, float(params["rate"]))
    encoding = encoding_of(spec, context.settings)
    sink_bytes = context.backend_context.inflight_bytes
    if encoding.codec.auto:
        leisure = bool(params.get("leisure"))
        return AutoStage(
            spec.name, context, sink_bytes=sink_bytes, transform=encoding.transform, leisure=leisure
        )
    return CompressStage(spec.name, encoding, context, sink_bytes=sink_bytes)
