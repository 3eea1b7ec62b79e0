"""The control page of a launched process, as the controller maps it (types of control_page.pyx)."""

from types import TracebackType
from typing import NamedTuple, Self

from ckptpipe.pyx.errors import CkptpipeError

class ControlPageError(CkptpipeError): ...

class PoolState(NamedTuple):
    pid: int  # in the process's own PID namespace
    hook: str  # none | relocations | symbols
    hooked: int
    library: str
    state: str  # absent | warming | ready | gone
    nbytes: int
    warm: int
    huge: int
    page_bytes: int
    pages: str  # auto | small | thp | hugetlb
    numa_node: int
    workers: int
    stores: str
    budget_bytes: int
    budget_used: int
    generation: int
    feeders: int
    armed: int
    gate_waiters: int
    served: int
    returned: int
    fallbacks: int
    fallback_bytes: int
    fallback_reason: str
    fallback_text: str
    reason: str
    text: str
    failure: str
    ended: bool
    late_serial: int

class ImageState(NamedTuple):
    slot: int
    generation: int
    phase: str  # writing | reading
    gate: str  # open | closed | failed
    address: int
    offset: int
    nbytes: int
    watermark: int
    high: int
    ready: int
    written: int
    read: int
    settled: bool
    moved: bool
    late_count: int
    gate_waits: int
    map_seconds: float  # how long the driver's mmap took

class LateRange(NamedTuple):
    serial: int
    generation: int
    start: int
    nbytes: int

def sealed_bytes(fd: int) -> int: ...

class ControlPage:
    def __init__(self, fd: int) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def close(self) -> None: ...
    def pool(self) -> PoolState: ...
    def images(self) -> list[ImageState]: ...
    def watermark(self, slot: int, generation: int) -> int: ...
    def pieces(self, first: int, count: int) -> bytes: ...
    def summed(self, slot: int, generation: int, start: int, nbytes: int) -> tuple[int, bool] | None: ...
    def late(self, after: int = 0) -> list[LateRange]: ...
    @property
    def events(self) -> int: ...
    def wait(self, seen: int, timeout: float) -> int: ...
    def deadlines(self, *, still: float, orphaned: float) -> None: ...
    def close_gate(self, slot: int, generation: int, *, window: int = 0) -> None: ...
    def consumed(self, slot: int, generation: int) -> int: ...
    def hungry(self, slot: int, generation: int) -> bool: ...
    def advance(self, slot: int, generation: int, base: int) -> bool: ...
    def behind(self, slot: int, generation: int) -> int | None: ...
    def rewind(self, slot: int, generation: int, start: int) -> None: ...
    def release(self, slot: int, generation: int, ready: int) -> None: ...
    def open_gate(self, slot: int, generation: int) -> None: ...
    def fail_gate(self, slot: int, generation: int, why: str) -> None: ...
    def punched(self) -> None: ...
