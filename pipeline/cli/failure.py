"""An exception as one readable line: the thing, the cure, the exit code."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import click

from ckptpipe.pipeline.cli.text import clean
from ckptpipe.pipeline.errors import ConfigError, ImageCorrupt
from ckptpipe.pipeline.essential_error import EssentialError
from ckptpipe.pipeline.interrupted import Interrupted
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.storage_backends.open_limit import limit_cure


@dataclass(frozen=True, slots=True)
class Failure:
    """``also``: lines of further errors that came with it. ``found``: places of damage, each on a line of its
    own. ``lines``: what is printed."""

    kind: str
    message: str
    exit_code: int
    cure: str = ""
    also: tuple[str, ...] = ()
    problems: tuple[dict[str, Any], ...] = field(default_factory=tuple)
    prefix: str = "ckptpipe: "
    found: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        if self.problems:
            return self.message.splitlines()
        text = f"{self.message}; {self.cure}" if self.cure else self.message
        more = f" (and {len(self.also)} more)" if self.also else ""
        line = " ".join(f"{self.prefix}{text}{more}".split("\n"))
        return [*(f"damaged: {place}" for place in self.found), line]

    def as_json(self) -> dict[str, Any]:
        error: dict[str, Any] = {
            "type": self.kind,
            "message": self.message,
            "cure": self.cure,
            "exit_code": self.exit_code,
        }
        if self.also:
            error["also"] = list(self.also)
        if self.problems:
            error["problems"] = list(self.problems)
        if self.found:
            error["damaged"] = list(self.found)
        return {"error": error}


def describe(error: BaseException) -> Failure:
    """Of any error that a command can raise. A group is reduced to its essential error."""
    essential, also = EssentialError.of(error)
    return _describe_one(essential, tuple(map(clean, also)))  # the exit code is that of the essential error


def _describe_one(error: BaseException, also: tuple[str, ...]) -> Failure:
    kind = type(error).__name__
    if isinstance(error, ConfigError):
        problems = tuple(
            {
                "file": problem.file,
                "line": problem.line,
                "column": problem.column,
                "message": clean(problem.message),
            }
            for problem in error.problems
        )
        return Failure(kind, clean(str(error), lines=True), error.exit_code, also=also, problems=problems)
    if isinstance(error, CkptpipeError):
        found = tuple(map(clean, error.found)) if isinstance(error, ImageCorrupt) else ()
        return Failure(kind, clean(error.message), error.exit_code, clean(error.cure), also, found=found)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return Failure(kind, clean(f"{where}{error.strerror}"), 1, limit_cure(error.errno or 0), also)
    if isinstance(error, MemoryError):
        return Failure(
            kind, "out of memory", 1, "take a smaller --ring-size or --chunk-size, or fewer --workers", also
        )
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        cure = (
            "raise the limit on threads (ulimit -u, pids.max) or on address space (ulimit -v), "
            "or take fewer --workers and --codec-threads"
        )
        return Failure(kind, "the system gives this process no more threads", 1, cure, also)
    import asyncio  # here: a command that runs no loop need not wait for it

    if isinstance(error, asyncio.CancelledError):
        return Failure(kind, "the run was cancelled", 1, also=also)
    return Failure(
        kind,
        f"internal error: {kind}: {clean(str(error))}",
        1,
        "this is a defect of ckptpipe; --debug shows where",
        also,
    )


def usage(error: click.ClickException) -> Failure:
    """Of a command line that makes no sense."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "ckptpipe"
    message = " ".join(error.format_message().split())
    near = re.search(r"\(?Did you mean (?:one of: )?(.*)\?\)?$", message)
    if near is not None:
        names = near[1].replace("'", "").rstrip(")?").split(", ")
        said = re.search(r"'(-[^']*)'", message)
        # click sorts its suggestions by the alphabet
        first = max(names, key=lambda name: SequenceMatcher(None, said[1] if said else "", name).ratio())
        message = f"{message[: near.start()].strip().rstrip('.')}; did you mean {first}?"
    message = message.rstrip(".")
    if message[1:2].islower():
        message = message[:1].lower() + message[1:]
    cure = "" if message.endswith("?") else f"see {command} --help"
    return Failure("UsageError", clean(message), 2, cure, prefix=f"{command}: ")


def interruption(error: BaseException) -> Failure:
    """Of Ctrl-C, SIGTERM and an aborted question."""
    if isinstance(error, Interrupted):
        return Failure("Interrupted", str(error), error.exit_code)
    return Failure("Interrupted", "interrupted", 130)
