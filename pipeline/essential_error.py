"""Of an error, or of a group of them, the one that is told, and the others in a line each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckptpipe.pyx.errors import CkptpipeError


class EssentialError(NamedTuple):
    """``error``: the first that ckptpipe raised on purpose, else the first. ``also``: the others, each text once."""

    error: BaseException
    also: tuple[str, ...]

    @classmethod
    def of(cls, error: BaseException) -> EssentialError:
        leaves = list(_leaves(error))
        essential = next((leaf for leaf in leaves if isinstance(leaf, CkptpipeError)), leaves[0])
        also = dict.fromkeys(_line(leaf) for leaf in leaves if leaf is not essential)
        also.pop(_line(essential), None)
        return cls(essential, tuple(also))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Cancellations only where there is nothing else."""
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    import asyncio  # a group comes of it: it is there

    found = [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    real = [leaf for leaf in found if not isinstance(leaf, asyncio.CancelledError)]
    yield from real or found


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
