"""The kinds of values that a config holds, each with how it is read and what the JSON Schema says of it.

A value that came out of ``${…}`` is text, so every kind reads text too. In the schema any of them may be a
text with ``${`` in it, because an editor sees the file before the variables are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from ckptpipe.pipeline.codecs.choice import CodecChoice
from ckptpipe.pipeline.config.nearest import suggestion
from ckptpipe.pipeline.config.words import (
    DURATION,
    IMAGE_NAME,
    check_image_name,
    parse_codec,
    parse_duration,
)
from ckptpipe.pipeline.image.names import host_stream
from ckptpipe.pipeline.settings import CHUNK_MAX, CHUNK_MIN
from ckptpipe.storage_backends.quantities import parse_bytes, parse_rate

VARIABLE: dict[str, Any] = {"type": "string", "pattern": r"\$\{"}

NODE_NAME = r"[A-Za-z][A-Za-z0-9_-]{0,63}"
SIZE = r"^\s*([0-9]+(\.[0-9]+)?|\.[0-9]+)\s*([kKmMgGtTpP]?[iI]?[bB])?\s*$"
DIGEST = r"^\s*(sha256:)?[0-9a-fA-F]{64}\s*$"
RATE = r"^\s*([0-9]+(\.[0-9]+)?|\.[0-9]+)\s*([kKmMgGtTpP]?[iI]?[bB]/[sS])?\s*$"


def refuse(message: str, value: object = None) -> PydanticCustomError:
    """An error whose text is ours alone. ``anonymous`` is the same without the value."""
    context = {"message": message, "anonymous": anonymous(message, value)}
    return PydanticCustomError("config", "{message}", context)


def anonymous(message: str, value: object) -> str:
    """The message without the value, for one that came out of a variable: it may be a secret."""
    if not isinstance(value, str) or not value:
        return message
    return message.replace(repr(value), "this").replace(value, "this")


def _reader(parse: Callable[[Any], Any], accepts: tuple[type, ...], expected: str) -> BeforeValidator:
    def read(value: object) -> Any:
        if (isinstance(value, bool) and bool not in accepts) or not isinstance(value, accepts):
            raise refuse(f"expected {expected}, got {kind_of(value)}")
        try:
            return parse(value)
        except ValueError as error:
            raise refuse(str(error).removeprefix(f"rate {value!r}: "), value) from None

    return BeforeValidator(read)


def kind_of(value: object) -> str:
    """What a YAML value is, in words that hold none of its content."""
    if value is None:
        return "nothing"
    names: dict[type, str] = {
        bool: "true or false",
        int: "a number",
        float: "a number with a fraction",
        str: "text",
        list: "a list",
        dict: "a mapping",
    }
    return next((name for kind, name in names.items() if isinstance(value, kind)), type(value).__name__)


def _integer(value: int | str) -> int:
    if isinstance(value, str) and not re.fullmatch(r"\s*[-+]?[0-9]{1,18}\s*", value):
        raise ValueError("expected a whole number")
    return int(value)


def _chunk(value: int | str) -> int:
    nbytes = parse_bytes(value)
    if not CHUNK_MIN <= nbytes <= CHUNK_MAX or nbytes % CHUNK_MIN:
        raise ValueError("expected a size from 4KiB to 64MiB in steps of 4KiB")
    return nbytes


def _optional_image_name(value: str) -> str:
    return check_image_name(value) if value else ""


def _flag(value: bool | str) -> bool:
    if isinstance(value, bool):
        return value
    word = value.strip().lower()
    if word not in _FLAGS:
        meant = next((name for name, words in _OTHER_FLAGS.items() if word in words), "")
        raise ValueError(
            "expected true or false" + (f"; did you mean {meant}?" if meant else _meant(word, tuple(_FLAGS)))
        )
    return _FLAGS[word]


_FLAGS = {"true": True, "false": False}
_OTHER_FLAGS = {
    "true": ("yes", "y", "on", "1"),
    "false": ("no", "n", "off", "0"),
}  # words of YAML 1.1 and shells


def _text(value: str) -> str:
    if "\0" in value:
        raise ValueError("a NUL character is not allowed")
    if not value.strip():
        raise ValueError("expected text, got an empty one")
    return value


def _stream_name(value: str) -> str:
    host_stream(_text(value))
    return value


def _digest(value: str) -> str:
    if not re.fullmatch(DIGEST, value):
        raise ValueError("expected sha256: and 64 hexadecimal digits, as a save prints them")
    return value


def _text_or_list(value: str | list[object]) -> list[str]:
    items = [value] if isinstance(value, str) else value
    if not items:
        raise ValueError("the list is empty")
    for item in items:
        if not isinstance(item, str):
            raise ValueError(f"expected a list of texts, but one is {kind_of(item)}; put it in quotes")
    return [_text(item) for item in items if isinstance(item, str)]


def _schema(*kinds: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [*kinds, VARIABLE]})


def integer(low: int, high: int) -> Any:
    """A whole number from ``low`` to ``high``."""

    def parse(value: int | str) -> int:
        number = _integer(value)
        if not low <= number <= high:
            raise ValueError(f"expected a whole number from {low} to {high}")
        return number

    expected = f"a whole number from {low} to {high}"
    return Annotated[
        int,
        _reader(parse, (int, str), expected),
        _schema({"type": "integer", "minimum": low, "maximum": high}),
    ]


def choice(*names: str) -> Any:
    """One of ``names``. A boolean stands for ``on`` or ``off``, as YAML 1.1 reads these words."""

    def parse(value: str | bool) -> str:
        word = {True: "on", False: "off"}[value] if isinstance(value, bool) else value.strip().lower()
        if word not in names:
            raise ValueError(f"expected one of {', '.join(names)}" + _meant(word, names))
        return word

    accepts = (str, bool) if "on" in names or "off" in names else (str,)
    kinds: list[dict[str, Any]] = [{"enum": list(names)}]
    if bool in accepts:
        kinds.append({"type": "boolean"})
    return Annotated[str, _reader(parse, accepts, f"one of {', '.join(names)}"), _schema(*kinds)]


def _meant(word: str, names: tuple[str, ...]) -> str:
    text = suggestion(word, names)
    return text if "did you mean" in text else ""


def _schema_text(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


Text = Annotated[
    str, _reader(_text, (str,), "text (put it in quotes)"), WithJsonSchema({"type": "string", "minLength": 1})
]
StreamName = Annotated[
    str,
    _reader(_stream_name, (str,), "text (put it in quotes)"),
    WithJsonSchema({"type": "string", "minLength": 1}),
]
Digest = Annotated[str, _reader(_digest, (str,), "text (put it in quotes)"), _schema(_schema_text(DIGEST))]
Texts = Annotated[
    list[str],
    _reader(_text_or_list, (str, list), "a text or a list of texts"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
            ]
        }
    ),
]
Flag = Annotated[
    bool,
    _reader(_flag, (bool, str), "true or false"),
    _schema({"type": "boolean"}, {"enum": [*_FLAGS]}),
]
Size = Annotated[
    int,
    _reader(parse_bytes, (int, str), "a size like 4MiB"),
    _schema({"type": "integer", "minimum": 0}, _schema_text(SIZE)),
]
ChunkSize = Annotated[
    int,
    _reader(_chunk, (int, str), "a size like 8MiB"),
    _schema(
        {"type": "integer", "minimum": CHUNK_MIN, "maximum": CHUNK_MAX, "multipleOf": CHUNK_MIN},
        _schema_text(SIZE),
    ),
]
Rate = Annotated[
    int,
    _reader(parse_rate, (int, str), "a rate like 200MB/s"),
    _schema({"type": "integer", "minimum": 1}, _schema_text(RATE)),
]
Duration = Annotated[
    float,
    _reader(parse_duration, (int, float, str), "a duration like 30s"),
    _schema({"type": "number", "minimum": 0}, _schema_text(DURATION)),
]
Codec = Annotated[
    CodecChoice,
    _reader(parse_codec, (str,), "none, auto, zstd[:LEVEL] or deflate[:LEVEL]"),
    _schema(_schema_text(r"^(none|auto|(zstd|deflate)(:[+-]?[0-9]{1,3})?)$")),
]
ImageName = Annotated[
    str,
    _reader(_optional_image_name, (str,), "text (put it in quotes)"),
    _schema(_schema_text(f"^({IMAGE_NAME})?$")),
]
NodeName = Annotated[
    str, _reader(_text, (str,), "the name of a node"), _schema(_schema_text(f"^{NODE_NAME}$"))
]
