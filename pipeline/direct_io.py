"""Whether direct I/O is taken for a source file or a restored one: a choice per file."""

from __future__ import annotations

import errno
import fcntl
import os
from typing import Literal

from ckptpipe.pyx.files import dio_alignment
from ckptpipe.storage_backends.filesystems import DIRECT, kind_of

DirectMode = Literal["auto", "on", "off"]

DIRECT_MIN = 64 << 20  # bytes: under `auto`, smaller files go through the page cache
PAGE = 4096


def turn_on(fd: int, path: str, mode: DirectMode, nbytes: int, *, pays: bool = True) -> str:
    """Set O_DIRECT on ``fd`` where ``mode`` wants it; returns why not, "" where it is on.

    ``auto`` wants it for files of at least `DIRECT_MIN` bytes on local disks, where it ``pays``.
    """
    if mode == "off":
        return "switched off"
    if mode == "auto" and (nbytes < DIRECT_MIN or not pays):
        return "it does not pay"
    alignment = dio_alignment(fd, path)
    if alignment is None or max(alignment) > PAGE:
        return "the file system does not offer it"
    if mode == "auto" and kind_of(path) not in DIRECT:
        return f"it does not pay on {kind_of(path)}"
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return "the file system refuses it"
    return ""
