"""The reference of a config as Markdown tables, generated from the model: ``configs/README.md``."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ckptpipe.pipeline.config.backend_options import BUILT_IN, options_type
from ckptpipe.pipeline.config.model import Config, RunSettings, Sink, Source, Stage
from ckptpipe.pipeline.config.schema import json_schema
from ckptpipe.storage_backends.quantities import format_bytes

_HEAD = """\
# Pipelines in YAML

`ckptpipe run CONFIG.yaml` runs one, `ckptpipe check CONFIG.yaml` reads it and prints every problem with file,
line and column, or the graph that it stands for. The files in this folder are examples; each is run by a test.
They take their paths from the environment, so they can be tried as they are:

    ckptpipe check configs/nvme-and-s3.yaml
    CKPT_SOURCE=/data/model CKPT_NVME=/mnt/nvme/images ckptpipe run configs/nvme.yaml
    ckptpipe run configs/nvme.yaml --set name=step-100 --set settings.chunk_bytes=16MiB

`schema.json` is the JSON Schema, for editors. This page and the schema are generated from the model that reads
the files (`python -m ckptpipe.pipeline.config.reference configs`).

## Two forms

Short form: lists. Each stage reads the one before it, every sink reads the last stage.

    source: {files: [/data/model]}
    stages: [{compress: "zstd:3"}, {limit: 200MB/s}]
    sinks: [{to: /mnt/nvme/images}, {to: s3://bucket/images, policy: best-effort}]

Graph form: mappings by name. Each stage and sink says in `reads` which node it reads from (`source` where it
does not), so that in one pass one sink gets raw chunks and another compressed ones.

    source: {files: [/data/model]}
    stages:
      shrink: {reads: source, compress: "zstd:3"}
    sinks:
      local: {reads: source, to: /mnt/nvme/images}
      cloud: {reads: shrink, to: s3://bucket/images, options: {part_bytes: 16MiB}}

## Values

- Sizes: `4MiB` (binary), `8MB` (decimal) or a number of bytes. Rates: `200MB/s`. Durations: `30s`, `5m`, `1d`.
- `${NAME}` is the environment variable, `${NAME:-default}` has a default for one that is unset or empty, `$$` is
  a dollar sign. They are replaced in values, never in keys, and what they hold is text, never YAML.
- Only `true` and `false` are booleans (YAML 1.2); `yes`, `no`, `y`, `n`, `1` and `0` are refused. `on` and `off` are
  words, and options that are on or off take both. URLs that end in a colon need quotes: `'null:'`.
- YAML tags are refused, so are keys given twice, and aliases that grow without bound.
- `ckptpipe run --set KEY=VALUE` replaces a value: `sinks.cloud.to=s3://bucket/p`, `sinks.0.policy=best-effort`.
"""


def reference_text() -> str:
    """The whole page, as committed in ``configs/README.md``."""
    parts = [_HEAD, "\n## The config\n", _model_table(Config)]
    parts += [
        "\n## `source`\n",
        "\nExactly one of `files`, `stdin`, `image` and `synthetic`.\n",
        _model_table(Source),
    ]
    parts += [
        "\n## A stage\n",
        "\nExactly one of `compress` and `limit`; `reads` in the graph form only.\n",
        _model_table(Stage),
    ]
    parts += [
        "\n## A sink\n",
        "\nExactly one of `to` and `restore`; `reads` in the graph form only.\n",
        _model_table(Sink),
    ]
    parts += ["\n## `settings`\n", _model_table(RunSettings)]
    for scheme in BUILT_IN:
        parts += [f"\n## `options` of {scheme}\n", _options_table(scheme)]
    return "".join(parts)


def _model_table(model: type[BaseModel]) -> str:
    definitions = json_schema()["$defs"]
    schema = {"Config": json_schema()}.get(model.__name__) or definitions[model.__name__]
    rows = []
    for name, info in model.model_fields.items():
        rows.append(
            (f"`{name}`", _kind(schema["properties"][name]), _default(name, info), info.description or "")
        )
    return _table(("key", "value", "default", "meaning"), rows)


def _options_table(scheme: str) -> str:
    declared = options_type(scheme)
    if declared is None or not dataclasses.fields(declared):
        return "\nNone.\n"
    hints = typing.get_type_hints(declared)
    rows = []
    for item in dataclasses.fields(declared):
        unit = item.metadata.get("unit", "")
        default = item.default if item.default is not dataclasses.MISSING else None
        rows.append(
            (
                f"`{item.name}`",
                _python_kind(hints[item.name], unit),
                _value(default, size=unit == "bytes"),
                item.metadata.get("doc", ""),
            )
        )
    return _table(("key", "value", "default", "meaning"), rows)


def _python_kind(kind: Any, unit: str) -> str:
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return ", ".join(f"`{word}`" if word else "nothing" for word in typing.get_args(kind))
    if origin is not None:
        return _python_kind(next(k for k in typing.get_args(kind) if k is not type(None)), unit)
    if unit:
        return {"bytes": "size", "rate": "rate", "seconds": "duration"}[unit]
    return {bool: "`true`, `false`", int: "whole number", float: "number", str: "text"}[kind]


def _kind(schema: dict[str, Any]) -> str:
    """In words, of what `scalars` and the model put into the schema."""
    if "$ref" in schema:
        return "mapping, below"
    if "oneOf" in schema:
        return "list, or mapping by name"
    kinds = schema.get("anyOf", [schema])
    first = kinds[0]
    if "enum" in first:
        return ", ".join(f"`{word}`" for word in first["enum"])
    patterns = " ".join(str(kind.get("pattern", "")) for kind in kinds)
    if "[sS]" in patterns:
        return "rate"
    if "ms|s|m" in patterns:
        return "duration"
    if "kKmM" in patterns:
        return "size"
    if first.get("type") == "integer":
        return f"whole number, {first['minimum']} to {first['maximum']}"
    if any(kind.get("type") == "array" for kind in kinds):
        return "text, or list of texts"
    return {"boolean": "`true`, `false`", "object": "mapping", "number": "number"}.get(first["type"], "text")


def _default(name: str, info: FieldInfo) -> str:
    if info.is_required():
        return "needed"
    if info.default_factory is not None:
        return ""
    if name == "deadline":
        return f"`{info.default:g}s`"
    return _value(info.default, size=name.endswith("_bytes"))


def _value(value: Any, *, size: bool = False) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if size and value:
        text = format_bytes(value).replace(".0 ", "").replace(" ", "")
        return f"`{text}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n" + "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


def write(folder: str) -> None:
    """Write ``schema.json`` and ``README.md`` into ``folder``."""
    from pathlib import Path

    from ckptpipe.pipeline.config.schema import json_schema_text

    Path(folder, "schema.json").write_text(json_schema_text(), encoding="utf-8")
    Path(folder, "README.md").write_text(reference_text(), encoding="utf-8")


if __name__ == "__main__":
    import sys

    write(sys.argv[1] if len(sys.argv) > 1 else "configs")
