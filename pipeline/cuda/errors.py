"""Errors of capture. Each names the process, the state that it is in, and what to do."""

from __future__ import annotations

from collections.abc import Mapping

from ckptpipe.pipeline.cuda.states import ProcessState
from ckptpipe.pyx.errors import CkptpipeError


class TargetError(CkptpipeError):
    """A process cannot be captured or restored; it was not touched."""

    def __init__(self, message: str, *, pid: int, cure: str = "") -> None:
        super().__init__(message, cure=cure)
        self.pid = pid


class TargetGone(TargetError):
    """The process has ended, or its pid belongs to another process now."""


class TargetBusy(TargetError):
    """Another save, restore or recovery of this process is going on."""

    retryable = True


class CaptureUnavailable(TargetError):
    """No capture path, or not the one asked for, works for this process on this driver."""


class CaptureFailed(CkptpipeError):
    """A save or restore failed after the target was touched, and the target is not RUNNING.

    ``states``: pid to state; None where the process has ended or the driver does not say. ``exit_code``: that of
    what went wrong, so that a damaged image ends a command with 3 here too.
    """

    def __init__(
        self, message: str, *, states: Mapping[int, ProcessState | None], cure: str = "", exit_code: int = 1
    ) -> None:
        super().__init__(message, cure=cure)
        self.states = dict(states)
        self.exit_code = exit_code


class CheckpointMismatch(CkptpipeError):
    """An image and a process do not belong together: another process, or another checkpoint of it."""
