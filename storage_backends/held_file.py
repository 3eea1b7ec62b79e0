"""A hold on an open file for one who uses its descriptor by himself: what `abc.LocalFile` asks for."""

from __future__ import annotations

import warnings
from typing import Protocol


class Holdable(Protocol):
    """An open file that counts its ``holds``; ``let_go`` takes one back."""

    path: str
    descriptor: int
    size: int
    holds: int

    def let_go(self) -> None: ...


class HeldFile:
    """One hold on an open file: see `abc.LocalFile`. Of the event loop's thread."""

    __slots__ = ("_file", "_held")

    def __init__(self, file: Holdable) -> None:
        self._file = file
        self._held = True
        file.holds += 1

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def size(self) -> int:
        return self._file.size

    def fileno(self) -> int:
        if not self._held:
            raise RuntimeError(f"{self._file.path}: this hold was released")
        return self._file.descriptor

    def share(self) -> HeldFile:
        self.fileno()
        return HeldFile(self._file)

    def release(self) -> None:
        self.fileno()
        self._held = False
        self._file.let_go()

    def __del__(self) -> None:
        if getattr(self, "_held", False):
            warnings.warn(f"a hold on {self._file.path} was not released", ResourceWarning, stacklevel=2)
            self.release()
