"""When a source file or a restored one goes past the page cache."""

from __future__ import annotations

from ckptpipe.storage_backends.abc import DirectMode
from ckptpipe.storage_backends.direct_io import turn_on, why_not_direct

DIRECT_MIN = 64 << 20  # bytes: under `auto`, smaller files go through the page cache


def take_direct(fd: int, path: str, mode: DirectMode, nbytes: int, *, pays: bool = True) -> str:
    """Set O_DIRECT on ``fd`` where ``mode`` wants it; why not, "" where it is set.

    ``auto`` wants it for files of at least `DIRECT_MIN` bytes on local disks, where it ``pays``.
    """
    if mode == "auto" and (nbytes < DIRECT_MIN or not pays):
        return "it does not pay"
    return why_not_direct(fd, path, mode)[0] or turn_on(fd, path)
