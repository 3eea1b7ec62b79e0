"""The packer: where chunks end up, what is gathered, when an object rolls over, and how it is undone."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest

from ckptpipe.pipeline.chunk import Chunk
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.image.index_builder import IndexBuilder
from ckptpipe.pipeline.image.packer import GATHER_WRITE, Packer
from ckptpipe.pipeline.image.saveid import new_save_id
from ckptpipe.pipeline.sources.abc import scanned_chunk
from ckptpipe.pyx.staging import lease_buffer
from ckptpipe.storage_backends.errors import StorageError
from ckptpipe.storage_backends.memory import MemoryBackend, forget
from ckptpipe.storage_backends.wrappers.faulty import Faults, FaultyBackend
from tests.pipeline.runs import KIB, SMALL, in_context

STEP = SMALL.chunk_bytes


async def backend_of(context: GraphContext, *, lanes: int = 1, most: int = 1 << 40) -> MemoryBackend:
    backend = await MemoryBackend.open("memory:packer", context.backend_context, {})
    backend.capabilities = replace(
        backend.capabilities, lanes=lanes, max_object_bytes=most, write_size=4 * KIB
    )
    return backend


async def chunk_of(context: GraphContext, number: int, data: bytes) -> Chunk:
    slot = await context.ring.acquire()
    with memoryview(slot) as view:
        view[: len(data)] = data
    return await scanned_chunk(context, slot, 0, number, len(data))


def packer_of(context: GraphContext, backend: MemoryBackend | FaultyBackend) -> tuple[Packer, IndexBuilder]:
    index = IndexBuilder(STEP)
    return Packer(backend, new_save_id(), index, context.workers, context.make_ring), index


def test_whole_chunks_lie_behind_each_other_padded_with_zeros() -> None:
    first, second = os.urandom(STEP), os.urandom(STEP - 1000)

    async def body(context: GraphContext) -> None:
        backend = await backend_of(context)
        packer, _ = packer_of(context, backend)
        await packer.add(await chunk_of(context, 0, first))
        await packer.add(await chunk_of(context, 1, second))
        await packer.finish()
        assert packer.stored_bytes == 2 * STEP
        (stored,) = packer.objects
        data = await backend.read_bytes(stored.name, limit=1 << 30)
        assert data == first + second + bytes(1000)
        await backend.aclose()

    in_context(body)
    forget("packer")


def test_zero_chunks_store_nothing() -> None:
    async def body(context: GraphContext) -> None:
        backend = await backend_of(context)
        packer, index = packer_of(context, backend)
        await packer.add(await chunk_of(context, 0, bytes(STEP)))
        await packer.finish()
        assert packer.objects == [] and packer.stored_bytes == 0
        assert index.encode([1]).zero_chunks == 1
        await backend.aclose()

    in_context(body)
    forget("packer")


def test_small_chunks_share_slots_and_leave_the_ring_free() -> None:
    """More small chunks than the ring has slots, while the object's part is not full."""
    data = [os.urandom(100 + number) for number in range(3 * SMALL.ring_bytes // STEP)]

    async def body(context: GraphContext) -> None:
        backend = await backend_of(context)
        packer, _ = packer_of(context, backend)
        for number, item in enumerate(data):
            await asyncio.wait_for(packer.add(await chunk_of(context, number, item)), 10)
        assert context.ring.in_use == 0
        await packer.finish()
        stored = await backend.read_bytes(packer.objects[0].name, limit=1 << 30)
        pages = [stored[at : at + 4096] for at in range(0, len(stored), 4096)]
        assert pages == [item.ljust(4096, b"\0") for item in data]
        await backend.aclose()

    in_context(body)
    forget("packer")


def test_small_for_its_own_slot_but_larger_than_the_slots_that_gather() -> None:
    """A lease that is a range of its own, as stages wrap them, hides how much memory stands behind it."""
    data = [os.urandom(100), os.urandom(GATHER_WRITE + 4096), os.urandom(200)]

    async def body(context: GraphContext) -> None:
        backend = await backend_of(context)
        index = IndexBuilder(8 * GATHER_WRITE)
        packer = Packer(backend, new_save_id(), index, context.workers, context.make_ring)
        slots = context.make_ring(2, 8 * GATHER_WRITE)
        for number, item in enumerate(data):
            if number == 1:
                lease = await slots.acquire()
            else:
                lease = lease_buffer(bytearray(64 * KIB))
            with memoryview(lease) as view:
                view[: len(item)] = item
            await packer.add(await scanned_chunk(context, lease, 0, number, len(item)))
        await packer.finish()
        stored = await backend.read_bytes(packer.objects[0].name, limit=1 << 30)
        for item in data:
            assert item in stored
        await backend.aclose()

    in_context(body)
    forget("packer")


def test_lanes_take_turns_and_objects_roll_over() -> None:
    async def body(context: GraphContext) -> None:
        backend = await backend_of(context, lanes=2, most=2 * STEP)
        packer, _ = packer_of(context, backend)
        for number in range(8):
            await packer.add(await chunk_of(context, number, os.urandom(STEP)))
        await packer.finish()
        places = sorted((item.lane, item.number, item.nbytes) for item in packer.objects)
        assert places == [(lane, number, 2 * STEP) for lane in (0, 1) for number in (0, 1)]
        assert [item.position for item in packer.objects] == [0, 1, 2, 3]
        await backend.aclose()

    in_context(body)
    forget("packer")


def test_a_store_that_keeps_other_bytes_is_found_out() -> None:
    async def body(context: GraphContext) -> None:
        backend = FaultyBackend(await backend_of(context), Faults().flip("append", 1, 5))
        packer, _ = packer_of(context, backend)
        await packer.add(await chunk_of(context, 0, os.urandom(STEP)))
        with pytest.raises(StorageError):
            await packer.finish()
        await packer.abort()
        assert [info async for info in backend.list()] == []
        await backend.aclose()

    in_context(body)
    forget("packer")


def test_abort_removes_finished_and_unfinished_objects_and_gathered_chunks() -> None:
    async def body(context: GraphContext) -> None:
        backend = await backend_of(context, most=STEP)
        packer, _ = packer_of(context, backend)
        for number in range(3):
            await packer.add(await chunk_of(context, number, os.urandom(STEP)))
        await packer.add(await chunk_of(context, 3, b"small"))
        assert len([info async for info in backend.list()]) == 2  # finished ones
        await packer.abort()
        await packer.abort()
        assert [info async for info in backend.list()] == []
        await backend.aclose()

    in_context(body)
    forget("packer")


def test_a_failed_append_leaves_no_lease() -> None:
    async def body(context: GraphContext) -> None:
        faults = Faults().fail("append", 1, StorageError("no"))
        backend = FaultyBackend(await backend_of(context), faults)
        packer, _ = packer_of(context, backend)
        with pytest.raises(StorageError, match="no"):
            await packer.add(await chunk_of(context, 0, os.urandom(STEP)))
        await packer.abort()
        assert context.ring.in_use == 0
        await backend.aclose()

    in_context(body)
    forget("packer")


def test_a_foreign_buffer_can_be_a_chunk() -> None:
    data = bytearray(os.urandom(STEP))

    async def body(context: GraphContext) -> None:
        backend = await backend_of(context)
        packer, _ = packer_of(context, backend)
        lease = lease_buffer(data)
        scan = await context.workers.scan(lease, STEP)
        await packer.add(Chunk(0, 0, STEP, scan.crc32c, lease))
        await packer.finish()
        assert await backend.read_bytes(packer.objects[0].name, limit=STEP) == bytes(data)
        await backend.aclose()

    in_context(body)
    forget("packer")
