"""Processes named by pidfd: what the kernel says of one that came over a socket."""

from __future__ import annotations

import os

from ckptpipe.pipeline.controller.errors import ProtocolError
from ckptpipe.pipeline.cuda.errors import TargetError, TargetGone
from ckptpipe.pipeline.cuda.pidfds import ended


def pid_of(pidfd: int, said: int = 0) -> int:
    """The pid, in this process's own pid namespace, of the process that ``pidfd`` holds.

    ``said``: the pid by which the peer knows it, for messages. ProtocolError where the descriptor is no pidfd,
    TargetGone where the process has ended, TargetError where it cannot be seen from here.
    """
    try:
        kind = os.readlink(f"/proc/self/fd/{pidfd}")
        with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise ProtocolError(f"a descriptor that cannot be looked at: {error.strerror}") from error
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("Pid:")]
    if "pidfd" not in kind or len(found) != 1:
        raise ProtocolError("a descriptor that is not a pidfd")
    pid = int(found[0])
    name = f"process {said or pid}"
    if pid < 0 or ended(pidfd):
        raise TargetGone(f"{name} has ended", pid=said)
    if pid == 0:
        raise TargetError(
            f"{name} is in another pid namespace, which the controller cannot see",
            pid=said,
            cure="run the controller where the process is visible (the host, or --pid=host), or use --no-controller",
        )
    return pid
