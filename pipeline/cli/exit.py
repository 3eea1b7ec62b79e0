"""How the program ends: whatever comes out of a command becomes one line and an exit code."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click
from click.shell_completion import shell_complete

from ckptpipe.pipeline.cli.failure import describe, interruption, usage
from ckptpipe.pipeline.cli.session import LAST, Session
from ckptpipe.pyx.errors import CkptpipeError

_COMPLETE = "_CKPTPIPE_COMPLETE"


def run_and_exit(arguments: Sequence[str] | None = None) -> NoReturn:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:  # closed by the caller (``>&-``)
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the rest of the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale that lacks a character must not fail a save
            stream.reconfigure(errors="backslashreplace")
    code = run(arguments, last=True)
    try:
        sys.stdout.flush()
    except OSError:  # said already, or nobody reads on
        _drop_stdout()
    sys.exit(code)


def run(arguments: list[str], *, last: bool = False) -> int:
    """Run one command line; returns the exit code. Nothing is raised. ``last``: the process ends then.

    In place of click's own ``main``, which takes any EPIPE, also that of a socket, for a closed standard
    output, and every KeyboardInterrupt for Ctrl-C.
    """
    from ckptpipe.pipeline.cli.commands import ckptpipe

    instruction = os.environ.get(_COMPLETE)
    if instruction:
        return shell_complete(ckptpipe, {}, "ckptpipe", _COMPLETE, instruction)

    # A command line that cannot be parsed has no session yet: look for the flag itself.
    session = Session(json="--json" in arguments, debug="--debug" in arguments)
    try:
        with ckptpipe.make_context("ckptpipe", list(arguments)) as context:
            context.meta[LAST] = last
            ckptpipe.invoke(context)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # click 8.2 and later: the message is the help
            click.echo(error.format_message(), err=True)
            return 2
        return session.fail(usage(error), error)
    except (click.Abort, KeyboardInterrupt) as error:
        return session.fail(interruption(error), error)
    except BrokenPipeError as error:
        if isinstance(error, CkptpipeError):  # of a file that an operation wrote
            return session.fail(describe(error), error)
        _drop_stdout()  # ``| head``: what was asked for is done, only nobody reads on
    except Exception as error:
        return session.fail(describe(error), error)
    return 0


def _drop_stdout() -> None:
    """Point standard output at nothing, or the interpreter would complain again at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
