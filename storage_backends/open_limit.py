"""How many files one part of a run may hold open, and what to say where one more is too many."""

from __future__ import annotations

import errno
import os
import resource

from ckptpipe.pyx.errors import IoError, io_error


def room_for_files() -> int:
    """Half of the descriptors that this process may still open (getrlimit(2), RLIMIT_NOFILE): the other half is for
    connections, stored objects and whatever else the process does. IoError where that cannot be told."""
    limit = _limit()
    try:
        taken = len(os.listdir("/proc/self/fd"))
    except OSError as error:
        raise open_error(error, "look at", "/proc/self/fd") from error
    return max(0, limit - taken) // 2


def open_error(error: OSError, operation: str, path: str) -> IoError:
    """The error of ``operation`` on ``path``, with the cure where a limit on open files is in the way."""
    number = error.errno or errno.EIO
    return io_error(number, operation, path, cure=limit_cure(number))


def limit_cure(number: int) -> str:
    """What helps against errno ``number`` where that is a limit on open files; "" where it is none."""
    if number == errno.EMFILE:
        return f"raise the limit on open files of this process, which is {_limit()} (ulimit -n)"
    if number == errno.ENFILE:
        return "raise the limit on open files of the whole system (sysctl fs.file-max)"
    return ""


def _limit() -> int:
    # A number: Linux knows no infinity here (fs.nr_open).
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft
