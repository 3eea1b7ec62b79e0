"""Options of a backend: a frozen dataclass that drives parsing, help, YAML validation and the JSON Schema.

@dataclass(frozen=True, slots=True)
class Options:
    direct: DirectMode = option("auto", "bypass the page cache")
    preallocate: int = option(1 << 30, "bytes reserved ahead", unit="bytes")
"""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypeVar

from ckptpipe.storage_backends.errors import BadUrl
from ckptpipe.storage_backends.quantities import parse_bytes, parse_rate

Unit = Literal["", "bytes", "rate", "seconds"]
T = TypeVar("T")

_FLAGS = {"on": True, "true": True, "off": False, "false": False}


def option(default: Any, doc: str, *, unit: Unit = "", minimum: float | None = None) -> Any:
    """A field of an options dataclass. ``unit`` says how strings are read: "4MiB", "200MB/s", seconds."""
    return field(default=default, metadata={"doc": doc, "unit": unit, "minimum": minimum})


@dataclass(frozen=True, slots=True)
class OptionProblem:
    """One fault of one option."""

    key: str
    message: str


def nearest(word: str, known: Sequence[str]) -> str:
    """`` (did you mean "direct"?)``, or "" where nothing is near."""
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f' (did you mean "{found[0]}"?)' if found else ""


def parse_options(options_type: type[T], mapping: Mapping[str, object], scheme: str) -> T:
    """``options_type`` with the values of ``mapping``. BadUrl names every unknown key and wrong value at once."""
    values, problems = _read(options_type, mapping, scheme)
    if problems:
        raise BadUrl("; ".join(problem.message for problem in problems))
    return options_type(**values)


def split_options(
    options_type: type[T], mapping: Mapping[str, object], scheme: str
) -> tuple[T, dict[str, object]]:
    """``options_type`` from the keys that it knows, and the other keys: a wrapper's and its inner backend's."""
    known = {item.name for item in fields(options_type)}  # type: ignore[arg-type]
    mine = {key: value for key, value in mapping.items() if key in known}
    rest = {key: value for key, value in mapping.items() if key not in known}
    return parse_options(options_type, mine, scheme), rest


def option_problems(
    options_type: type[object], mapping: Mapping[str, object], scheme: str
) -> list[OptionProblem]:
    """What `parse_options` would refuse, one by one, in the mapping's order: for configs with positions."""
    return _read(options_type, mapping, scheme)[1]


def _read(
    options_type: type[object], mapping: Mapping[str, object], scheme: str
) -> tuple[dict[str, Any], list[OptionProblem]]:
    hints = typing.get_type_hints(options_type)
    known = {item.name: item for item in fields(options_type)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    problems: list[OptionProblem] = []
    for key, value in mapping.items():
        item = known.get(key)
        if item is None:
            hint = nearest(str(key), list(known))
            names = ", ".join(known) if known else "none"
            problems.append(
                OptionProblem(str(key), f'{scheme}: unknown option "{key}"{hint}; known options: {names}')
            )
            continue
        try:
            values[key] = _convert(hints[key], value, item.metadata.get("unit", ""))
            minimum = item.metadata.get("minimum")
            if minimum is not None and values[key] is not None and values[key] < minimum:
                raise ValueError(f"{value!r} is less than {minimum}")
        except ValueError as error:
            problems.append(OptionProblem(key, f'{scheme}: option "{key}": {error}'))
    for name, item in known.items():
        if name not in mapping and item.default is MISSING and item.default_factory is MISSING:
            problems.append(OptionProblem(name, f'{scheme}: option "{name}" is required'))
    return values, problems


def _convert(kind: Any, value: object, unit: str) -> Any:
    """``value`` as ``kind``; ValueError says what was expected."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        return _choice(typing.get_args(kind), value)
    if origin in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(kind) if member is not type(None)]
        if value is None and len(members) < len(typing.get_args(kind)):
            return None
        if len(members) != 1:
            raise TypeError(f"options cannot have the type {kind}")
        return _convert(members[0], value, unit)
    if kind is bool:
        return _flag(value)
    if kind is int:
        return _integer(value, unit)
    if kind is float:
        return _number(value)
    if kind is str:
        if isinstance(value, str):
            return value
        raise ValueError(f"expected a string, got {value!r}")
    raise TypeError(f"options cannot have the type {kind}")


def _choice(choices: tuple[Any, ...], value: object) -> Any:
    # YAML 1.1 reads a bare `on` or `off` as a boolean.
    word = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
    if word in choices:
        return word
    if isinstance(word, str) and word.lower() in choices:
        return word.lower()
    names = ", ".join(str(choice) for choice in choices)
    hint = nearest(str(value), [str(choice) for choice in choices])
    raise ValueError(f"{value!r} is not one of {names}{hint}")


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word not in _FLAGS:
        raise ValueError(f"expected on or off, got {value!r}")
    return _FLAGS[word]


def _integer(value: object, unit: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"expected a whole number, got {value!r}")
    if unit == "bytes":
        return parse_bytes(value)
    if unit == "rate":
        return parse_rate(value)
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"expected a whole number, got {value!r}") from None


def _number(value: object) -> float:
    if not isinstance(value, bool) and isinstance(value, int | float | str):
        text = value.strip().removesuffix("s") if isinstance(value, str) else value
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
    raise ValueError(f"expected a number, got {value!r}")
