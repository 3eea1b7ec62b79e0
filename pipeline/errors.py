"""Errors of graphs and images. Exit codes: 1 failed, 2 usage, 3 image corrupt or incomplete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptpipe.pyx.errors import CkptpipeError


class UsageError(CkptpipeError):
    """An argument makes no sense; nothing was touched."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One fault of a config. ``line`` and ``column`` count from 1, 0 where there is no position."""

    file: str
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{place}: {self.message}"


class ConfigError(UsageError):
    """A config was refused; ``problems`` has all faults, in the file's order."""

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class SourceError(CkptpipeError):
    """A source cannot be read, or is not what it should be."""


class SourceChanged(SourceError):
    """A source file shrank, grew or disappeared while it was read."""


class SaveFailed(CkptpipeError):
    """A required sink failed; everything was aborted."""


class ImageExists(CkptpipeError):
    """An image of that name is there already."""


class ImageNotFound(CkptpipeError):
    """No image at that URL."""


class ImageCorrupt(CkptpipeError):
    """Bytes of an image are not what was saved. The message names object, stream and chunk.

    ``found``: where a whole image was looked through and more than one place is damaged, the first of them, one
    line each. ``count``: all of them.
    """

    exit_code = 3
    found: tuple[str, ...] = ()
    count = 1


class ImageIncomplete(ImageCorrupt):
    """An object that the manifest names is missing or too short."""


class ImageReplaced(CkptpipeError):
    """The image was overwritten or deleted while it was read."""


class UnsupportedImage(CkptpipeError):
    """A format version, codec or feature that this reader does not know."""

    exit_code = 3


class DigestMismatch(ImageCorrupt):
    """The image is not the one that `--expect-digest` names."""


class RestoreConflict(CkptpipeError):
    """The destination holds something that a restore would overwrite."""
