"""Dataclasses as JSON and back, strictly: the types of the fields say what is accepted.

Understands str, int, float, bool, None, Literal, unions with None, tuple[T, ...], list[T], Mapping[str, T],
dataclasses of these, Any for plain scalars, and dict[str, Any] for objects of plain JSON values (facts of a result,
nested a few levels). Whatever does not fit is a ProtocolError that names the field.
"""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, NoReturn, TypeVar

from ckptpipe.pipeline.controller.errors import ProtocolError

T = TypeVar("T")

TEXT_MAX = 32 << 10  # characters
ITEMS_MAX = 4096
LEVELS_MAX = 4
_INTEGER_MAX = (1 << 63) - 1


def to_json(value: object) -> Any:
    """Plain JSON values of a dataclass. TypeError for what `from_json` could not give back."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_json(getattr(value, item.name)) for item in fields(value) if item.init}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [to_json(item) for item in value]
    raise TypeError(f"a {type(value).__name__} cannot be sent to a controller")


def from_json(kind: type[T], value: object, where: str) -> T:
    """``value`` as ``kind``; ``where`` names it in messages."""
    made: T = _convert(kind, value, where)
    return made


def _convert(kind: Any, value: object, where: str) -> Any:
    origin = typing.get_origin(kind)
    if kind is Any:
        return _scalar(value, where)
    if kind in (str, bool, int, float):
        return _simple(kind, value, where)
    if kind is type(None):
        return None if value is None else _refuse(where, "is not null")
    if origin is Literal:
        allowed = typing.get_args(kind)
        if type(value) is str and value in allowed:
            return value
        _refuse(where, f"is none of {', '.join(map(str, allowed))}")
    if origin in (typing.Union, types.UnionType):
        return _one_of(typing.get_args(kind), value, where)
    if origin in (tuple, list):
        return _items(origin, typing.get_args(kind), value, where)
    if origin is dict and typing.get_args(kind) == (str, Any):
        return _plain(value, where, LEVELS_MAX) if type(value) is dict else _refuse(where, "is not an object")
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(typing.get_args(kind)[1], value, where)
    if is_dataclass(kind):
        return _record(kind, value, where)
    raise TypeError(f"{where}: fields of type {kind} cannot be sent")


def _simple(kind: type, value: object, where: str) -> Any:
    if kind is float and type(value) is int:
        value = float(value) if abs(value) <= _INTEGER_MAX else _refuse(where, "is too large")
    if type(value) is not kind:
        _refuse(where, f"is not {_NAMES[kind]}")
    return _scalar(value, where)


def _scalar(value: object, where: str) -> Any:
    if isinstance(value, str):
        if len(value) > TEXT_MAX or "\0" in value:
            _refuse(where, f"is longer than {TEXT_MAX} characters, or holds NUL")
        try:
            value.encode()
        except UnicodeEncodeError:
            _refuse(where, "holds half a surrogate pair")
    elif isinstance(value, float):
        if not math.isfinite(value):
            _refuse(where, "is not finite")
    elif isinstance(value, int):  # bool too
        if abs(value) > _INTEGER_MAX:
            _refuse(where, "is too large")
    elif value is not None:
        _refuse(where, "is not a plain value")
    return value


def _one_of(kinds: tuple[Any, ...], value: object, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    rest = [kind for kind in kinds if kind is not type(None)]
    if len(rest) != 1:
        raise TypeError(f"{where}: a union of several types cannot be sent")
    return _convert(rest[0], value, where)


def _items(origin: type, arguments: tuple[Any, ...], value: object, where: str) -> Any:
    if type(value) is not list:
        _refuse(where, "is not a list")
    if len(value) > ITEMS_MAX:
        _refuse(where, f"has more than {ITEMS_MAX} entries")
    if origin is tuple and arguments[-1] is not Ellipsis:
        if len(value) != len(arguments):
            _refuse(where, f"has not {len(arguments)} entries")
        pairs = zip(arguments, value, strict=True)
        return tuple(_convert(kind, item, f"{where}[{n}]") for n, (kind, item) in enumerate(pairs))
    return origin(_convert(arguments[0], item, f"{where}[{n}]") for n, item in enumerate(value))


def _mapping(kind: Any, value: object, where: str) -> dict[str, Any]:
    if type(value) is not dict:
        _refuse(where, "is not an object")
    if len(value) > ITEMS_MAX:
        _refuse(where, f"has more than {ITEMS_MAX} entries")
    return {_scalar(key, where): _convert(kind, item, f"{where}.{key[:80]}") for key, item in value.items()}


def _plain(value: object, where: str, levels: int) -> Any:
    if not isinstance(value, dict | list):
        return _scalar(value, where)
    if not levels:
        _refuse(where, f"is nested deeper than {LEVELS_MAX} levels")
    if len(value) > ITEMS_MAX:
        _refuse(where, f"has more than {ITEMS_MAX} entries")
    if isinstance(value, list):
        return [_plain(item, where, levels - 1) for item in value]
    return {
        _scalar(key, where): _plain(item, f"{where}.{key[:80]}", levels - 1) for key, item in value.items()
    }


def _record(kind: Any, value: object, where: str) -> Any:
    if type(value) is not dict:
        _refuse(where, "is not an object")
    known, required = _fields(kind)
    for key in value:
        if key not in known:
            _refuse(f"{where}.{key[:80]}", "is not known")
    for key in required:
        if key not in value:
            _refuse(f"{where}.{key}", "is missing")
    return kind(**{key: _convert(known[key], item, f"{where}.{key}") for key, item in value.items()})


@functools.cache
def _fields(kind: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    hints = typing.get_type_hints(kind)
    known = {item.name: hints[item.name] for item in fields(kind) if item.init}
    required = tuple(
        item.name
        for item in fields(kind)
        if item.init and item.default is MISSING and item.default_factory is MISSING
    )
    return known, required


def _refuse(where: str, problem: str) -> NoReturn:
    raise ProtocolError(f"{ascii(where)[1:-1]} {problem}")


_NAMES = {str: "a string", bool: "true or false", int: "a whole number", float: "a number"}
