"""YAML text to plain data with the line and column of every value.

Built on PyYAML's events, not on its constructors: no tag is ever constructed, duplicate keys are seen, aliases
are counted (a few lines of them can stand for gigabytes), nesting is bounded, and plain scalars follow YAML
1.2's core schema (``off`` and ``no`` are text, only ``true`` and ``false`` are booleans).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from ckptpipe.pipeline.config.environment import Expansion, VariableError, expand

Path = tuple[str | int, ...]

MAX_TEXT_BYTES = 1 << 20
MAX_VALUES = 10_000  # with every alias written out
MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class Position:
    """Counted from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Fault:
    position: Position
    message: str


@dataclass(slots=True)
class Scalar:
    at: Position
    value: str  # as written, before ``${…}``
    plain: bool
    one_line: bool
    depth: int = 0
    count: int = 1


@dataclass(slots=True)
class Sequence:
    at: Position
    items: list[Node] = field(default_factory=list)
    depth: int = 1
    count: int = 1


@dataclass(slots=True)
class Mapping:
    at: Position
    entries: list[tuple[str, Position, Node]] = field(default_factory=list)
    seen: dict[str, Position] = field(default_factory=dict)
    depth: int = 1
    count: int = 1


Node = Scalar | Sequence | Mapping


@dataclass(slots=True)
class Document:
    """``data``: plain dicts, lists and scalars. ``values``, ``keys``: positions by path."""

    data: Any = None
    values: dict[Path, Position] = field(default_factory=dict)
    keys: dict[Path, Position] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    variables: dict[Path, str] = field(default_factory=dict)  # values that came out of ``${…}``


