"""One command's run: where its output goes, how its progress is shown, how its failure is told."""

from __future__ import annotations

import errno
import json
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from ckptpipe.pipeline.cli.failure import Failure
from ckptpipe.pipeline.cli.text import clean
from ckptpipe.pipeline.progress import ProgressCallback
from ckptpipe.pyx.errors import io_error

T = TypeVar("T")

LAST = "ckptpipe.last"
"""In click's ``meta``: the process ends with this command, so that no signal counts once its work is done."""


@dataclass(frozen=True, slots=True)
class Session:
    """``json``: results and errors as JSON on standard output. ``quiet``: neither progress nor result, but
    notes and errors still. ``debug``: the traceback below an error."""

    json: bool = False
    quiet: bool = False
    debug: bool = False

    def run(self, operation: Callable[[ProgressCallback], Awaitable[T]], *, phase: str = "") -> T:
        """Run ``operation`` on an event loop, showing its progress where ``phase`` is given."""
        from ckptpipe.pipeline.cli.progress import display
        from ckptpipe.pipeline.loop import run

        with display(phase, quiet=self.quiet or not phase, lines=not self.json) as shown:
            context = click.get_current_context(silent=True)
            last = bool(phase) and context is not None and bool(context.meta.get(LAST))
            return run(lambda: operation(shown.update), notice=shown.say, last=last)

    def show(self, result: Any, table: Callable[[], Sequence[Any]], notes: Sequence[str] = ()) -> None:
        """Print a result: as JSON, or as the parts of ``table`` with the notes below. Notes are shown always,
        on standard error where nothing else is printed."""
        if self.json:
            with _standard_output():
                write_json(result)
            return
        if not self.quiet:
            from ckptpipe.pipeline.cli.tables import print_parts

            with _standard_output():
                print_parts(table())
        for note in notes:
            self.say(f"note: {note}")

    def say(self, line: str) -> None:
        """One line on standard error."""
        _to_stderr(clean(line))

    def fail(self, failure: Failure, error: BaseException) -> int:
        """Print a failure; returns the exit code."""
        if self.debug:
            text = "".join(traceback.format_exception(error))
            _to_stderr(clean(text.rstrip(), lines=True))
        if self.json:
            try:
                write_json(failure.as_json())
            except OSError:
                _to_stderr("\n".join(failure.lines))
        else:
            _to_stderr("\n".join(failure.lines))
        return failure.exit_code


@contextmanager
def _standard_output() -> Iterator[None]:
    """An error of it would otherwise read like one of the disk that the command works on."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        cure = "the command has done its work, only its result is not shown"
        raise io_error(error.errno or errno.EIO, "write", "standard output", cure=cure) from error


def _to_stderr(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:  # nobody reads it; the exit code still tells
        pass


def write_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, ensure_ascii=True, default=str)
    sys.stdout.write("\n")
    sys.stdout.flush()
