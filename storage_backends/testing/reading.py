"""Conformance of everything but writers: ranged reads, small objects, names, listings, places."""

from __future__ import annotations

import asyncio
import random
import tempfile

from ckptpipe.pyx.checksum import crc32c
from ckptpipe.storage_backends.abc import Landing
from ckptpipe.storage_backends.errors import (
    BadName,
    ObjectExists,
    ObjectNotFound,
    ObjectTruncated,
    StorageError,
)
from ckptpipe.storage_backends.testing.bench import PAGE, SLOT, Bench, data_of, expect, raises

BAD_NAMES = (
    "",
    "/",
    "/absolute",
    "trailing/",
    "a//b",
    ".",
    "..",
    "../up",
    "a/../b",
    "a b",
    "a\0b",
    "a\n",
    "a\\b",
    "ü",
    "٣",
    "a:b",
    "%2e%2e",
    ".tmp-1",
    "a/.tmp-1",
    "x" * 256,
)


async def capabilities_make_sense(bench: Bench) -> None:
    facts = bench.backend.capabilities
    expect(facts.write_size > 0 and facts.write_size % PAGE == 0, f"write_size {facts.write_size}")
    expect(facts.lanes >= 1 and facts.stripes >= 1, f"{facts.lanes} lanes, {facts.stripes} stripes")
    expect(facts.lanes >= facts.stripes, f"{facts.lanes} lanes leave some of {facts.stripes} stripes empty")
    expect(facts.max_object_bytes >= facts.write_size, f"max_object_bytes {facts.max_object_bytes}")
    expect(bool(bench.backend.scheme) and bool(bench.backend.url), "scheme or url is empty")
    expect(bool(bench.backend.report().backend), "the report does not name the backend")


async def check_can_be_repeated(bench: Bench) -> None:
    await bench.backend.check(writing=True, need_bytes=PAGE)
    await bench.backend.check(writing=True)
    if bench.readable:
        await bench.backend.check(writing=False)
        expect(await bench.names() == [], "check left objects")


async def closing_twice(bench: Bench) -> None:
    await bench.write("object-1", data_of(1, PAGE))
    backend = await bench.open_backend(bench.context, bench.where)
    if bench.readable:
        await bench.read("object-1", PAGE, backend=backend)
    await backend.aclose()
    await backend.aclose()


async def bad_names_are_refused(bench: Bench) -> None:
    with await bench.ring.acquire() as lease:
        for name in BAD_NAMES:
            with raises(BadName, f"create({name!r})"):
                await bench.backend.create(name)
            with raises(BadName, f"put_atomic({name!r})"):
                await bench.backend.put_atomic(name, b"x")
            with raises(BadName, f"delete({name!r})"):
                await bench.backend.delete(name)
            with raises(BadName, f"child({name!r})"):
                bench.backend.child(name)
            if bench.readable:
                with raises(BadName, f"read_into({name!r})"):
                    await bench.backend.read_into(name, 0, 1, lease)
                with raises(BadName, f"read_bytes({name!r})"):
                    await bench.backend.read_bytes(name, limit=1)
                with raises(BadName, f"stat({name!r})"):
                    await bench.backend.stat(name)


async def ranged_reads(bench: Bench) -> None:
    data = data_of(1, 2 * SLOT + PAGE)
    await bench.write("object-1", data)
    chance = random.Random(2)
    ranges = [(0, 1), (len(data) - 1, 1), (len(data) - PAGE, PAGE), (PAGE, SLOT), (1, SLOT), (0, 0)]
    for _ in range(24):
        offset = chance.randrange(len(data))
        ranges.append((offset, chance.randint(1, min(SLOT, len(data) - offset))))
        offset -= offset % PAGE
        ranges.append((offset, chance.randint(1, min(SLOT, len(data) - offset))))
    found = await asyncio.gather(*(bench.read("object-1", nbytes, offset=start) for start, nbytes in ranges))
    for (start, nbytes), part in zip(ranges, found, strict=True):
        expect(part == data[start : start + nbytes], f"other bytes at {start}, {nbytes} long")


