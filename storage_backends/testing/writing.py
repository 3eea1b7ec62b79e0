"""Conformance of writers: order, budget, errors, cancellation, and what is left after an abort."""

from __future__ import annotations

import asyncio

from ckptpipe.pyx.checksum import crc32c
from ckptpipe.storage_backends.abc import Extent, ObjectWriter
from ckptpipe.storage_backends.errors import ObjectNotFound, StorageError
from ckptpipe.storage_backends.testing.bench import PAGE, SLOT, Bench, data_of, expect, raises


async def _gone(bench: Bench, name: str) -> None:
    if bench.readable:
        with raises(ObjectNotFound, f"stat of the aborted {name}"):
            await bench.backend.stat(name)
        expect(name not in await bench.names(), f"the aborted {name} is listed")
        with await bench.ring.acquire() as lease, raises(ObjectNotFound, f"read of the aborted {name}"):
            await bench.backend.read_into(name, 0, PAGE, lease)
    expect(await bench.backend.pending() == [], "an abort left an incomplete upload")
    expect(bench.ring.in_use == 0, f"{bench.ring.in_use} slots are still held after the abort")


async def bytes_and_checksum(bench: Bench) -> None:
    parts = [data_of(1, PAGE), data_of(2, SLOT), data_of(3, 3 * PAGE)]
    writer = await bench.backend.create("object-1")
    expect(writer.name == "object-1", f"the writer calls itself {writer.name!r}")
    offsets = [await bench.append(writer, part) for part in parts]
    info = await writer.finish()
    whole = b"".join(parts)
    expect(offsets == [0, PAGE, PAGE + SLOT], f"offsets {offsets}")
    expect(info.name == "object-1" and info.size == len(whole), f"finish said {info}")
    expect(info.crc32c in (None, crc32c(whole)), f"CRC32C {info.crc32c}, the bytes have {crc32c(whole)}")
    expect(bench.ring.in_use == 0, "leases are held after finish")
    if bench.readable:
        expect(await bench.read("object-1", len(whole)) == whole, "other bytes were read back")
        expect((await bench.backend.stat("object-1")).size == len(whole), "stat has another size")
        async with bench.another() as other:
            seen = await bench.read("object-1", len(whole), backend=other)
        expect(seen == whole, "another process reads other bytes")


async def several_extents_in_one_append(bench: Bench) -> None:
    parts = [data_of(seed, (seed % 3 + 1) * PAGE) for seed in range(8)]
    writer = await bench.backend.create("object-1")
    expect(await writer.append([]) == 0, "an empty append is not at offset 0")
    leases = [await bench.ring.acquire() for _ in parts]
    try:
        extents = []
        for lease, part in zip(leases, parts, strict=True):
            with memoryview(lease) as view:
                view[: len(part)] = part
            extents.append(Extent(lease, len(part), crc32c(part)))
        expect(await writer.append(extents) == 0, "the first append is not at offset 0")
    finally:
        for lease in leases:
            lease.release()
    await writer.finish()
    if bench.readable:
        whole = b"".join(parts)
        expect(await bench.read("object-1", len(whole)) == whole, "other bytes were read back")


async def concurrent_appends_keep_their_order(bench: Bench) -> None:
    parts = [data_of(seed, (seed % 5 + 1) * PAGE) for seed in range(64)]
    writer = await bench.backend.create("object-1")
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_append_when_started(bench, writer, part)) for part in parts]
    expected = 0
    for task, part in zip(tasks, parts, strict=True):
        expect(task.result() == expected, f"offset {task.result()}, {expected} was due")
        expected += len(part)
    info = await writer.finish()
    whole = b"".join(parts)
    expect(info.size == len(whole), f"size {info.size}, {len(whole)} were appended")
    expect(info.crc32c in (None, crc32c(whole)), "CRC32C of another order")
    if bench.readable:
        expect(await bench.read("object-1", len(whole)) == whole, "other bytes were read back")


async def _append_when_started(bench: Bench, writer: ObjectWriter, data: bytes) -> int:
    """The append is called in the order in which the tasks start: no waiting for a slot before it."""
    lease = bench.ring.try_acquire()
    expect(lease is not None, "the ring of the suite is too small")
    assert lease is not None
    with lease:
        with memoryview(lease) as view:
            view[: len(data)] = data
        return await writer.append([Extent(lease, len(data), crc32c(data))])


async def objects_side_by_side(bench: Bench) -> None:
    count = max(4, 2 * bench.backend.capabilities.lanes)
    contents = {f"lane-{lane}": data_of(lane, SLOT + lane * PAGE) for lane in range(count)}
    async with asyncio.TaskGroup() as group:
        for lane, (name, data) in enumerate(contents.items()):
            group.create_task(bench.write(name, data, lane=lane))
    if bench.readable:
        expect(await bench.names() == sorted(contents), f"listed: {await bench.names()}")
        for name, data in contents.items():
            expect(await bench.read(name, len(data)) == data, f"{name}: other bytes were read back")


async def object_of_several_write_sizes(bench: Bench) -> None:
    size = min(3 * bench.backend.capabilities.write_size, 64 << 20) + PAGE
    data = data_of(7, size)
    info = await bench.write("object-1", data)
    expect(info.size == size, f"size {info.size}, {size} were appended")
    expect(info.crc32c in (None, crc32c(data)), "CRC32C of other bytes")
    if bench.readable:
        expect(await bench.read("object-1", size) == data, "other bytes were read back")


