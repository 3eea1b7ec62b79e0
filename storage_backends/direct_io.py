"""Whether a file is read or written with direct I/O: asked of the kernel for every file."""

from __future__ import annotations

import errno
import fcntl
import os

from ckptpipe.pyx import files
from ckptpipe.storage_backends.abc import DirectMode
from ckptpipe.storage_backends.filesystems import DIRECT, kind_of

ALIGNMENT_MAX = 4096  # everything here comes in multiples of it; what wants more goes through the page cache


def why_not_direct(descriptor: int, path: str, mode: DirectMode) -> tuple[str, tuple[int, int]]:
    """Why direct I/O is not for this file ("" where it is), and the alignments that it wants."""
    if mode == "off":
        return "as asked", (1, 1)
    alignment = files.dio_alignment(descriptor, path)
    kind = kind_of(path)
    if alignment is None:
        return f"{kind} has no direct I/O here", (1, 1)
    if max(alignment) > ALIGNMENT_MAX:
        return f"the device wants multiples of {max(alignment)} bytes", alignment
    if mode == "auto" and kind not in DIRECT:
        return f"it does not pay on {kind}", alignment
    return "", alignment


def turn_on(descriptor: int, path: str) -> str:
    """Set O_DIRECT on an open file; why not, "" where it is set."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return f"{kind_of(path)} refuses O_DIRECT"
    return ""
