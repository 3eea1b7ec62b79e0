"""Leases: counts, views, slices, foreign memory; what holds a slot and what lets it go."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import mmap
import pickle
import subprocess
import sys
import textwrap
import weakref
from array import array

import pytest

from ckptpipe.pyx import memory
from ckptpipe.pyx.staging import Lease, StagingRing, lease_buffer, lease_range, outstanding

SLOT = 8192


def taken(ring: StagingRing) -> Lease:
    lease = ring.try_acquire()
    assert lease is not None
    return lease


def test_slots_are_distinct_aligned_and_counted() -> None:
    ring = StagingRing(3, SLOT)
    assert (ring.slots, ring.slot_bytes, ring.nbytes) == (3, SLOT, 3 * SLOT)
    assert (ring.free, ring.in_use, ring.waiting) == (3, 0, 0)
    leases = [taken(ring) for _ in range(3)]
    assert sorted(lease.slot for lease in leases) == [0, 1, 2]
    for lease in leases:
        assert lease.address == ring.address + lease.slot * SLOT
        assert lease.address % 4096 == 0
        assert lease.nbytes == len(lease) == lease.footprint == SLOT
        memoryview(lease)[:] = bytes([lease.slot]) * SLOT
    assert ring.try_acquire() is None
    assert (ring.free, ring.in_use) == (0, 3)
    for lease in leases:
        assert bytes(lease) == bytes([lease.slot]) * SLOT
        lease.release()
    assert (ring.free, ring.in_use) == (3, 0)
    ring.close()


def test_the_last_slot_given_back_goes_out_first() -> None:
    ring = StagingRing(3, SLOT)
    first, second = taken(ring), taken(ring)
    slot = first.slot
    second.release()
    first.release()
    with taken(ring) as again:
        assert again.slot == slot
    ring.close()


def test_slots_are_touched_at_their_first_use_and_used_ones_go_out_first() -> None:
    touched: list[int] = []

    async def touch(lease: Lease) -> None:
        touched.append(lease.slot)
        await asyncio.sleep(0)

    async def main() -> None:
        ring = StagingRing(4, SLOT, toucher=touch)
        assert (ring.used_slots, ring.free) == (0, 4)
        first, second = await ring.acquire(), await ring.acquire()
        first.release()
        again = await ring.acquire()
        assert (again.slot, touched, ring.used_slots) == (0, [0, 1], 2)
        third = taken(ring)  # nothing is awaited there: its pages come as they are used
        assert (third.slot, touched, ring.used_slots) == (2, [0, 1], 3)
        cancelled = asyncio.ensure_future(ring.acquire())
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert (touched, ring.free) == ([0, 1, 3], 1)
        for lease in (second, again, third):
            lease.release()
        ring.close()

    asyncio.run(main())


def test_a_ring_whose_pages_come_with_their_use() -> None:
    """Its pages are those of a prefaulted one, and a slot that nobody used has none."""

    async def touch(lease: Lease) -> None:
        await asyncio.to_thread(memory.populate, lease)

    async def main() -> None:
        with (
            contextlib.closing(StagingRing(4, 4 << 20, toucher=touch)) as ring,
            contextlib.closing(StagingRing(4, 4 << 20)) as plain,
        ):
            assert memory.anonymous_huge_bytes(ring.address, ring.nbytes) == 0
            lease = await ring.acquire()
            assert (ring.page_size, ring.huge_pages) == (plain.page_size, plain.huge_pages)
            found = memory.anonymous_huge_bytes(ring.address, ring.nbytes)
            assert found in (0, lease.nbytes)  # 0: this machine has no huge pages
            lease.release()

    asyncio.run(main())


def test_a_slot_goes_back_when_the_last_share_or_slice_is_released() -> None:
    ring = StagingRing(1, SLOT)
    before = outstanding()
    lease = taken(ring)
    share = lease.share()
    part = share.slice(100, 50)
    inner = part.slice(10, 40)
    assert outstanding() == before + 4
    assert lease.holds == 4
    assert (part.address, part.nbytes, part.footprint, part.slot) == (lease.address + 100, 50, SLOT, 0)
    assert (inner.address, inner.nbytes) == (lease.address + 110, 40)
    memoryview(inner)[:] = b"x" * 40
    assert bytes(memoryview(lease)[109:151]) == b"\0" + b"x" * 40 + b"\0"
    for held in (lease, part, share):
        held.release()
        assert ring.free == 0
    inner.release()
    assert ring.free == 1
    assert outstanding() == before
    ring.close()


def test_a_view_holds_and_its_slices_do_too() -> None:
    ring = StagingRing(1, SLOT)
    lease = taken(ring)
    view = memoryview(lease)
    part = view[5:9]
    cast = part.cast("I")
    lease.release()
    assert ring.free == 0
    view.release()
    assert ring.free == 0
    part[:] = b"\1\2\3\4"
    del part
    assert cast[0] == int.from_bytes(b"\1\2\3\4", sys.byteorder)
    assert ring.try_acquire() is None
    cast.release()
    assert ring.free == 1
    ring.close()


def test_a_view_that_dies_while_an_exception_travels() -> None:
    ring = StagingRing(1, SLOT)
    lease = taken(ring)

    def fail() -> None:
        view = memoryview(lease)
        lease.release()
        array("b").frombytes(view[1:2])
        raise KeyError(len(view))

    with pytest.raises(KeyError):
        fail()
    gc.collect()
    assert ring.free == 1
    ring.close()


def test_released_leases_refuse_everything_but_questions() -> None:
    ring = StagingRing(2, SLOT)
    lease = taken(ring)
    other = lease.share()
    lease.release()
    assert lease.released
    assert not other.released
    with pytest.raises(RuntimeError, match="released already"):
        lease.release()
    with pytest.raises(RuntimeError, match="released"):
        lease.share()
    with pytest.raises(RuntimeError, match="released"):
        lease.slice(0, 1)
    with pytest.raises(BufferError, match="released"):
        memoryview(lease)
    with pytest.raises(RuntimeError, match="released"):
        lease.__enter__()
    assert lease.nbytes == SLOT
    assert "released" in repr(lease)
    other.release()
    assert ring.free == 2
    ring.close()


def test_with_releases_also_when_it_fails() -> None:
    ring = StagingRing(1, SLOT)
    with pytest.raises(ZeroDivisionError), taken(ring) as lease:
        _ = lease.nbytes // 0
    assert ring.free == 1
    ring.close()


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-1, 1), (0, -1), (0, SLOT + 1), (SLOT, 1), (SLOT + 1, 0), (1 << 62, 1 << 62)]
)
def test_slices_outside_the_range_are_refused(offset: int, nbytes: int) -> None:
    ring = StagingRing(1, SLOT)
    with taken(ring) as lease, pytest.raises(ValueError, match="outside a lease of 8192 bytes"):
        lease.slice(offset, nbytes)
    with taken(ring) as lease:
        lease.slice(SLOT, 0).release()
    ring.close()


def test_leases_are_not_made_by_hand() -> None:
    with pytest.raises(TypeError, match="comes from"):
        Lease()
    empty = Lease.__new__(Lease)
    assert (empty.released, empty.nbytes, empty.slot) == (True, 0, -1)
    with pytest.raises(BufferError, match="released"):
        memoryview(empty)


def test_nothing_here_is_copied_or_pickled() -> None:
    ring = StagingRing(1, SLOT)
    with taken(ring) as lease:
        for thing in (lease, ring):
            for function in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError):
                    function(thing)
    assert ring.free == 1
    ring.close()


def test_closing_is_refused_while_leases_are_out() -> None:
    ring = StagingRing(2, SLOT)
    lease = taken(ring)
    view = memoryview(lease)
    lease.release()
    with pytest.raises(RuntimeError, match="1 of 2 slots are leased"):
        ring.close()
    view.release()
    before = memory.live_mappings()
    ring.close()
    ring.close()
    assert memory.live_mappings() == before - 1
    assert ring.closed
    assert (ring.free, ring.in_use) == (0, 0)
    with pytest.raises(RuntimeError, match="closed"):
        ring.try_acquire()


def test_a_lease_keeps_a_dropped_ring_alive() -> None:
    before = memory.live_mappings()
    ring = StagingRing(1, SLOT)
    gone = weakref.ref(ring)
    lease = taken(ring)
    del ring
    memoryview(lease)[:3] = b"abc"
    assert gone() is not None
    assert memory.live_mappings() == before + 1
    lease.release()
    assert gone() is None
    assert memory.live_mappings() == before


@pytest.mark.parametrize(
    ("slots", "slot_bytes", "words"),
    [
        (0, SLOT, "at least one slot"),
        (1, 100, "multiple of 4096"),
        (1, 0, "multiple"),
        (1 << 50, SLOT, "address space"),
    ],
)
def test_impossible_rings(slots: int, slot_bytes: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StagingRing(slots, slot_bytes)


def test_a_ring_says_what_memory_it_got() -> None:
    ring = StagingRing(2, 2 << 20, prefault_threads=2)
    assert ring.huge_pages in ("thp", "off")
    assert ring.page_size in (4096, 16384, 65536, memory.transparent_page_size())
    assert (ring.why == "") == (ring.huge_pages == "thp")
    assert not ring.locked
    ring.close()
    locked = StagingRing(1, SLOT, huge_pages="off", lock=True)
    assert locked.locked
    assert locked.huge_pages == "off"
    locked.close()
    with pytest.raises(memory.MappingError, match="NUMA node 4711"):
        StagingRing(1, SLOT, numa_node=4711)


def test_a_collected_lease_is_counted_and_gives_its_slot_back() -> None:
    # In a process of its own: the count of leaks is what other tests are judged by.
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent("""
            import gc
            from ckptpipe.pyx.staging import StagingRing, leaked, outstanding
            ring = StagingRing(2, 4096)
            ring.try_acquire()
            assert (leaked(), outstanding(), ring.free) == (1, 0, 2)
            lease = ring.try_acquire()
            view = memoryview(lease)  # the view keeps the lease itself alive
            del lease
            assert (leaked(), ring.free) == (1, 1)
            del view
            assert (leaked(), outstanding(), ring.free) == (2, 0, 2)
            cycle = [ring.try_acquire()]
            cycle.append(cycle)
            del cycle
            gc.collect()
            assert (leaked(), outstanding(), ring.free) == (3, 0, 2)
            lease = ring.try_acquire()
            lease.release()
            del lease
            assert leaked() == 3
            ring.close()
            """),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_a_buffer_is_exported_until_the_last_hold_is_gone() -> None:
    data = bytearray(b"0123456789")
    calls: list[str] = []
    lease = lease_buffer(data, on_release=lambda: calls.append("released"))
    assert (lease.slot, lease.nbytes, lease.footprint, lease.readonly) == (-1, 10, 10, False)
    part = lease.slice(2, 3)
    assert part.footprint == 10
    memoryview(part)[:] = b"abc"
    lease.release()
    with pytest.raises(BufferError):
        data.append(1)
    assert calls == []
    view = memoryview(part)
    part.release()
    assert calls == []
    view.release()
    assert calls == ["released"]
    data.append(1)
    assert data == b"01abc56789\1"


def test_read_only_objects_give_read_only_leases() -> None:
    for thing in (b"abc", memoryview(bytearray(b"abc")).toreadonly()):
        with lease_buffer(thing) as lease:
            assert lease.readonly
            view = memoryview(lease)
            assert view.readonly
            assert bytes(view) == b"abc"
            with pytest.raises(TypeError):
                view[0] = 1
            with lease.slice(1, 1) as part:
                assert part.readonly
            view.release()


def test_any_contiguous_object_and_no_other() -> None:
    numbers = array("d", [1.5, 2.5])
    with lease_buffer(numbers) as lease:
        assert lease.nbytes == 16
        assert bytes(lease) == numbers.tobytes()
    with mmap.mmap(-1, 4096) as pages, lease_buffer(pages) as lease:
        memoryview(lease)[:2] = b"hi"
        assert pages[:2] == b"hi"
    with lease_buffer(b"") as lease:
        assert lease.nbytes == 0
    before = outstanding()
    with pytest.raises(BufferError):
        lease_buffer(memoryview(bytes(10))[::2])
    with pytest.raises(TypeError):
        lease_buffer("text")  # type: ignore[arg-type]
    assert outstanding() == before


def test_a_raw_range_keeps_its_owner() -> None:
    class Owner:
        pass

    mapping = memory.Mapping(4096)
    owner = Owner()
    gone = weakref.ref(owner)
    calls: list[int] = []
    lease = lease_range(mapping.address + 8, 16, owner, on_release=lambda: calls.append(1))
    del owner
    memoryview(lease)[:] = b"x" * 16
    assert bytes(memoryview(mapping)[6:26]) == b"\0\0" + b"x" * 16 + b"\0\0"
    assert gone() is not None
    assert (lease.slot, lease.footprint) == (-1, 16)
    lease.release()
    assert gone() is None
    assert calls == [1]
    with lease_range(mapping.address, 16, mapping, readonly=True) as lease:
        assert memoryview(lease).readonly
    mapping.close()


@pytest.mark.parametrize(
    ("address", "nbytes"), [(0, 1), (-1, 1), (4096, -1), ((1 << 64) - 1, 2), (1 << 65, 1)]
)
def test_ranges_that_are_none(address: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="no memory range"):
        lease_range(address, nbytes, None)


def test_what_on_release_raises_is_reported_and_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: seen.append(report.exc_value))

    def fail() -> None:
        raise ValueError("in a callback")

    data = bytearray(3)
    lease_buffer(data, on_release=fail).release()
    assert [str(error) for error in seen] == ["in a callback"]
    data.append(1)
