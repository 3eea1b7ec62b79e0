"""A part of an object: extents that are held until the store has them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ckptpipe.pyx.checksum import crc32c_combine
from ckptpipe.pyx.staging import Lease, lease_buffer
from ckptpipe.pyx.workers import WorkerPool
from ckptpipe.storage_backends.errors import StorageError
from ckptpipe.storage_backends.s3.file_piece import Bytes, FilePiece, crc32c_of
from ckptpipe.storage_backends.s3.inflight import Inflight


@dataclass(eq=False, slots=True)
class Held:
    """``lease[:nbytes]``, ours to release. ``crc32c`` None: a piece of a cut extent, still to be hashed."""

    lease: Bytes
    nbytes: int
    crc32c: int | None
    copying: asyncio.Future[None] | None = None


@dataclass(eq=False, slots=True)
class Part:
    inflight: Inflight
    number: int = 0  # from 1; 0 while it is open
    held: list[Held] = field(default_factory=list)
    nbytes: int = 0
    footprint: int = 0

    def add(self, lease: Bytes, nbytes: int, crc32c: int | None) -> None:
        """Take ``lease`` over."""
        self.held.append(Held(lease, nbytes, crc32c))
        self.nbytes += nbytes
        self.footprint += lease.footprint
        self.inflight.hold(lease.footprint)

    def ranges(self) -> list[tuple[Bytes, int]]:
        return [(item.lease, item.nbytes) for item in self.held]

    def release(self) -> None:
        """Give every lease back. A second call does nothing."""
        held, self.held = self.held, []
        for item in held:
            self.inflight.drop(item.lease.footprint)
            item.lease.release()
        self.footprint = 0

    async def compact(self, workers: WorkerPool, what: str) -> None:
        """Copy what keeps more memory than it fills, or all of it, into memory of our own, and give the leases
        back: S3 takes no part under 5 MiB, and a ring that is full of small extents would never empty."""
        for item in list(self.held):
            if isinstance(item.lease, FilePiece):
                continue  # nothing is kept from anybody
            if item.lease.slot >= 0 or item.lease.footprint > item.nbytes:
                await self._copy(item, item.lease, workers, what)

    async def _copy(self, item: Held, lease: Lease, workers: WorkerPool, what: str) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        item.copying = done
        copied = lease_buffer(bytearray(item.nbytes))
        target: Bytes = copied
        try:
            scan = await workers.copy(copied, lease, item.nbytes)
            if item.crc32c is not None and scan.crc32c != item.crc32c:
                raise StorageError(f"{what}: bytes changed in memory after their CRC32C was made")
            if item not in self.held:
                return  # released meanwhile: the writer was aborted
            old, item.lease, target = item.lease, target, item.lease
            item.crc32c = scan.crc32c
            self.footprint += item.lease.footprint - old.footprint
            self.inflight.hold(item.lease.footprint)
            self.inflight.drop(old.footprint)
        finally:
            target.release()
            item.copying = None
            done.set_result(None)

    async def settle(self, workers: WorkerPool) -> int:
        """Wait for copies, hash the pieces of cut extents; the CRC32C of the part."""
        value = 0
        for item in self.held:
            if item.copying is not None:
                await asyncio.shield(item.copying)
            if item.crc32c is None:
                item.crc32c = await crc32c_of(item.lease, item.nbytes, workers)
            value = crc32c_combine(value, item.crc32c, item.nbytes)
        return value
