"""What a failure or a signal leaves behind of a process: the lines that an exit code cannot say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ckptpipe.pipeline.cli.session import Session
from ckptpipe.pyx.errors import CkptpipeError


@contextmanager
def told(session: Session) -> Iterator[None]:
    """Say an error's notes ("pid 4242 is RUNNING again"); after a signal, in what state a process stays."""
    try:
        yield
    except KeyboardInterrupt as error:
        for cause in _causes(error):
            _notes(session, cause)
            if isinstance(cause, CkptpipeError):
                session.say(f"ckptpipe: {cause}")
        raise
    except Exception as error:
        _notes(session, error)
        raise


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen = 0
    cause = error.__cause__
    while cause is not None and seen < 10:
        yield cause
        cause, seen = cause.__cause__, seen + 1


def _notes(session: Session, error: BaseException) -> None:
    for note in getattr(error, "__notes__", ()):
        session.say(f"note: {note}")
