"""Errors of the engine: what failed, on which file, and what to do about it."""

from __future__ import annotations

import os


class CkptpipeError(Exception):
    """Base of every error that ckptpipe raises on purpose.

    ``message`` names the thing that is wrong, ``cure`` says what the user can do ("" where there is
    nothing to do). ``retryable`` belongs to the class: True only where the same call may succeed later.
    ``exit_code`` is what the command line exits with.
    """

    retryable = False
    exit_code = 1

    def __init__(self, message: str, *, cure: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.cure = cure

    def __str__(self) -> str:
        return f"{self.message}; {self.cure}" if self.cure else self.message


class StuckIo(CkptpipeError):
    """The kernel does not give operations back: what waited for them gave up, and left their memory alone."""


class IoError(CkptpipeError, OSError):
    """A system call failed: keeps ``errno``, ``operation`` ("write", "fsync", …) and ``filename``.

    Made by `io_error`, which also mixes in Python's own subclass (FileNotFoundError, PermissionError, …),
    so that both ``except IoError`` and ``except FileNotFoundError`` see it.
    """

    operation: str

    def __init__(self, number: int, operation: str, path: str, *, cure: str = "") -> None:
        OSError.__init__(self, number, os.strerror(number), path)
        self.operation = operation
        self.message = f"{operation} {path}: {os.strerror(number)}"
        self.cure = cure

    def __str__(self) -> str:
        return f"{self.message}; {self.cure}" if self.cure else self.message


def io_error(number: int, operation: str, path: str, *, cure: str = "") -> IoError:
    """The exception for ``errno`` ``number`` of ``operation`` on ``path``."""
    builtin = type(OSError(number, ""))
    if builtin is OSError:
        return IoError(number, operation, path, cure=cure)
    kind = _KINDS.get(builtin)
    if kind is None:
        kind = _KINDS[builtin] = type(f"Io{builtin.__name__}", (IoError, builtin), {})
    return kind(number, operation, path, cure=cure)


_KINDS: dict[type[OSError], type[IoError]] = {}
