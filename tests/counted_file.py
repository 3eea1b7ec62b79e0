"""An open file of a test, as `storage_backends.abc.LocalFile`, that counts who holds it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptpipe.storage_backends.held_file import HeldFile


class _Open:
    """``most``: holds that there were at a time. Closed with the last one."""

    def __init__(self, path: Path, flags: int) -> None:
        self.path = str(path)
        self.descriptor = os.open(path, flags)
        self.size = os.fstat(self.descriptor).st_size
        self.most = 0
        self._holds = 0

    @property
    def holds(self) -> int:
        return self._holds

    @holds.setter
    def holds(self, count: int) -> None:
        self._holds = count
        self.most = max(self.most, count)

    def let_go(self) -> None:
        self.holds -= 1
        if not self.holds:
            os.close(self.descriptor)


class CountedFile(HeldFile):
    """The test's own hold, which is the first one."""

    __slots__ = ("_open",)

    def __init__(self, path: Path, flags: int = os.O_RDONLY) -> None:
        self._open = _Open(path, flags)
        super().__init__(self._open)

    @property
    def holds(self) -> int:
        return self._open.holds

    @property
    def most(self) -> int:
        return self._open.most


@contextmanager
def held(path: Path, flags: int = os.O_RDONLY) -> Iterator[CountedFile]:
    file = CountedFile(path, flags)
    try:
        yield file
        assert file.holds == 1, "every operation gives its hold back"
    finally:
        file.release()
