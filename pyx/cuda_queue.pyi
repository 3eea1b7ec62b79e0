"""Copies between a GPU and leased host memory (types of cuda_queue.pyx)."""

import asyncio
from array import array
from typing import Literal, Protocol, Self, overload

from ckptpipe.pyx.loop_work import LoopWork
from ckptpipe.pyx.staging import Lease
from ckptpipe.pyx.workers import Scan

MAX_DEPTH: int

class HeldFile(Protocol):
    """An open file, and one hold on it."""

    def fileno(self) -> int: ...
    def share(self) -> Self: ...  # one more hold
    def release(self) -> None: ...

class CopyQueue(LoopWork):
    """The copies of one GPU; made inside the running loop that it reports to."""

    def __init__(
        self,
        device: int,
        context: int,
        *,
        stream: int = 0,
        checksum: Literal["device", "host"] = "device",
        depth: int = 32,
        elide_zeros: bool = False,  # an all-zero range is not copied: the lease keeps what it held
        host_threads: int = 0,
    ) -> None: ...
    @classmethod
    async def create(
        cls,
        device: int,
        context: int,
        *,
        stream: int = 0,
        checksum: Literal["device", "host"] = "device",
        depth: int = 32,
        elide_zeros: bool = False,
        host_threads: int = 0,
    ) -> CopyQueue: ...  # compiles the kernel off the loop first
    @property
    def depth(self) -> int: ...
    @property
    def requested(self) -> str: ...
    @property
    def checksum(self) -> str: ...  # what runs: device | host
    @property
    def why(self) -> str: ...  # why not what was requested, "" when it is
    @property
    def elide_zeros(self) -> bool: ...  # what runs: False where checksums are the host's
    @property
    def copied(self) -> int: ...  # bytes that crossed the link
    @property
    def elided(self) -> int: ...  # bytes that did not have to
    @property
    def running(self) -> int: ...  # those that the driver has now, at most depth
    def fetch(self, lease: Lease, nbytes: int, device_address: int) -> asyncio.Future[Scan]: ...
    def store(self, device_address: int, lease: Lease, nbytes: int) -> asyncio.Future[None]: ...
    def store_and_scan(self, device_address: int, lease: Lease, nbytes: int) -> asyncio.Future[Scan]: ...
    def clear(self, device_address: int, nbytes: int) -> asyncio.Future[None]: ...  # zeros
    @overload  # OSError, EOFError, CudaError; needs start_loads
    def load(
        self, file: HeldFile, offset: int, nbytes: int, device_address: int, *, scan: Literal[True] = True
    ) -> asyncio.Future[Scan]: ...
    @overload
    def load(
        self, file: HeldFile, offset: int, nbytes: int, device_address: int, *, scan: bool
    ) -> asyncio.Future[Scan | None]: ...
    def start_loads(
        self,
        memory: int,  # address of pinned memory: buffers * copy_bytes
        *,
        threads: int,
        buffers: int,
        copy_bytes: int,
        part_bytes: int,
        cpus: array[int],  # of type "i"; empty: any
    ) -> None: ...  # blocking
    def stop_loads(self) -> None: ...  # blocking
    def scan(self, device_address: int, nbytes: int) -> asyncio.Future[Scan]: ...

def live_queues() -> int: ...
