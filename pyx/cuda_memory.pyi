"""Pinned host memory (types of cuda_memory.pyx)."""

from typing import final

from ckptpipe.pyx.memory import Mapping
from ckptpipe.pyx.staging import StagingRing

@final
class Pinned:
    """Registered host memory; holds a view of its mapping, which cannot be closed before `release`."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...  # what pinning took
    @property
    def count(self) -> int: ...  # holds: calls of pin that were not released
    def release(self) -> None: ...  # the last one unregisters; RuntimeError when it is released already
    def __enter__(self) -> Pinned: ...
    def __exit__(self, *exc: object) -> None: ...

def pin(memory: StagingRing | Mapping, *, context: int = 0) -> Pinned: ...  # blocking, about 2 GB/s
def pinned_bytes() -> int: ...
