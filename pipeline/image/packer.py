"""The packer: appends chunks to the data objects of one image, lane by lane, and writes their index rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ckptpipe.pipeline.chunk import Chunk
from ckptpipe.pipeline.image.index_builder import IndexBuilder
from ckptpipe.pipeline.image.layout import data_name, padded
from ckptpipe.pipeline.image.records import ChunkRecord, zero_record
from ckptpipe.pipeline.image.removal import Removal
from ckptpipe.pyx.checksum import crc32c_combine, crc32c_zeros
from ckptpipe.pyx.copy import copy
from ckptpipe.pyx.staging import Lease, StagingRing
from ckptpipe.pyx.workers import WorkerPool
from ckptpipe.storage_backends.abc import Backend, Extent, ObjectInfo, ObjectWriter
from ckptpipe.storage_backends.errors import StorageError
from ckptpipe.storage_backends.shielded import shielded

GATHER_SHARE = 4
"""A chunk that fills less than one part in this many of its slot is copied into a shared slot."""
GATHER_WRITE = 1 << 20
"""… and so is one under this size, where the store prefers larger writes."""
INLINE_COPY = 64 << 10
"""Smaller copies are done on the loop: a worker's hand-over would cost more."""


@dataclass(slots=True)
class DataObject:
    """One data object of the image; ``info`` is there when it is finished."""

    name: str
    lane: int
    number: int
    position: int  # of the object in the manifest
    writer: ObjectWriter
    nbytes: int = 0
    crc32c: int = 0
    info: ObjectInfo | None = None


