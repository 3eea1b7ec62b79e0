"""How the program ends: whatever comes out of a command becomes one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from ckptpipe.pipeline.cli.failure import describe, interruption, usage
from ckptpipe.pipeline.cli.session import Session, Signalled


def run_and_exit(arguments: Sequence[str] | None = None) -> NoReturn:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    code = run(arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # ``| head``: what was asked for is done, only nobody reads on
        _drop_stdout()
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command line; returns the exit code. Nothing is raised."""
    from ckptpipe.pipeline.cli.commands import ckptpipe

    # A command line that cannot be parsed has no session yet: look for the flag itself.
    fallback = Session(json="--json" in arguments, debug="--debug" in arguments)
    try:
        result = ckptpipe.main(args=arguments, prog_name="ckptpipe", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # click 8.2 and later: the message is the help
            click.echo(error.format_message(), err=True)
            return 2
        return fallback.fail(usage(error), error)
    except Signalled as error:
        return fallback.fail(interruption(error.interrupted), error.interrupted)
    except (click.Abort, KeyboardInterrupt) as error:
        return fallback.fail(interruption(error), error)
    except BrokenPipeError:
        _drop_stdout()
        return 0
    except Exception as error:
        return fallback.fail(describe(error), error)


def _drop_stdout() -> None:
    """Point standard output at nothing, or the interpreter would complain again at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
