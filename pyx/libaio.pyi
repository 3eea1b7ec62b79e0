"""Engine over Linux native AIO."""

from ckptpipe.pyx.threads import ThreadsEngine

class LibaioEngine(ThreadsEngine):
    def __init__(
        self, depth: int, requested: str = "libaio", why: str = "", *, threads: int = 0, denied: bool = False
    ) -> None: ...