async def empty_object(bench: Bench) -> None:
    info = await (await bench.backend.create("object-1")).finish()
    expect(info.size == 0 and info.crc32c in (None, 0), f"finish said {info}")
    if bench.readable:
        expect((await bench.backend.stat("object-1")).size == 0, "stat has another size")
        expect(await bench.backend.read_bytes("object-1", limit=0) == b"", "bytes in an empty object")
        expect(await bench.names() == ["object-1"], "an empty object is not listed")


async def abort_leaves_nothing(bench: Bench) -> None:
    writer = await bench.backend.create("object-1")
    for seed in range(6):
        await bench.append(writer, data_of(seed, SLOT))
    await writer.abort()
    await _gone(bench, "object-1")
    await writer.abort()
    await asyncio.gather(writer.abort(), writer.abort())
    with raises(StorageError, "an append after the abort"):
        await bench.append(writer, data_of(1, PAGE))
    with raises(StorageError, "finish after the abort"):
        await writer.finish()
    expect(bench.ring.in_use == 0, "a refused append holds its lease")
    # The name is free again.
    data = data_of(2, PAGE)
    await bench.write("object-1", data)
    if bench.readable:
        expect(await bench.read("object-1", PAGE) == data, "other bytes were read back")


async def abort_of_an_empty_object(bench: Bench) -> None:
    await (await bench.backend.create("object-1")).abort()
    await _gone(bench, "object-1")


async def abort_while_appends_wait(bench: Bench) -> None:
    writer = await bench.backend.create("object-1")
    data = data_of(1, SLOT)
    tasks = [asyncio.create_task(_append_when_started(bench, writer, data)) for _ in range(bench.ring.free)]
    await asyncio.sleep(0)  # each append has been called
    await writer.abort()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    wrong = [item for item in results if not isinstance(item, int | StorageError)]
    expect(not wrong, f"an append that an abort cut off raised {wrong[:1]}")
    await _gone(bench, "object-1")


async def abort_that_is_cancelled(bench: Bench) -> None:
    writer = await bench.backend.create("object-1")
    data = data_of(1, SLOT)
    appends = [asyncio.create_task(_append_when_started(bench, writer, data)) for _ in range(8)]
    await asyncio.sleep(0)
    aborting = asyncio.create_task(writer.abort())
    await asyncio.sleep(0)
    aborting.cancel()
    await asyncio.gather(aborting, *appends, return_exceptions=True)
    await _gone(bench, "object-1")


async def cancelled_appends(bench: Bench) -> None:
    writer = await bench.backend.create("object-1")
    data = data_of(1, SLOT)
    tasks = [asyncio.create_task(_append_when_started(bench, writer, data)) for _ in range(bench.ring.free)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    if any(isinstance(item, BaseException) for item in results):
        # There is a hole in it now: it must never pass for whole.
        with raises(StorageError, "finish of an object with a cancelled append"):
            await writer.finish()
    await writer.abort()
    await _gone(bench, "object-1")


async def cancelled_creates(bench: Bench) -> None:
    names = [f"object-{index}" for index in range(6)]
    tasks = [asyncio.create_task(bench.backend.create(name)) for name in names]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    for item in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(item, ObjectWriter):
            await item.abort()
        else:
            expect(isinstance(item, asyncio.CancelledError), f"a cancelled create raised {item!r}")
    for name in names:
        await _gone(bench, name)


async def finish_that_is_cancelled(bench: Bench) -> None:
    writer = await bench.backend.create("object-1")
    await bench.append(writer, data_of(1, SLOT))
    finishing = asyncio.create_task(writer.finish())
    await asyncio.sleep(0)
    finishing.cancel()
    await asyncio.gather(finishing, return_exceptions=True)
    await writer.abort()
    await _gone(bench, "object-1")


async def finish_twice_is_refused(bench: Bench) -> None:
    writer = await bench.backend.create("object-1")
    await bench.append(writer, data_of(1, PAGE))
    await writer.finish()
    with raises(StorageError, "a second finish"):
        await writer.finish()
    with raises(StorageError, "an append after finish"):
        await bench.append(writer, data_of(2, PAGE))
    expect(bench.ring.in_use == 0, "a refused append holds its lease")
    if bench.readable:
        expect(await bench.read("object-1", PAGE) == data_of(1, PAGE), "other bytes were read back")


async def inflight_bytes_are_respected(bench: Bench) -> None:
    """When an append has returned, the writers hold no more than their context allows (or one write)."""
    bound = max(bench.context.inflight_bytes, bench.backend.capabilities.write_size)
    writer = await bench.backend.create("object-1")
    data = data_of(1, SLOT)
    checksum = crc32c(data)
    most = 0
    for _ in range(3 * bound // SLOT):
        with await bench.ring.acquire() as lease:
            with memoryview(lease) as view:
                view[:] = data
            await writer.append([Extent(lease, SLOT, checksum)])
        most = max(most, bench.ring.in_use * SLOT)
    await writer.finish()
    expect(most <= bound, f"{most} bytes were held, {bound} are allowed")


CASES = [
    bytes_and_checksum,
    several_extents_in_one_append,
    concurrent_appends_keep_their_order,
    objects_side_by_side,
    object_of_several_write_sizes,
    empty_object,
    abort_leaves_nothing,
    abort_of_an_empty_object,
    abort_while_appends_wait,
    abort_that_is_cancelled,
    cancelled_appends,
    cancelled_creates,
    finish_that_is_cancelled,
    finish_twice_is_refused,
    inflight_bytes_are_respected,
]