class Packer:
    """Puts chunks into data objects in the order they come, and knows where each one lies.

    Small stored chunks (tails, small files, what compresses well) are gathered in a slot of the packer's own
    ring first: otherwise each would hold a whole slot until its part is full, and a ring of few slots could
    never fill a part of many small chunks. That copy is the only one on the way.
    """

    def __init__(
        self,
        backend: Backend,
        save_id: str,
        index: IndexBuilder,
        workers: WorkerPool,
        make_ring: Callable[[int, int], StagingRing],
        *,
        expected_bytes: int = 0,
    ) -> None:
        """``expected_bytes``: of all objects together, so that no more space is reserved than is written; 0 where
        that is not known."""
        self.objects: list[DataObject] = []
        self.stored_bytes = 0
        self._backend = backend
        self._save_id = save_id
        self._index = index
        self._workers = workers
        self._make_ring = make_ring
        self._gather_ring: StagingRing | None = None
        self._gathered: list[tuple[Chunk, int]] = []  # without leases, with their offset in the slot
        self._gather_slot: Lease | None = None
        self._gather_bytes = 0
        self._gather_crc = 0
        lanes = max(1, backend.capabilities.lanes)
        self._lanes: list[DataObject | None] = [None] * lanes
        self._numbers = [0] * lanes
        self._size_hint = min(-(-expected_bytes // lanes), backend.capabilities.max_object_bytes)
        self._turn = 0
        self._unsettled: dict[tuple[int, int], tuple[DataObject, int, int, int]] = {}
        self._superseded: set[tuple[int, int]] = set()

    async def add(self, chunk: Chunk) -> None:
        """Take the chunk over; it is released when its writer has a lease of its own."""
        try:
            if chunk.place is not None:
                target = await self._target(chunk.stored_bytes, chunk.stored_crc32c)
                offset = await target.writer.append_file(
                    chunk.place.file, chunk.place.offset, chunk.stored_bytes, chunk.stored_crc32c
                )
                self._add_row(chunk, target, offset)
            elif chunk.lease is None:
                zeros = zero_record(chunk.stream, chunk.number, chunk.raw_bytes, chunk.raw_crc32c)
                self._index.add(zeros, chunk.version)
                self._supersede(chunk)
            elif self._is_small(chunk):
                await self._gather(chunk)
            else:
                size = padded(chunk.stored_bytes)
                crc = crc32c_zeros(size - chunk.stored_bytes, chunk.stored_crc32c)
                target, offset = await self._append(Extent(chunk.lease, size, crc))
                self._add_row(chunk, target, offset)
        finally:
            chunk.release()

    def _is_small(self, chunk: Chunk) -> bool:
        assert chunk.lease is not None
        size = padded(chunk.stored_bytes)
        if self._gather_ring is not None and size > self._gather_ring.slot_bytes:
            return False  # the slots were sized after a chunk that held less memory
        if size * GATHER_SHARE <= chunk.lease.footprint:
            return True
        return size < min(self._backend.capabilities.write_size, GATHER_WRITE)

    async def _gather(self, chunk: Chunk) -> None:
        lease = chunk.lease
        assert lease is not None
        size = padded(chunk.stored_bytes)
        if self._gather_slot is not None and self._gather_bytes + size > self._gather_slot.nbytes:
            await self._flush()
        if self._gather_slot is None:
            self._gather_slot = await self._ring_for(lease).acquire()
            self._gather_bytes = self._gather_crc = 0
        at = self._gather_bytes
        with self._gather_slot.slice(at, size) as room:
            if size <= INLINE_COPY:
                with memoryview(room) as destination, memoryview(lease)[:size] as stored:
                    copy(destination, stored)
            else:
                await self._workers.copy(room, lease, size)
        crc = crc32c_zeros(size - chunk.stored_bytes, chunk.stored_crc32c)
        self._gather_crc = crc32c_combine(self._gather_crc, crc, size)
        self._gather_bytes += size
        self._gathered.append((chunk, at))

    def _ring_for(self, lease: Lease) -> StagingRing:
        if self._gather_ring is None:
            slot_bytes = max(lease.footprint, GATHER_WRITE)
            # A part of the store may be made of gathered slots alone: one part being filled, one on its way.
            slots = 2 * -(-self._backend.capabilities.write_size // slot_bytes) + 2
            self._gather_ring = self._make_ring(min(slots, 64), slot_bytes)
        return self._gather_ring

    async def _flush(self) -> None:
        slot, self._gather_slot = self._gather_slot, None
        if slot is None:
            return
        with slot:
            target, offset = await self._append(Extent(slot, self._gather_bytes, self._gather_crc))
        for chunk, at in self._gathered:
            self._add_row(chunk, target, offset + at)
        self._gathered.clear()

    def _add_row(self, chunk: Chunk, target: DataObject, offset: int) -> None:
        self._index.add(_record(chunk, target, offset), chunk.version)
        self._supersede(chunk)
        if chunk.unsettled:
            size = padded(chunk.stored_bytes)
            crc = crc32c_zeros(size - chunk.stored_bytes, chunk.stored_crc32c)
            self._unsettled[chunk.stream, chunk.number] = (target, offset, size, crc)

    def _supersede(self, chunk: Chunk) -> None:
        if chunk.version:
            self._superseded.add((chunk.stream, chunk.number))

    async def _read_torn(self) -> None:
        """What no row refers to counts in its object's checksum as it was stored. Where that may have changed meanwhile
        it is read back."""
        torn = [self._unsettled[each] for each in self._superseded if each in self._unsettled]
        if not torn or self._backend.scheme == "null":
            return
        ring = self._make_ring(1, max(size for _, _, size, _ in torn))
        for target, offset, size, said in torn:
            with await ring.acquire() as slot:
                await self._backend.read_into(target.name, offset, size, slot)
                found = await self._workers.crc32c(slot, size)
            behind = target.nbytes - offset - size
            target.crc32c ^= crc32c_combine(said ^ found, 0, behind)  # a checksum is linear in the bytes

    async def _append(self, extent: Extent) -> tuple[DataObject, int]:
        target = await self._target(extent.nbytes, extent.crc32c)
        return target, await target.writer.append([extent])

    async def _target(self, nbytes: int, crc32c: int) -> DataObject:
        """The object that these bytes come next in; it counts them already."""
        lane = self._turn
        self._turn = (lane + 1) % len(self._lanes)
        target = self._lanes[lane]
        if target is not None and target.nbytes + nbytes > self._backend.capabilities.max_object_bytes:
            await _finish(target)
            target = None
        if target is None:
            target = await self._start(lane)
        target.nbytes += nbytes
        target.crc32c = crc32c_combine(target.crc32c, crc32c, nbytes)
        self.stored_bytes += nbytes
        return target

    async def _start(self, lane: int) -> DataObject:
        number = self._numbers[lane]
        name = data_name(self._save_id, lane, number)
        writer = await self._backend.create(name, lane=lane, size_hint=self._size_hint if number == 0 else 0)
        self._numbers[lane] += 1
        target = DataObject(name, lane, number, len(self.objects), writer)
        self.objects.append(target)
        self._lanes[lane] = target
        return target

    async def finish(self) -> None:
        """Write out what is gathered and make every object durable."""
        await self._flush()
        for target in self.objects:
            if target.info is None:
                await _finish(target)
        await self._read_torn()

    async def abort(self) -> None:
        """Every object is gone afterwards, every lease released."""
        slot, self._gather_slot = self._gather_slot, None
        if slot is not None:
            slot.release()
        self._gathered.clear()
        removal = Removal()
        await shielded(removal.steps(partial(self._remove, target) for target in self.objects))
        removal.end()

    async def _remove(self, target: DataObject) -> None:
        if target.info is None:
            await target.writer.abort()
        else:
            await self._backend.delete(target.name)


async def _finish(target: DataObject) -> None:
    info = await target.writer.finish()
    if info.size != target.nbytes or info.crc32c not in (None, target.crc32c):
        raise StorageError(
            f"{target.name} was stored with {info.size} bytes and checksum {info.crc32c}, "
            f"but {target.nbytes} bytes with checksum {target.crc32c} were sent",
            cure="the store cannot be trusted with this image; save elsewhere",
        )
    target.info = info


def _record(chunk: Chunk, target: DataObject, offset: int) -> ChunkRecord:
    return ChunkRecord(
        chunk.stream,
        chunk.number,
        chunk.raw_bytes,
        chunk.raw_crc32c,
        target.position,
        target.lane,
        offset,
        chunk.stored_bytes,
        chunk.stored_crc32c,
        0,
        chunk.transform,
        chunk.planes,
    )
