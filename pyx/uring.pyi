"""Engine over io_uring."""

from collections.abc import Sequence

from ckptpipe.pyx.engine import Engine

class UringEngine(Engine):
    def __init__(
        self,
        depth: int,
        requested: str = "io_uring",
        why: str = "",
        *,
        buffers: Sequence[object] = (),
        denied: bool = False,
        deferred: bool = True,
    ) -> None: ...
    @property
    def registered_bytes(self) -> int: ...
    @property
    def mode(self) -> str: ...  # defer | cooperative | interrupt
