"""A config's data with the place of every value: in a file, or in a ``--set``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptpipe.pipeline.config.nearest import suggestion
from ckptpipe.pipeline.config.scalars import kind_of
from ckptpipe.pipeline.config.yaml_positions import Document, Path, Position, read_value
from ckptpipe.pipeline.errors import ConfigProblem

# Mappings that a --set may bring into being; anything else must be in the file.
_MADE_BY_SET = {("settings",), ("source",)}


class Located:
    """Knows where each path stands; collects the problems."""

    def __init__(self, file: str, document: Document) -> None:
        self.file = file
        self.data: Any = document.data
        self.problems: list[ConfigProblem] = []
        self._document = document
        self._set: dict[Path, str] = {}
        for fault in document.faults:
            self._add(file, fault.position, fault.message)

    def blame(self, path: Path, message: str, *, key: bool = False) -> None:
        """Note a problem of the value at ``path`` (``key``: of the key itself)."""
        where = dotted(path)
        text = f"{where}: {message}" if where else message
        for depth in range(len(path), 0, -1):
            label = self._set.get(path[:depth])
            if label is not None:
                self._add(label, None, message if len(path) == depth else text)
                return
        self._add(self.file, self.position(path, key=key), text)

    def position(self, path: Path, *, key: bool = False) -> Position | None:
        """Of the value at ``path``, or of the nearest thing around it; None where nothing has a position."""
        if key and path in self._document.keys:
            return self._document.keys[path]
        for depth in range(len(path), -1, -1):
            if path[:depth] in self._document.values:
                return self._document.values[path[:depth]]
        return None

    def unreadable(self, path: Path) -> bool:
        """Whether the value is in doubt because of a variable that is not set."""
        return self._document.variables.get(path) == ""

    def from_variable(self, path: Path) -> bool:
        return path in self._document.variables

    def sorted_problems(self) -> list[ConfigProblem]:
        """In the file's order, each once; those of ``--set`` last."""
        once = dict.fromkeys(self.problems)
        return sorted(once, key=lambda item: (item.file != self.file, item.line, item.column))

    def _add(self, file: str, at: Position | None, message: str) -> None:
        self.problems.append(ConfigProblem(file, at.line if at else 0, at.column if at else 0, message))

    # --set

    def apply(self, assignments: Iterable[str]) -> None:
        """``key=value`` with a dotted key; list items by number. What is wrong becomes a problem."""
        for text in assignments:
            key, equals, value_text = text.partition("=")
            if not equals or not key.strip():
                self._add("--set", None, "expected KEY=VALUE, like settings.chunk_bytes=16MiB")
                continue
            label = f"--set {key}"
            value: Any = value_text  # every field reads text, so that no shell quotes are needed
            if value_text.lstrip().startswith(("[", "{")):
                try:
                    value = read_value(value_text)
                except ValueError as error:
                    self._add(label, None, str(error))
                    continue
            self._assign(tuple(key.strip().split(".")), value, label)

    def _assign(self, names: tuple[str, ...], value: Any, label: str) -> None:
        if self.data is None:
            self.data = {}
        here, path = self.data, ()  # type: Any, Path
        for depth, name in enumerate(names):
            last = depth == len(names) - 1
            if isinstance(here, list):
                index = self._index(here, path, name, label)
                if index is None:
                    return
                step: str | int = index
            elif isinstance(here, dict):
                step = name
                if name not in here and not last:
                    if (*path, name) not in _MADE_BY_SET and name != "options":
                        self._add(
                            label, None, f'{_inside(path)} has no "{name}"{suggestion(name, map(str, here))}'
                        )
                        return
                    here[name] = {}
                    self._set[(*path, name)] = label
            else:
                self._add(
                    label, None, f'{dotted(path)} is {kind_of(here)}; it has nothing called "{name}" in it'
                )
                return
            path = (*path, step)
            if last:
                here[step] = value
                self._forget(path)
                self._set[path] = label
            else:
                here = here[step]

    def _index(self, items: list[Any], path: Path, name: str, label: str) -> int | None:
        if name.isascii() and name.isdigit() and len(name) < 6 and int(name) < len(items):
            return int(name)
        last = len(items) - 1
        numbers = "it is empty" if last < 0 else f"take a number from 0 to {last}"
        self._add(label, None, f'{dotted(path)} is a list and has no "{name}"; {numbers}')
        return None

    def _forget(self, path: Path) -> None:
        """What stood there before is no longer what a message should quote."""
        stores: tuple[Mapping[Path, Any], ...] = (
            self._document.variables,
            self._document.keys,
            self._document.values,
            self._set,
        )
        for store in stores:
            for known in [known for known in store if known[: len(path)] == path]:
                del store[known]  # type: ignore[attr-defined]


def dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)


def _inside(path: Path) -> str:
    return dotted(path) or "the config"
