"""Errors of launching a program and of getting at its pool."""

from __future__ import annotations

from ckptpipe.pyx.errors import CkptpipeError


class LaunchFailed(CkptpipeError):
    """The program was not started. ``exit_code`` as shells have it: 126 not executable, 127 not found."""

    def __init__(self, message: str, *, cure: str = "", exit_code: int = 1) -> None:
        super().__init__(message, cure=cure)
        self.exit_code = exit_code


class NotLaunched(CkptpipeError):
    """The process has no pool to hand over: not started by ``ckptpipe launch``, or it has not used CUDA yet."""


class HandoverFailed(CkptpipeError):
    """The process has a pool, but a request was refused or not answered."""
