"""What all I/O engines share. See `ckptpipe.pyx.io_engine.IoEngine` for the meaning of the calls."""

import asyncio
import os

from ckptpipe.pyx.errors import IoError
from ckptpipe.pyx.staging import Lease

MAX_DEPTH: int

def live_engines() -> int: ...
def set_up_error(number: int, call: str, reason: str, cure: str) -> IoError: ...

class Operation: ...

class Engine:
    _limit_transfer: (
        int  # bytes of one transfer at most; tests make it small, so that transfers are continued
    )
    patience: float  # seconds without any answer after which `drain` and `aclose` raise StuckIo
    @property
    def name(self) -> str: ...
    @property
    def requested(self) -> str: ...
    @property
    def why(self) -> str: ...
    @property
    def notes(self) -> list[str]: ...  # what does not run as one would think, in words
    @property
    def depth(self) -> int: ...
    @property
    def inflight(self) -> int: ...  # accepted and not yet answered
    @property
    def running(self) -> int: ...  # slots in use
    def read(
        self, fd: int, lease: Lease, nbytes: int, offset: int, path: str | os.PathLike[str]
    ) -> asyncio.Future[int]: ...
    def write(
        self, fd: int, lease: Lease, nbytes: int, offset: int, path: str | os.PathLike[str]
    ) -> asyncio.Future[int]: ...
    def fsync(
        self, fd: int, path: str | os.PathLike[str], *, data_only: bool = False
    ) -> asyncio.Future[None]: ...
    def fallocate(
        self, fd: int, mode: int, offset: int, nbytes: int, path: str | os.PathLike[str]
    ) -> asyncio.Future[None]: ...
    async def drain(self, fd: int | None = None) -> None: ...
    async def aclose(self) -> None: ...
