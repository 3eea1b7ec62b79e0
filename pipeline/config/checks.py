"""Everything that can be wrong with a config, all at once: first the model's view, then the graph's."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from ckptpipe.pipeline.config.document import Located
from ckptpipe.pipeline.config.graph_checks import check_graph
from ckptpipe.pipeline.config.model import (
    GRAPH_FORM,
    LIST_FORM,
    Config,
    ListedSink,
    ListedStage,
    RunSettings,
    Sink,
    Source,
    Stage,
)
from ckptpipe.pipeline.config.nearest import suggestion
from ckptpipe.pipeline.config.scalars import kind_of
from ckptpipe.pipeline.config.yaml_positions import Path
from ckptpipe.pipeline.context import check_settings
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.settings import Settings


def checked(located: Located) -> Config | None:
    """The validated config, or None where ``located.problems`` says why not."""
    if located.data is None:
        if not located.problems:
            located.blame((), "the config is empty; it needs at least a source and sinks")
        return None
    if not isinstance(located.data, dict):
        located.blame((), f"expected a mapping with source, stages and sinks, got {kind_of(located.data)}")
        return None
    config: Config | None = None
    faulty: set[Path] = set()
    try:
        config = Config.model_validate(located.data)
    except ValidationError as error:
        for item in error.errors(include_url=False, include_input=False, include_context=True):
            path = tuple(part for part in item["loc"] if part not in (LIST_FORM, GRAPH_FORM, "[key]"))
            faulty.add(path)
            if not located.unreadable(path):
                _blame(located, path, item)
    _refuse_nothing(located, located.data, (), faulty)
    check_graph(located, faulty)
    if config is None or located.problems:
        return None
    try:
        check_settings(Settings(**config.settings.model_dump()))
    except UsageError as error:
        located.blame(("settings",), str(error))
        return None
    return config


def _refuse_nothing(located: Located, data: Any, path: Path, faulty: set[Path]) -> None:
    """A key without a value is more often a slip than a wish for the default."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        inner = (*path, key)
        if value is None and inner not in faulty:
            located.blame(inner, "expected a value, got nothing; leave the key out for its default")
        elif isinstance(value, (dict, list)) and key != "options":
            _refuse_nothing(located, value, inner, faulty)


def _blame(located: Located, path: Path, item: Any) -> None:
    kind = item["type"]
    if kind == "extra_forbidden":
        known = list(_model_at(path[:-1]).model_fields)
        if path[-1] in ("reads", "name") and path[0] in ("stages", "sinks"):
            located.blame(path, _graph_form_only(path), key=True)
            return
        located.blame(path, f'unknown key "{_short(path[-1])}"{suggestion(str(path[-1]), known)}', key=True)
    elif kind == "missing":
        located.blame(path[:-1], f'"{path[-1]}" is missing')
    elif kind in ("model_type", "dict_type", "model_attributes_type"):
        like = _LIKE.get(str(path[0])) if len(path) == 1 or path[0] in ("stages", "sinks") else None
        hint = f" like {like}" if like else ""
        located.blame(path, f"expected a mapping{hint}, got {kind_of(_value_at(located.data, path))}")
    elif kind == "list_type":
        located.blame(
            path, f"expected a list, or a mapping by name, got {kind_of(_value_at(located.data, path))}"
        )
    elif kind == "config":
        context = item["ctx"]
        located.blame(path, context["anonymous" if located.from_variable(path) else "message"])
    else:
        located.blame(path, item["msg"].lower())


_LIKE = {"source": "{files: PATH}", "stages": '{compress: "zstd:3"}', "sinks": "{to: URL}"}


def _graph_form_only(path: Path) -> str:
    """Why ``reads`` or ``name`` is wrong where it stands, and what was probably meant."""
    section, key = path[0], path[-1]
    if isinstance(path[1], int):
        return (
            f"{key} belongs to the graph form; make {section} a mapping by name, or leave {key} out "
            "(in a list each stage reads the one before it)"
        )
    return f"a node is called by its key, {path[1]}; an image is called by the name beside {section}"


def _model_at(path: Path) -> type[BaseModel]:
    """The model whose keys stand at ``path``."""
    if path[:1] == ("source",):
        return Source
    if path[:1] == ("settings",):
        return RunSettings
    if len(path) == 2:
        listed = isinstance(path[1], int)
        if path[0] == "stages":
            return ListedStage if listed else Stage
        return ListedSink if listed else Sink
    return Config


def _value_at(data: Any, path: Path) -> Any:
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def _short(name: object) -> str:
    text = str(name)
    text = text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= 60 else f"{text[:57]}…"
