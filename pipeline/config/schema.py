"""The JSON Schema of a config, generated from the model and from the options of the built-in backends."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any

from ckptpipe.pipeline.config.backend_options import BUILT_IN, options_type
from ckptpipe.pipeline.config.model import Config
from ckptpipe.pipeline.config.scalars import NODE_NAME, RATE, SIZE, VARIABLE
from ckptpipe.pipeline.config.words import DURATION

# Which URLs a built-in backend serves. A bare path is nvme or fuse, by what is mounted there.
_URLS = {scheme: rf"^{scheme}:" for scheme in BUILT_IN}


def json_schema() -> dict[str, Any]:
    """JSON Schema 2020-12. It judges shape and values; circles and unknown nodes are found by `check` alone."""
    schema = _tidied(Config.model_json_schema())
    definitions = schema["$defs"]
    for scheme in BUILT_IN:
        definitions[f"{scheme}_options"] = _options(scheme)
    for name in ("Sink", "ListedSink"):
        definitions[name]["allOf"] = [_rule("to", scheme) for scheme in BUILT_IN]
    definitions["Source"]["allOf"] = [_rule("image", scheme) for scheme in BUILT_IN]
    for section in ("stages", "sinks"):
        for form in schema["properties"][section]["oneOf"]:
            if form["type"] == "object":
                form["propertyNames"] = {"pattern": f"^(?!source$){NODE_NAME}$"}
                if section == "sinks":
                    form["minProperties"] = 1
            elif section == "sinks":
                form["minItems"] = 1
    schema["if"] = {"properties": {"stages": {"type": "object"}}, "required": ["stages"]}
    schema["then"] = {"properties": {"sinks": {"type": "object"}}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ckptpipe pipeline",
        **schema,
    }


def json_schema_text() -> str:
    """As committed in ``configs/schema.json``."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def _rule(key: str, scheme: str) -> dict[str, Any]:
    return {
        "if": {"properties": {key: {"type": "string", "pattern": _URLS[scheme]}}, "required": [key]},
        "then": {"properties": {"options": {"$ref": f"#/$defs/{scheme}_options"}}},
    }


def _options(scheme: str) -> dict[str, Any]:
    declared = options_type(scheme)
    properties: dict[str, Any] = {}
    if declared is not None:
        hints = typing.get_type_hints(declared)
        for item in dataclasses.fields(declared):
            kinds = _kinds(hints[item.name], item.metadata)
            default = item.default if item.default is not dataclasses.MISSING else None
            properties[item.name] = {
                "anyOf": [*kinds, VARIABLE],
                "description": item.metadata.get("doc", ""),
                "default": default,
            }
    return {
        "type": "object",
        "description": f"Options of the {scheme} backend",
        "properties": properties,
        "additionalProperties": False,
    }


def _kinds(kind: Any, metadata: typing.Mapping[str, Any]) -> list[dict[str, Any]]:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return [found for member in typing.get_args(kind) for found in _kinds(member, metadata)]
    if origin is typing.Literal:
        words = list(typing.get_args(kind))
        booleans = [{"type": "boolean"}] if {"on", "off"} & set(words) else []
        return [{"enum": words}, *booleans]
    if kind is type(None):
        return [{"type": "null"}]
    if kind is bool:
        return [{"type": "boolean"}, {"enum": ["on", "off", "true", "false"]}]
    if kind is int or kind is float:
        number: dict[str, Any] = {"type": "integer" if kind is int else "number"}
        if metadata.get("minimum") is not None:
            number["minimum"] = metadata["minimum"]
        patterns = {"bytes": SIZE, "rate": RATE, "seconds": DURATION, "": r"^[-+]?[0-9.]+$"}
        return [number, {"type": "string", "pattern": patterns[metadata.get("unit", "")]}]
    return [{"type": "string"}]


def _tidied(value: Any) -> Any:
    """Without pydantic's titles, and without nulls: "not given" is how a config says nothing."""
    if isinstance(value, list):
        return [_tidied(item) for item in value]
    if not isinstance(value, dict):
        return value
    result = {}
    for key, item in value.items():
        if key == "title" and isinstance(item, str):
            continue
        if key == "anyOf":
            kept = [_tidied(choice) for choice in item if choice != {"type": "null"}]
            if len(kept) == 1:
                result.update(kept[0])
                continue
            result[key] = kept
        elif key == "default" and item is None:
            continue
        else:
            result[key] = _tidied(item)
    return result
