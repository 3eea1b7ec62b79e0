"""Errors of the controller: who refused whom, what was lost, and what to do about it."""

from __future__ import annotations

from ckptpipe.pyx.errors import CkptpipeError


class ControllerError(CkptpipeError):
    """Something about the controller, its socket or a request to it."""


class ControllerUnavailable(ControllerError):
    """No controller listens there."""


class ControllerRefused(ControllerError):
    """A directory, a socket or a peer that is not to be trusted. Nothing was sent or done."""


class ControllerMismatch(ControllerError):
    """Client and controller are of different versions."""


class ControllerBusy(ControllerError):
    """The controller has as many connections or jobs as it takes."""

    retryable = True


class ControllerLost(ControllerError):
    """The connection ended before the answer came. What became of the job is not known."""


class ControllerFault(ControllerError):
    """A defect of the controller: an error that it did not raise on purpose."""


class ProtocolError(ControllerError):
    """The peer sent something that is not the controller's protocol, or more than is allowed."""


class JobCancelled(ControllerError):
    """Somebody else cancelled the job, or the controller ended; the target was brought back as far as possible."""


class JobNotFound(ControllerError):
    """No job of that number runs."""

    exit_code = 2
