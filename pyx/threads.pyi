"""Engine over blocking calls in threads."""

from ckptpipe.pyx.engine import Engine

MAX_THREADS: int

class ThreadsEngine(Engine):
    def __init__(
        self, depth: int, requested: str = "threads", why: str = "", *, threads: int = 0
    ) -> None: ...
    @property
    def threads(self) -> int: ...
