"""A graph as a few lines of text: what `ckptpipe check` prints."""

from __future__ import annotations

from ckptpipe.pipeline.codecs.choice import choice_of
from ckptpipe.pipeline.config.backend_options import redacted
from ckptpipe.pipeline.spec import SOURCE, GraphSpec, SinkSpec, SourceSpec, StageSpec
from ckptpipe.storage_backends.quantities import format_bytes, format_rate


def draw(spec: GraphSpec) -> list[str]:
    """The source on the first line, below it each node under the one that it reads."""
    return [f"source: {_source(spec.source)}", *_below(spec, SOURCE, "")]


def _below(spec: GraphSpec, reads: str, indent: str) -> list[str]:
    nodes: list[StageSpec | SinkSpec] = [
        *(sink for sink in spec.sinks if sink.reads == reads),
        *(stage for stage in spec.stages if stage.reads == reads),
    ]
    lines: list[str] = []
    for node in nodes:
        last = node is nodes[-1]
        text = _sink(node, spec.image_name) if isinstance(node, SinkSpec) else _stage(node)
        lines.append(f"{indent}{'└─' if last else '├─'} {text}")
        if isinstance(node, StageSpec):
            lines.extend(_below(spec, node.name, indent + ("   " if last else "│  ")))
    return lines


def _source(source: SourceSpec) -> str:
    params = source.params
    if source.kind == "files":
        return "files " + ", ".join(params["paths"])
    if source.kind == "stdin":
        return f"standard input as {params['name']}"
    if source.kind == "synthetic":
        return f"synthetic {format_bytes(params['bytes'])}, {params['pattern']}"
    streams = f" ({', '.join(params['streams'])})" if params.get("streams") else ""
    return f"image {redacted(str(params.get('url', '')))}{streams}"


def _stage(stage: StageSpec) -> str:
    params = stage.params
    if stage.kind == "limit":
        return f"{stage.name}: limit {format_rate(params['rate'])}"
    return f"{stage.name}: compress {choice_of(params['codec'], params.get('level'))}"


def _sink(sink: SinkSpec, image_name: str) -> str:
    name = f"{sink.name}: " if sink.name else ""
    url = redacted(sink.url)
    if sink.kind == "files":
        what = f"restore to {url}"
    else:
        what = f"image {image_name or '(named by time)'} under {url}"
    policy = (
        "" if sink.policy == "required" else f", best-effort (dropped after {sink.deadline:g} s of delay)"
    )
    return f"{name}{what}{policy}"