async def reads_into_part_of_a_lease(bench: Bench) -> None:
    """Memory at any address, and not a byte more than may be touched."""
    data = data_of(1, 4 * PAGE)
    await bench.write("object-1", data)
    with await bench.ring.acquire() as lease, memoryview(lease) as view:
        for start, nbytes in ((1, PAGE), (512, 3000), (PAGE, PAGE), (PAGE, 100)):
            view[: 4 * PAGE] = b"\xee" * (4 * PAGE)
            with lease.slice(start, nbytes) as part:
                await bench.backend.read_into("object-1", PAGE, nbytes, part)
            expect(bytes(view[start : start + nbytes]) == data[PAGE : PAGE + nbytes], "other bytes")
            expect(bytes(view[:start]) == b"\xee" * start, "written before the lease")
            expect(
                bytes(view[start + nbytes : 4 * PAGE]) == b"\xee" * (4 * PAGE - start - nbytes),
                "written past the lease",
            )


async def reads_past_the_end(bench: Bench) -> None:
    await bench.write("object-1", data_of(1, 2 * PAGE))
    with await bench.ring.acquire() as lease:
        for offset, nbytes in ((0, 2 * PAGE + 1), (PAGE, 2 * PAGE), (2 * PAGE, 1), (64 * PAGE, PAGE)):
            with raises(ObjectTruncated, f"{nbytes} bytes at {offset} of {2 * PAGE}"):
                await bench.backend.read_into("object-1", offset, nbytes, lease)


async def reads_through(bench: Bench) -> None:
    """Into a file and nowhere, where the backend can do that: the same bytes, their checksums, the same errors."""
    data = data_of(1, 2 * SLOT + PAGE)
    await bench.write("object-1", data)
    with tempfile.TemporaryFile() as file:
        for start, sizes in (
            (0, [len(data)]),
            (1, [SLOT, 1, SLOT - 7]),
            (PAGE, [0, 2 * PAGE]),
            (len(data) - 1, [1]),
        ):
            file.truncate(0)
            to = [
                Landing(nbytes, file.fileno(), 100 + sum(sizes[:i]) + i * PAGE, "a temporary file")
                for i, nbytes in enumerate(sizes)
            ]
            found = await bench.backend.read_through("object-1", start, to)
            if found is None:
                return
            parts = [data[start + sum(sizes[:i]) :][:nbytes] for i, nbytes in enumerate(sizes)]
            file.seek(0)
            expect(
                file.read() == bytes(100) + bytes(PAGE).join(parts),
                f"other bytes at {start}, {sizes} long",
            )
            wanted = [crc32c(part) for part in parts]
            expect(found == wanted, f"other checksums at {start}, {sizes} long")
            found = await bench.backend.read_through("object-1", start, [Landing(nbytes) for nbytes in sizes])
            expect(found == wanted, f"other checksums at {start}, {sizes} long, nowhere")
    with raises(ObjectTruncated, "read_through past the end"):
        await bench.backend.read_through("object-1", 2 * SLOT, [Landing(PAGE), Landing(SLOT)])
    with raises(ObjectNotFound, "read_through of nothing"):
        await bench.backend.read_through("nothing", 0, [Landing(PAGE)])


