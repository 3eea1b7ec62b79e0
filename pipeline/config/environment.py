"""``${NAME}`` and ``${NAME:-default}`` in the text of a config; ``$$`` is one ``$``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckptpipe.pipeline.config.nearest import nearest

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_DEPTH = 8  # of defaults within defaults


class VariableError(ValueError):
    """``offset``: of the ``$`` in the text."""

    def __init__(self, offset: int, message: str) -> None:
        super().__init__(message)
        self.offset = offset


@dataclass(frozen=True, slots=True)
class Expansion:
    text: str
    used: bool  # a ``${…}`` was replaced


def expand(text: str, environment: Mapping[str, str]) -> Expansion:
    """Replace the variables of ``text``. A default stands for an unset or an empty variable, as in a shell,
    and may hold variables itself. VariableError for an unset variable without one, or a ``${`` not closed."""
    result, end, used = _scan(text, 0, environment, depth=0, wanted=True)
    assert end == len(text)
    return Expansion(result, used)


def _scan(
    text: str, start: int, environment: Mapping[str, str], *, depth: int, wanted: bool
) -> tuple[str, int, bool]:
    """Up to the end, or inside a default up to its ``}``. ``wanted`` False: only find where it ends."""
    parts: list[str] = []
    used = False
    at = start
    while at < len(text):
        if depth and text[at] == "}":
            break
        if text.startswith("$$", at):
            parts.append("$")
            at += 2
        elif text.startswith("${", at):
            value, at = _variable(text, at, environment, depth=depth, wanted=wanted)
            parts.append(value)
            used = True
        else:
            parts.append(text[at])
            at += 1
    return "".join(parts), at, used


def _variable(
    text: str, start: int, environment: Mapping[str, str], *, depth: int, wanted: bool
) -> tuple[str, int]:
    if depth >= MAX_DEPTH:
        raise VariableError(start, f"defaults nested deeper than {MAX_DEPTH} levels")
    match = _NAME.match(text, start + 2)
    if match is None:
        raise VariableError(start, "a variable is ${NAME} or ${NAME:-default}; write $$ for a dollar sign")
    name, at = match.group(), match.end()
    default: str | None = None
    value = environment.get(name)
    if text.startswith(":-", at):
        default, at, _ = _scan(text, at + 2, environment, depth=depth + 1, wanted=wanted and not value)
    if not text.startswith("}", at):
        raise VariableError(start, f"${{{name} is not closed; a variable is ${{NAME}} or ${{NAME:-default}}")
    if default is not None:
        return value or default, at + 1
    if value is None:
        if not wanted:
            return "", at + 1
        hint = nearest(name, [known for known in environment if not _looks_secret(known)], cutoff=0.75)
        raise VariableError(
            start,
            f"the environment variable {name} is not set"
            + (f"; did you mean {hint}?" if hint else f"; set it, or give a default: ${{{name}:-…}}"),
        )
    return value, at + 1


def _looks_secret(name: str) -> bool:
    return bool(re.search(r"SECRET|TOKEN|PASSW|KEY", name.upper()))
