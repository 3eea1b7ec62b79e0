"""Directories below the one that a restore writes to."""

from __future__ import annotations

import errno
import os

from ckptpipe.pipeline.errors import RestoreConflict
from ckptpipe.pyx.files import openat2
from ckptpipe.storage_backends.open_limit import open_error


class Parent:
    """A directory below ``root``, opened so that no symbolic link is followed and nothing above is reached."""

    def __init__(self, root: int, path: bytes, url: str) -> None:
        self._root, self._path, self._url = root, path, url
        self._fd = -1

    def __enter__(self) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            self._fd = openat2(self._root, self._path or b".", flags)
        except OSError as error:
            where = os.path.join(self._url, os.fsdecode(self._path))
            if error.errno in (errno.ELOOP, errno.EXDEV, errno.ENOTDIR):
                raise RestoreConflict(
                    f"{where} is a symbolic link or no directory: nothing is written through it",
                    cure="remove it, or restore into an empty directory",
                ) from error
            raise open_error(error, "open", where) from error
        return self._fd

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)
