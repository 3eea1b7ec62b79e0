"""From a validated config to the graph's specification and the run's settings."""

from __future__ import annotations

from typing import Any

from ckptpipe.pipeline.config.model import Config, ListedSink, ListedStage, Sink, Source, Stage
from ckptpipe.pipeline.settings import Settings
from ckptpipe.pipeline.spec import SOURCE, GraphSpec, SinkSpec, SourceSpec, StageSpec


def build(config: Config) -> tuple[GraphSpec, Settings]:
    """``config`` must have passed `checks.checked`."""
    stages: list[StageSpec] = []
    last = SOURCE
    if isinstance(config.stages, dict):
        stages = [_stage(name, stage.reads, stage) for name, stage in config.stages.items()]
    else:
        for number, listed in enumerate(config.stages, 1):
            stages.append(
                _stage(f"{'limit' if listed.compress is None else 'compress'}-{number}", last, listed)
            )
            last = stages[-1].name
    if isinstance(config.sinks, dict):
        sinks = [_sink(name, sink.reads, sink) for name, sink in config.sinks.items()]
    else:
        sinks = [_sink("", last, listed_sink) for listed_sink in config.sinks]
    spec = GraphSpec(
        source=_source(config.source),
        sinks=tuple(sinks),
        stages=tuple(stages),
        image_name=config.name or "",
        overwrite=config.overwrite,
    )
    return spec, Settings(**config.settings.model_dump())


def _source(source: Source) -> SourceSpec:
    if source.files is not None:
        return SourceSpec("files", {"paths": tuple(source.files)})
    if source.stdin is not None:
        return SourceSpec("stdin", {"name": source.stdin})
    if source.synthetic is not None:
        return SourceSpec("synthetic", {"bytes": source.synthetic, "pattern": source.pattern})
    params: dict[str, Any] = {"url": source.image}
    if source.streams:
        params["streams"] = tuple(source.streams)
    if source.expect_digest:
        params["expect_digest"] = source.expect_digest
    if source.options:
        params["options"] = dict(source.options)
    return SourceSpec("image", params)


def _stage(name: str, reads: str, stage: ListedStage | Stage) -> StageSpec:
    if stage.compress is not None:
        codec = stage.compress
        params: dict[str, Any] = {"codec": codec.name, "level": codec.level}
        if stage.transform is not None:
            params["transform"] = stage.transform
        return StageSpec(name, "compress", reads, params)
    return StageSpec(name, "limit", reads, {"rate": stage.limit})


def _sink(name: str, reads: str, sink: ListedSink | Sink) -> SinkSpec:
    return SinkSpec(
        url=sink.to or sink.restore or "",
        name=name,
        reads=reads,
        kind="image" if sink.to else "files",
        policy=sink.policy,
        deadline=sink.deadline,
        options=dict(sink.options or {}),
    )
