"""JSON from somebody who may wish us ill, read field by field.

Python's parser takes more than RFC 8259 (NaN), keeps the last of two equal keys, and makes any number of
objects from a small text. Here every surprise is an ImageCorrupt that names the field.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from ckptpipe.pipeline.errors import ImageCorrupt

CURE = "the image was damaged or edited after it was saved: take another copy of it"
INT64_MAX = (1 << 63) - 1

_DIGITS_MAX = 20
_VALUES_MAX = 16_000_000  # in a text over _SCAN_FROM bytes: each value costs memory, a comma costs one byte
_NESTED_MAX = 4_000_000
_SCAN_FROM = 1 << 20
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class Fields:
    """One JSON object; ``where`` is its path in messages ("manifest.json: streams[3]")."""

    __slots__ = ("_values", "where")

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self.where = where

    def refuse(self, key: str, problem: str) -> NoReturn:
        raise ImageCorrupt(f"{self.where}: {key} {problem}", cure=CURE)

    def has(self, key: str) -> bool:
        return key in self._values

    def value(self, key: str) -> Any:
        try:
            return self._values[key]
        except KeyError:
            self.refuse(key, "is missing")

    def text(self, key: str, *, longest: int, empty: bool = False, control: bool = False) -> str:
        """A string of at most ``longest`` bytes of UTF-8, without control characters unless allowed."""
        found = self.value(key)
        if type(found) is not str:
            self.refuse(key, f"is {_kind(found)}, not a string")
        if not found and not empty:
            self.refuse(key, "is empty")
        if len(found) > longest or len(found.encode("utf-8", "surrogatepass")) > longest:
            self.refuse(key, f"is longer than {longest} bytes")
        if not control and _CONTROL.search(found):
            self.refuse(key, f"has control characters: {found[:100]!a}")
        return found

    def integer(self, key: str, low: int, high: int) -> int:
        found = self.value(key)
        if type(found) is not int:
            self.refuse(key, f"is {_kind(found)}, not a whole number")
        if not low <= found <= high:
            self.refuse(key, f"is {found}, outside {low} to {high}")
        return found

    def boolean(self, key: str) -> bool:
        found = self.value(key)
        if type(found) is not bool:
            self.refuse(key, f"is {_kind(found)}, not true or false")
        return found

    def hexadecimal(self, key: str, digits: int) -> str:
        found = self.text(key, longest=digits)
        if len(found) != digits or not re.fullmatch("[0-9a-f]+", found):
            self.refuse(key, f"is not {digits} lower-case hexadecimal digits")
        return found

    def expect(self, key: str, wanted: str | int) -> None:
        found = self.value(key)
        if type(found) is not type(wanted) or found != wanted:
            self.refuse(key, f"is {_brief(found)}, not {wanted!r}")

    def fields(self, key: str) -> Fields:
        found = self.value(key)
        if type(found) is not dict:
            self.refuse(key, f"is {_kind(found)}, not an object")
        return Fields(found, f"{self.where}: {key}" if ": " not in self.where else f"{self.where}.{key}")

    def items(self, key: str, *, most: int) -> list[Any]:
        found = self.value(key)
        if type(found) is not list:
            self.refuse(key, f"is {_kind(found)}, not a list")
        if len(found) > most:
            self.refuse(key, f"has {len(found)} entries, {most} is the most")
        return found

    def each(self, key: str, *, most: int) -> Iterator[Fields]:
        """The objects of a list."""
        for number, found in enumerate(self.items(key, most=most)):
            if type(found) is not dict:
                self.refuse(f"{key}[{number}]", f"is {_kind(found)}, not an object")
            yield Fields(found, f"{self.where}: {key}[{number}]")

    def free_form(self, key: str, *, longest: int) -> dict[str, Any]:
        """An object whose keys mean nothing here; bounded in size (bytes of compact JSON)."""
        found = self.value(key)
        if type(found) is not dict:
            self.refuse(key, f"is {_kind(found)}, not an object")
        try:
            size = len(json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode())
        except RecursionError:
            self.refuse(key, "is nested too deeply")
        if size > longest:
            self.refuse(key, f"has {size} bytes, {longest} is the most")
        return dict(found)


def parse_object(data: bytes, where: str, longest: int) -> Fields:
    """The JSON object that ``data`` is. ImageCorrupt for anything else, or for more than ``longest`` bytes."""

    def refuse(problem: str) -> NoReturn:
        raise ImageCorrupt(f"{where}: {problem}", cure=CURE)

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    refuse(f"key {key[:100]!a} appears twice in one object")
                seen.add(key)
        return made

    def integer_of(digits: str) -> int:
        if len(digits) > _DIGITS_MAX:
            refuse(f"a number of {len(digits)} digits")
        return int(digits)

    def float_of(digits: str) -> float:
        number = float(digits)
        if not math.isfinite(number):
            refuse(f"{digits[:40]} is too large a number")
        return number

    def no_constant(name: str) -> NoReturn:
        refuse(f"{name} is not JSON")

    if len(data) > longest:
        refuse(f"{len(data)} bytes, {longest} is the most")
    if len(data) > _SCAN_FROM:
        bare = _STRING.sub(b"", data)
        nested = bare.count(b"[") + bare.count(b"{")
        if nested > _NESTED_MAX or bare.count(b",") > _VALUES_MAX:
            refuse("too many values for a file of this kind")
    try:
        text = data.decode("utf-8")
        found = json.loads(
            text,
            object_pairs_hook=object_of,
            parse_int=integer_of,
            parse_float=float_of,
            parse_constant=no_constant,
        )
    except UnicodeDecodeError as error:
        refuse(f"not UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        refuse(f"not JSON: {error}")
    except RecursionError:
        refuse("nested too deeply")
    if type(found) is not dict:
        refuse(f"{_kind(found)} where an object belongs")
    # Only an escape can make one: UTF-8 text cannot hold a surrogate, and no check after this could print it.
    if "\\u" in text and _has_surrogate(found):
        refuse("a string holds half a surrogate pair")
    return Fields(found, where)


def _has_surrogate(value: Any) -> bool:
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            if _SURROGATE.search(item):
                return True
        elif isinstance(item, dict):
            todo.extend(item)
            todo.extend(item.values())
        elif isinstance(item, list):
            todo.extend(item)
    return False


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "true or false",
        int: "a number",
        float: "a fraction",
    }[type(value)]


def _brief(value: Any) -> str:
    text = ascii(value) if isinstance(value, str | int) else _kind(value)
    return text if len(text) <= 100 else text[:97] + "..."
