"""Processes held by a pidfd, so that a pid which is given to another one is never hit."""

from __future__ import annotations

import os
import select

from ckptpipe.pipeline.cuda.errors import TargetError, TargetGone


def open_pidfd(pid: int) -> int:
    """A descriptor for the process that has ``pid`` now; the caller closes it. TargetGone where there is none."""
    if pid <= 0:
        raise TargetError(f"{pid} is no process id", pid=pid, cure="give the pid of a running process")
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise TargetGone(f"there is no process with pid {pid}", pid=pid) from None
    except OSError as error:
        raise TargetError(
            f"pid {pid} cannot be opened: {error.strerror}",
            pid=pid,
            cure="give the pid of a process, not of a thread",
        ) from error


def ended(pidfd: int, within: float = 0.0) -> bool:
    """True from the moment in which the process ends, also when its pid belongs to another by now. Blocks until then,
    but for ``within`` seconds at most."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(within * 1000))