async def cancelled_reads(bench: Bench) -> None:
    data = data_of(1, SLOT)
    await bench.write("object-1", data)
    tasks = [asyncio.create_task(bench.read("object-1", SLOT)) for _ in range(8)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    for item in await asyncio.gather(*tasks, return_exceptions=True):
        expect(isinstance(item, asyncio.CancelledError) or item == data, f"a read ended with {item!r:.80}")
    expect(await bench.read("object-1", SLOT) == data, "other bytes after cancelled reads")


async def missing_objects(bench: Bench) -> None:
    with await bench.ring.acquire() as lease, raises(ObjectNotFound, "read_into of nothing"):
        await bench.backend.read_into("nothing", 0, PAGE, lease)
    with raises(ObjectNotFound, "read_bytes of nothing"):
        await bench.backend.read_bytes("nothing", limit=PAGE)
    with raises(ObjectNotFound, "stat of nothing"):
        await bench.backend.stat("nothing")


async def small_objects(bench: Bench) -> None:
    for body in (b"{}", b"", data_of(1, 100_001), data_of(2, 7)):
        await bench.backend.put_atomic("small", body)
        expect(await bench.backend.read_bytes("small", limit=200_000) == body, "other bytes")
        expect((await bench.backend.stat("small")).size == len(body), "another size")
        async with bench.another() as other:
            expect(
                await other.read_bytes("small", limit=200_000) == body, "another process reads other bytes"
            )
    expect(await bench.backend.read_bytes("small", limit=7) == data_of(2, 7), "limit is the size: refused")
    with raises(StorageError, "read_bytes of more than limit"):
        await bench.backend.read_bytes("small", limit=6)
    expect(await bench.names() == ["small"], "put_atomic left something beside it")
    expect(await bench.backend.pending() == [], "put_atomic left a temporary file")


async def small_objects_are_replaced_atomically(bench: Bench) -> None:
    if bench.backend.capabilities.put_atomic == "in-place":
        return  # says so itself
    versions = {bytes([65 + index]) * (1000 * index + 1) for index in range(8)}
    ordered = sorted(versions)
    await bench.backend.put_atomic("small", ordered[0])
    async with bench.another() as other, asyncio.TaskGroup() as group:
        reading = [
            group.create_task(other.read_bytes("small", limit=100_000)) for _ in range(4 * len(ordered))
        ]
        for body in ordered:
            group.create_task(bench.backend.put_atomic("small", body))
    for task in reading:
        expect(task.result() in versions, "a mixture of two versions was read")
    expect(await bench.backend.read_bytes("small", limit=100_000) in versions, "a mixture was left")
    await bench.backend.put_atomic("small", b"last")
    expect(await bench.backend.read_bytes("small", limit=10) == b"last", "an old version came back")


async def cancelled_puts(bench: Bench) -> None:
    """Whole or absent, and nothing beside it."""
    bodies = {f"small-{index}": data_of(index, 50_000) for index in range(6)}
    tasks = [asyncio.create_task(bench.backend.put_atomic(name, body)) for name, body in bodies.items()]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    present = await bench.names()
    expect(set(list(bodies)[1::2]) <= set(present) <= set(bodies), f"listed: {present}")
    for name in present:
        expect(await bench.backend.read_bytes(name, limit=50_000) == bodies[name], f"{name} is torn")
    expect(await bench.backend.pending() == [], "a cancelled put_atomic left a temporary file")


async def put_if_absent(bench: Bench) -> None:
    await bench.backend.put_atomic("small", b"first", if_absent=True)
    with raises(ObjectExists, "put_atomic(if_absent) over an object"):
        await bench.backend.put_atomic("small", b"second", if_absent=True, lane=1)
    expect(await bench.backend.read_bytes("small", limit=10) == b"first", "it was replaced all the same")
    await bench.backend.delete("small")
    await bench.backend.put_atomic("small", b"third", if_absent=True)
    expect(await bench.backend.pending() == [], "put_atomic left a temporary file")
    if bench.backend.capabilities.if_absent != "atomic":
        return
    bodies = [bytes([65 + index]) * 100 for index in range(8)]
    results = await asyncio.gather(
        *(bench.backend.put_atomic("raced", body, if_absent=True) for body in bodies), return_exceptions=True
    )
    winners = [body for body, result in zip(bodies, results, strict=True) if result is None]
    expect(len(winners) == 1, f"{len(winners)} of 8 writers believe that they were first")
    losers = [item for item in results if not isinstance(item, ObjectExists | None)]
    expect(not losers, f"a loser got {losers[:1]}")
    expect(
        await bench.backend.read_bytes("raced", limit=1000) == winners[0], "the winner's bytes are not there"
    )


async def listings(bench: Bench) -> None:
    expect(await bench.names() == [] and await bench.backend.children() == [], "the place is not empty")
    for name in ("b-2", "a", "b-1", "b-10", "Z", "b", "manifest.json"):
        await bench.backend.put_atomic(name, name.encode())
    await bench.write("data-0-0", data_of(1, PAGE))
    deeper = bench.backend.child("deeper")
    await deeper.check(writing=True)
    await deeper.put_atomic("b-3", b"x")
    everything = sorted(["b-2", "a", "b-1", "b-10", "Z", "b", "manifest.json", "data-0-0"])
    expect(await bench.names() == everything, f"listed: {await bench.names()}")
    expect(await bench.names("b") == ["b", "b-1", "b-10", "b-2"], f"with prefix: {await bench.names('b')}")
    expect(await bench.names("nothing") == [], "listed without a match")
    infos = {info.name: info async for info in bench.backend.list()}
    expect(infos["manifest.json"].size == 13, f"listed with size {infos['manifest.json'].size}")
    expect(infos["data-0-0"].size == PAGE, f"listed with size {infos['data-0-0'].size}")
    expect(infos["data-0-0"].modified > 1e9, "listed without a time")


async def children_are_apart(bench: Bench) -> None:
    one, two = bench.backend.child("one"), bench.backend.child("two")
    expect(one.url != two.url != bench.backend.url, "children have their parent's URL")
    for place, body in ((one, b"1"), (two, b"22"), (two.child("three"), b"333")):
        await place.check(writing=True)
        await place.put_atomic("manifest.json", body)
    await bench.write("data", data_of(1, PAGE), backend=one)
    await bench.write("data", data_of(2, PAGE), backend=two)
    expect(await one.read_bytes("manifest.json", limit=9) == b"1", "a child reads another's object")
    expect(await two.child("three").read_bytes("manifest.json", limit=9) == b"333", "a deeper child")
    expect(await bench.read("data", PAGE, backend=one) == data_of(1, PAGE), "a child reads another's data")
    expect(await bench.read("data", PAGE, backend=two) == data_of(2, PAGE), "a child reads another's data")
    expect(await bench.backend.children() == ["one", "two"], f"children: {await bench.backend.children()}")
    expect(await two.children() == ["three"], f"children of a child: {await two.children()}")
    expect(await bench.names() == [], "a child's objects are listed in its parent")
    await one.delete("manifest.json")
    await one.delete("data")
    await one.remove_if_empty()
    expect(await bench.backend.children() == ["two"], "an empty child is still listed")
    expect(await two.read_bytes("manifest.json", limit=9) == b"22", "deleting in one child hit another")


async def nested_names(bench: Bench) -> None:
    await bench.write("deep/data", data_of(1, PAGE))
    await bench.backend.put_atomic("deep/small", b"x")
    expect(await bench.read("deep/data", PAGE) == data_of(1, PAGE), "other bytes")
    expect(await bench.names(backend=bench.backend.child("deep")) == ["data", "small"], "not the child's")
    await bench.backend.delete("deep/data")
    await bench.backend.delete("deep/small")
    with raises(ObjectNotFound, "stat of a deleted object"):
        await bench.backend.stat("deep/data")


async def deleting(bench: Bench) -> None:
    await bench.write("object-1", data_of(1, PAGE))
    await bench.read("object-1", PAGE)
    await bench.backend.delete("object-1")
    await bench.backend.delete("object-1")
    await bench.backend.delete("never-there")
    await bench.backend.child("nowhere").delete("never-there")
    expect(await bench.names() == [], "a deleted object is listed")
    with await bench.ring.acquire() as lease, raises(ObjectNotFound, "read of a deleted object"):
        await bench.backend.read_into("object-1", 0, PAGE, lease)
    # The name can be used again, and nothing of the old object is left.
    await bench.write("object-1", data_of(2, 2 * PAGE))
    expect(await bench.read("object-1", 2 * PAGE) == data_of(2, 2 * PAGE), "the old object's bytes")


async def removing_the_place(bench: Bench) -> None:
    place = bench.backend.child("place")
    await place.check(writing=True)
    await place.put_atomic("manifest.json", b"x")
    await place.remove_if_empty()
    expect(await place.read_bytes("manifest.json", limit=1) == b"x", "a place with an object was removed")
    await place.delete("manifest.json")
    await place.remove_if_empty()
    await place.remove_if_empty()
    expect(await bench.backend.children() == [], "the empty place is still listed")
    await place.check(writing=True)
    await place.put_atomic("manifest.json", b"y")
    expect(await bench.backend.children() == ["place"], "a place that was made again is not listed")


async def leftovers(bench: Bench) -> None:
    """Whatever an open writer shows as pending can be discarded; nothing is pending when none is open."""
    expect(await bench.backend.pending() == [], "something is pending in an empty place")
    writer = await bench.backend.create("object-1")
    await bench.append(writer, data_of(1, SLOT))
    async with bench.another() as other:
        for upload in await other.pending():
            expect(upload.name == "object-1" and bool(upload.token), f"pending: {upload}")
            await other.discard(upload)
            await other.discard(upload)
        expect(await other.pending() == [], "a discarded upload is still pending")
    await writer.abort()
    expect(await bench.backend.pending() == [], "an abort left something")


WRITE_ONLY_CASES = [capabilities_make_sense, check_can_be_repeated, closing_twice, bad_names_are_refused]
CASES = [
    ranged_reads,
    reads_into_part_of_a_lease,
    reads_past_the_end,
    reads_through,
    cancelled_reads,
    missing_objects,
    small_objects,
    small_objects_are_replaced_atomically,
    cancelled_puts,
    put_if_absent,
    listings,
    children_are_apart,
    nested_names,
    deleting,
    removing_the_place,
    leftovers,
]