def read(text: str, environment: dict[str, str] | None) -> Document:
    """Parse one YAML document. ``environment`` None leaves ``${…}`` as it stands. Never raises for bad text."""
    document = Document()
    if len(text) > MAX_TEXT_BYTES:
        document.faults.append(Fault(Position(1, 1), f"the file is larger than {MAX_TEXT_BYTES >> 20} MiB"))
        return document
    try:
        root = _Builder(document.faults).build(masked(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = Position(mark.line + 1, mark.column + 1) if mark else Position(1, 1)
        document.faults.append(Fault(at, _syntax_message(error, text, at)))
        return document
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        at = Position(before.count("\n") + 1, error.position - (before.rfind("\n") + 1) + 1)
        document.faults.append(
            Fault(at, f"not YAML: the character U+{_code(error.character):04X} is not allowed")
        )
        return document
    except _Refused as refused:
        document.faults.append(refused.fault)
        return document
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # ValueError: "\U" escapes out of range
        document.faults.append(Fault(Position(1, 1), f"not YAML: {error}"))
        return document
    if root is not None:
        document.data = _Plain(document, environment).convert(root, ())
    return document


# A variable holds characters that mean something in YAML's flow form: {to: ${DIR:-/tmp/a,b}}. While PyYAML
# reads, they are private-use characters instead, one for one, so that every position stays right.
_MEANT = "{}[],:#&*!|>%@`?- "
_MASKS = {ord(char): 0xE000 + number for number, char in enumerate(_MEANT)}
_UNMASKS = {mask: char for char, mask in _MASKS.items()}
_SPAN = re.compile(
    r"""\$\{[A-Za-z_][A-Za-z0-9_]*(?::-(?:[^{}\r\n"'\\]|\$\{[A-Za-z_][A-Za-z0-9_]*(?::-[^{}\r\n"'\\]*)?\})*)?\}"""
)


def masked(text: str) -> str:
    """``text`` with each ``${…}`` made plain for YAML; the same length. As it is where it has such characters."""
    if any(mask in text for mask in map(chr, _UNMASKS)):
        return text
    return _SPAN.sub(lambda match: match.group().translate(_MASKS), text)


def unmasked(text: str) -> str:
    return text.translate(_UNMASKS)


def read_value(text: str) -> Any:
    """One value in YAML's flow form, as in ``--set key=[a,b]``. ValueError."""
    document = read(text, None)
    if document.faults:
        raise ValueError(document.faults[0].message)
    return document.data


class _Refused(Exception):
    def __init__(self, at: Position, message: str) -> None:
        self.fault = Fault(at, message)


def _start(event: Any) -> Position:
    return Position(event.start_mark.line + 1, event.start_mark.column + 1)


def _end_line(event: Any) -> int:
    return int(event.end_mark.line) + 1


class _Builder:
    """Events to nodes, with a stack of its own: PyYAML's composer would recurse."""

    def __init__(self, faults: list[Fault]) -> None:
        self._faults = faults
        self._anchors: dict[str, Node | None] = {}  # None: still open, so an alias to it would be endless

    def build(self, text: str) -> Node | None:
        events: Iterator[Any] = yaml.parse(text, Loader=yaml.SafeLoader)
        root: Node | None = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise _Refused(_start(event), "a second document; a config is one YAML document")
                root = self._document(events)
        return root

    def _document(self, events: Iterator[Any]) -> Node:
        """One node, iteratively. ``open``: containers not yet ended, each with the key that waits for its
        value and the anchor it defines."""
        containers: list[tuple[Sequence | Mapping, str]] = []
        pending: list[tuple[str, Position] | None] = []
        for event in events:
            if isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
                done, anchor = containers.pop()
                pending.pop()
                node: Node = done
                at = node.at
                if anchor:
                    self._anchors[anchor] = node
            elif isinstance(event, yaml.AliasEvent):
                at = _start(event)
                node = self._alias(event)
            else:
                tag = event.tag
                if tag is not None and not (isinstance(event, yaml.ScalarEvent) and tag == "!"):
                    raise _Refused(_start(event), f"YAML tags are not allowed here: {_printable(tag)}")
                at = _start(event)
                if isinstance(event, yaml.ScalarEvent):
                    plain = event.implicit[0] and tag is None and event.style is None
                    one_line = at.line == _end_line(event)
                    node = Scalar(at, unmasked(event.value), plain, one_line)
                    if event.anchor:
                        self._anchors[event.anchor] = node
                else:
                    container: Sequence | Mapping = (
                        Sequence(at) if isinstance(event, yaml.SequenceStartEvent) else Mapping(at)
                    )
                    if event.anchor:
                        self._anchors[event.anchor] = None
                    containers.append((container, event.anchor or ""))
                    pending.append(None)
                    if len(containers) > MAX_DEPTH:
                        raise _Refused(_start(event), f"nested deeper than {MAX_DEPTH} levels")
                    continue
            if not containers:
                return node
            self._place(containers[-1][0], pending, node, at)
        raise yaml.YAMLError("the document ends early")

    def _place(
        self,
        container: Sequence | Mapping,
        pending: list[tuple[str, Position] | None],
        node: Node,
        at: Position,
    ) -> None:
        if isinstance(container, Sequence):
            container.items.append(node)
        else:
            waiting = pending[-1]
            if waiting is None:
                if not isinstance(node, Scalar):
                    raise _Refused(at, "a key must be text")
                pending[-1] = (node.value, at)
                return
            pending[-1] = None
            key, key_at = waiting
            first = container.seen.setdefault(key, key_at)
            if first is not key_at:
                self._faults.append(
                    Fault(
                        key_at, f'duplicate key "{_printable(key)}"; it stands in line {first.line} already'
                    )
                )
                return
            container.entries.append((key, key_at, node))
        container.count += node.count
        container.depth = max(container.depth, node.depth + 1)
        if container.count > MAX_VALUES:
            raise _Refused(at, f"more than {MAX_VALUES} values, with aliases written out")
        if container.depth > MAX_DEPTH:
            raise _Refused(at, f"nested deeper than {MAX_DEPTH} levels, with aliases written out")

    def _alias(self, event: Any) -> Node:
        name = event.anchor
        if name not in self._anchors:
            raise _Refused(_start(event), f"unknown alias *{_printable(name)}")
        node = self._anchors[name]
        if node is None:
            raise _Refused(_start(event), f"the alias *{_printable(name)} contains itself")
        return node


class _Plain:
    """Nodes to plain data, expanding variables and noting where everything stands."""

    def __init__(self, document: Document, environment: dict[str, str] | None) -> None:
        self._document = document
        self._environment = environment

    def convert(self, node: Node, path: Path) -> Any:
        self._document.values[path] = node.at
        if isinstance(node, Sequence):
            return [self.convert(item, (*path, index)) for index, item in enumerate(node.items)]
        if isinstance(node, Mapping):
            result = {}
            for key, at, value in node.entries:
                self._document.keys[(*path, key)] = at
                result[key] = self.convert(value, (*path, key))
            return result
        return self._scalar(node, path)

    def _scalar(self, node: Scalar, path: Path) -> Any:
        text = node.value
        if self._environment is not None and "$" in text:
            try:
                expansion: Expansion = expand(text, self._environment)
            except VariableError as error:
                at = node.at
                if node.one_line:
                    at = Position(at.line, at.column + error.offset + (0 if node.plain else 1))
                self._document.faults.append(Fault(at, str(error)))
                self._document.variables[path] = ""
                return text
            if expansion.used:
                self._document.variables[path] = expansion.text
            if expansion.text != text:
                text = expansion.text
                if expansion.used:
                    return self._checked(text, node)  # stays text: fields turn it into what they need
        if node.plain:
            return resolve(text)
        return self._checked(text, node)

    def _checked(self, text: str, node: Scalar) -> str:
        bad = next((ch for ch in text if ch == "\0" or "\ud800" <= ch <= "\udfff"), None)
        if bad is not None:
            self._document.faults.append(Fault(node.at, f"the character U+{ord(bad):04X} is not allowed"))
            return ""
        return text


_INTEGER = re.compile(r"[-+]?[0-9]{1,40}\Z")
_OCTAL = re.compile(r"0o[0-7]{1,40}\Z")
_HEX = re.compile(r"0x[0-9a-fA-F]{1,40}\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,4})?\Z")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


def resolve(text: str) -> Any:
    """A plain scalar by YAML 1.2's core schema (10.3.2)."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.match(text):
        return int(text)
    if _OCTAL.match(text):
        return int(text[2:], 8)
    if _HEX.match(text):
        return int(text[2:], 16)
    if _FLOAT.match(text) and len(text) < 60:
        return float(text)
    return text


def _syntax_message(error: yaml.MarkedYAMLError, text: str, at: Position) -> str:
    words = " ".join(part for part in (error.context, error.problem) if part)
    message = f"not YAML: {_printable(words)}"
    lines = text.splitlines()
    line = lines[at.line - 1] if at.line <= len(lines) else ""
    if re.search(r"\b(null|memory):\s*($|[,}\]#])", line):
        message += "; put a URL that ends in a colon in quotes: 'null:'"
    return message


def _code(character: Any) -> int:
    return character if isinstance(character, int) else ord(character[:1])


def _printable(text: str) -> str:
    text = unmasked(text)
    shown = text.encode("unicode_escape").decode("ascii") if not text.isprintable() else text
    return shown if len(shown) <= 80 else f"{shown[:77]}…"
