"""Worker pool (types of workers.pyx)."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, Protocol, Self

from ckptpipe.pyx.staging import Lease

class Scan(NamedTuple):
    crc32c: int
    zero: bool

class HeldFile(Protocol):
    """What `read_file` wants of storage_backends.abc.LocalFile."""

    @property
    def path(self) -> str: ...
    def fileno(self) -> int: ...
    def share(self) -> Self: ...
    def release(self) -> None: ...

class WorkerPool:
    """Threads that copy, test for zeros and checksum without the GIL; one eventfd reports to the loop.

    Made inside a running loop. Each method queues one job and returns a future of that loop; the job holds
    its ranges until it has run, also when the future is cancelled. Idle threads sleep on a condition.
    """

    def __init__(
        self, threads: int = 0, *, cpus: Sequence[int] | None = None, idle: bool = False
    ) -> None: ...  # 0: one a usable CPU; idle: SCHED_IDLE
    @property
    def threads(self) -> int: ...
    @property
    def inflight(self) -> int: ...
    @property
    def jobs(self) -> int: ...  # done since the start
    @property
    def cpu_seconds(self) -> float: ...
    def scan(self, lease: Lease, nbytes: int) -> asyncio.Future[Scan]: ...  # CRC32C + zero test in one pass
    def crc32c(self, lease: Lease, nbytes: int) -> asyncio.Future[int]: ...
    def copy(
        self, destination: Lease, source: Lease, nbytes: int, *, huge: bool = False
    ) -> asyncio.Future[Scan]: ...  # copy + CRC32C + zero test, one pass; huge: into holes of shared memory
    def read_file(
        self, file: HeldFile, offset: int, lease: Lease, nbytes: int, *, huge: bool = False, part: int = 0
    ) -> asyncio.Future[
        int
    ]: ...  # read + CRC32C, one pass; part: bytes that all threads take in turn; OSError
    def scan_file(
        self, file: HeldFile, offset: int, nbytes: int
    ) -> asyncio.Future[Scan]: ...  # CRC32C + zero test of what the file has there; kept nowhere
    def read_process(
        self, pid: int, address: int, lease: Lease, nbytes: int
    ) -> asyncio.Future[Scan]: ...  # process_vm_readv + CRC32C + zero test; OSError names pid and address
    async def __aenter__(self) -> WorkerPool: ...
    async def __aexit__(self, *exc: object) -> None: ...
    async def aclose(self) -> None: ...  # waits for queued jobs, joins the threads, closes the eventfd

def live_pools() -> int: ...  # pools that hold threads and an eventfd in this process now
def implementations() -> tuple[str, str]: ...  # what the threads run: (CRC32C, copy)
