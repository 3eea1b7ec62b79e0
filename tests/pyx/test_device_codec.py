"""Device codec on the simulated GPU: right bytes in every form, FORMAT.md kept, bounds of memory, nothing left behind."""

from __future__ import annotations

import asyncio
import random

import crc32c as reference
import pytest

from ckptpipe.pyx import planes as cpu_planes
from ckptpipe.pyx.device_codec import EncodePlan, live_codecs
from ckptpipe.pyx.staging import StagingRing, lease_buffer, outstanding
from tests.pyx.codecs import (
    ANS,
    CHUNK,
    DEFLATE,
    check,
    codec_on,
    data_of,
    deflated_plane,
    encoded,
    inflated,
    settled,
)
from tests.pyx.gpu import MIB, Machine, machine, pattern
from tests.pyx.loops import LoopFactory, each_loop, run, until
from tests.pyx.test_cuda_queue import queue_threads

PLANS = [
    EncodePlan(DEFLATE, 0),
    EncodePlan(DEFLATE, 0, transform=1),
    EncodePlan(DEFLATE, 1, transform=2),
    EncodePlan(DEFLATE, 5, block_bytes=32768),
    EncodePlan(ANS),
    EncodePlan(ANS, ans_type=1),
    EncodePlan(ANS, ans_type=1, block_bytes=65536),
    EncodePlan(ANS, ans_type=2),
    EncodePlan(ANS, transform=1),
]
each_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "-".join(map(str, plan)))


@each_plan
def test_every_kind_of_data_comes_back_as_it_was(plan: EncodePlan) -> None:
    whole = [data_of(kind) for kind in ("bf16", "fp8", "fp32", "random", "zeros")]
    chunks = [*whole, *(data[: CHUNK - 3] for data in whole), whole[0][:70_001], b"x", whole[1][:5000]]

    async def main(gpus: Machine) -> None:
        coded = 0
        async with codec_on(gpus) as codec:
            with lease_buffer(bytearray(CHUNK)) as lease:
                for i, raw in enumerate(chunks):
                    address = gpus.allocate(0, bytes(16) + raw)
                    source = address + (16 if i % 2 else 14)  # from an even address that is no multiple of 16
                    raw = raw if i % 2 else bytes(2) + raw[:-2]
                    if len(raw) < 3:
                        raw, source = chunks[i], address + 16
                    stored, found = await encoded(codec, source, raw, plan)
                    if not found.planes:
                        continue
                    coded += 1
                    target = gpus.allocate(0, len(raw) + 32)
                    shift = (0, 1, 16)[i % 3]
                    with memoryview(lease) as view:
                        view[: len(stored)] = stored
                    crc = await codec.decode(
                        *(lease, len(stored), found.stored_crc32c, len(raw), found.transform, found.planes),
                        target + shift,
                    )
                    assert crc == reference.crc32c(raw)
                    assert gpus.read(0, target + shift, len(raw)) == raw
            assert codec.decoded_by == {"nvcomp-cuda": coded}
            assert coded >= 5

    with machine(gpus=1) as gpus:
        run(main(gpus))


def test_planes_are_those_of_the_cpu() -> None:
    raw = data_of("bf16")
    low, high = bytearray(CHUNK // 2), bytearray(CHUNK // 2)
    cpu_planes.split(raw, (low, high))

    async def main(gpus: Machine) -> None:
        async with codec_on(gpus) as codec:
            stored, found = await encoded(
                codec, gpus.allocate(0, raw), raw, EncodePlan(DEFLATE, 0, transform=1)
            )
        first, second = found.planes
        assert first == (0, 0, 0, CHUNK // 2, CHUNK // 2, ())  # noise: as it is
        assert stored[: CHUNK // 2] == low
        assert second[:4] == (DEFLATE, 0, 65536, CHUNK // 2)
        assert len(second[5]) == 2
        assert inflated(stored[CHUNK // 2 :], [second]) == high
        assert len(raw) / len(stored) > 1.45

    with machine(gpus=1) as gpus:
        run(main(gpus))


def test_a_plane_is_only_tried_where_its_sample_promises_a_gain() -> None:
    """Blocks of an incompressible plane never reach nvCOMP: half the work on bf16."""
    raw = data_of("bf16")

    async def main(gpus: Machine) -> None:
        async with codec_on(gpus) as codec:
            address = gpus.allocate(0, raw)
            noise = gpus.allocate(0, data_of("random"))
            for level, transform in ((0, 1), (1, 1), (0, 2)):
                plan = EncodePlan(DEFLATE, level, transform=transform)
                _, found = await encoded(codec, address, raw, plan)
                assert [plane[0] for plane in found.planes] == [0, DEFLATE] * transform
                _, found = await encoded(codec, noise, data_of("random"), plan)
                assert not found.planes

    with machine(gpus=1) as gpus:
        run(main(gpus))


def test_a_plane_that_does_not_shrink_after_all_is_stored_raw() -> None:
    """Its sample was poor: here, noise wherever the sample does not look."""
    nbytes = MIB
    raw = bytearray(pattern(nbytes, 5))
    room = nbytes - 1024
    for piece in range(256):
        at = room * piece // 255 & ~3
        raw[at : at + 1024] = bytes(1024)
    data = bytes(raw)

    async def main(gpus: Machine) -> None:
        async with codec_on(gpus, chunk_bytes=nbytes) as codec:
            address = gpus.allocate(0, data)
            _, found = await encoded(codec, address, data, EncodePlan(DEFLATE, 0))
            assert found.planes  # a quarter is zeros
            noise = bytearray(pattern(nbytes, 6))
            noise[: room // 255] = bytes(room // 255)
            shallow = bytes(noise)
            _, found = await encoded(codec, gpus.allocate(0, shallow), shallow, EncodePlan(ANS, ans_type=1))
            assert not found.planes

    with machine(gpus=1) as gpus:
        run(main(gpus))


@each_loop
@pytest.mark.parametrize("lanes", [1, 3])
def test_many_chunks_at_once_in_little_scratch(loop_factory: LoopFactory, lanes: int) -> None:
    """More than a batch, and more than the scratch holds side by side; each answer is its own chunk's."""
    kinds = ["bf16", "random", "zeros", "fp32", "fp8"]
    count = 80
    chunks = [data_of(kinds[i % 5], MIB // 8)[: 65536 + 16 * (i // 5)] for i in range(count)]

    async def main(gpus: Machine) -> None:
        async with codec_on(gpus, scratch_bytes=3 * MIB * lanes, lanes=lanes, chunk_bytes=MIB // 8) as codec:
            used = gpus.world.used(0)
            addresses = [gpus.allocate(0, raw) for raw in chunks]
            targets = [gpus.allocate(0, len(raw)) for raw in chunks]
            used_by_us = gpus.world.used(0) - used
            memory = [bytearray(MIB // 8) for _ in range(count)]
            leases = [lease_buffer(part) for part in memory]
            plan = EncodePlan(DEFLATE, 0, transform=1)
            found = await asyncio.gather(
                *(
                    codec.encode(lease, len(raw), address, plan)
                    for lease, raw, address in zip(leases, chunks, addresses, strict=True)
                )
            )
            for raw, part, each in zip(chunks, memory, found, strict=True):
                check(raw, bytes(part[: each.stored_bytes]), each)
            coded = [i for i in range(count) if found[i].planes]
            assert len(coded) >= 32  # bf16 and fp8
            sums = await asyncio.gather(
                *(
                    codec.decode(
                        *(leases[i], found[i].stored_bytes, found[i].stored_crc32c, len(chunks[i])),
                        *(found[i].transform, found[i].planes, targets[i]),
                    )
                    for i in coded
                )
            )
            assert sums == [found[i].raw_crc32c for i in coded]
            assert all(gpus.read(0, targets[i], len(chunks[i])) == chunks[i] for i in coded)
            assert gpus.world.used(0) - used == used_by_us  # nothing but the scratch
            assert [lease.holds for lease in leases] == [1] * count
            assert codec.encoded == sum(map(len, chunks))
            assert codec.fetched == sum(each.stored_bytes for each in found)
            for lease in leases:
                lease.release()

    with machine(gpus=1) as gpus:
        run(main(gpus), loop_factory)


def test_each_chunk_of_a_batch_is_judged_by_its_own_sample() -> None:
    kinds = ["zeros", "random", "bf16", "random", "zeros", "zeros", "bf16", "random", "bf16"]

    async def main(gpus: Machine) -> None:
        async with codec_on(gpus, lanes=1) as codec:
            leases = [lease_buffer(bytearray(CHUNK)) for _ in kinds]
            addresses = [gpus.allocate(0, data_of(kind)) for kind in kinds]
            plan = EncodePlan(DEFLATE, 0, transform=1)
            found = await asyncio.gather(
                *(
                    codec.encode(lease, CHUNK, address, plan)
                    for lease, address in zip(leases, addresses, strict=True)
                )
            )
            assert [each.zero for each in found] == [kind == "zeros" for kind in kinds]
            assert [bool(each.planes) for each in found] == [kind == "bf16" for kind in kinds]
            for lease in leases:
                lease.release()

    with machine(gpus=1) as gpus:
        run(main(gpus))


def test_only_stored_bytes_cross_the_link() -> None:
    raw = data_of("bf16")

    async def main(gpus: Machine) -> None:
        async with codec_on(gpus) as codec:
            address = gpus.allocate(0, raw)
            before = gpus.world.moved(0)[0]
            stored, _ = await encoded(codec, address, raw, EncodePlan(DEFLATE, 0, transform=1))
            assert gpus.world.moved(0)[0] - before < len(stored) + 16384  # and tables
            zeros = gpus.allocate(0, bytes(CHUNK))
            before = gpus.world.moved(0)[0]
            await encoded(codec, zeros, bytes(CHUNK), EncodePlan(DEFLATE, 0, transform=1))
            assert gpus.world.moved(0)[0] - before < 8192

    with machine(gpus=1) as gpus:
        run(main(gpus))


@pytest.mark.parametrize("block", [4096, 5000, 65536, 100_000, 200_001])
@pytest.mark.parametrize("shift", [0, 3])
def test_blocks_of_any_size_that_another_program_wrote(block: int, shift: int) -> None:
    raw = data_of("fp32")[:200_001]
    stored, plane = deflated_plane(raw, block)
    parts = [raw[p::4] for p in range(4)]
    split = [
        deflated_plane(part, block) if p != 1 else (part, (0, 0, 0, len(part), len(part), ()))
        for p, part in enumerate(parts)
    ]

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, len(raw) + 16) + shift
        async with codec_on(gpus) as codec:
            for transform, bytes_, planes in (
                (0, stored, [plane]),
                (2, b"".join(part for part, _ in split), [record for _, record in split]),
            ):
                with lease_buffer(bytearray(bytes_)) as lease:
                    crc = await codec.decode(
                        *(lease, len(bytes_), reference.crc32c(bytes_), len(raw), transform, planes), target
                    )
                assert crc == reference.crc32c(raw)
                assert gpus.read(0, target, len(raw)) == raw

    with machine(gpus=1) as gpus:
        run(main(gpus))


def test_a_chunk_of_one_raw_plane_is_copied() -> None:
    raw = pattern(10_001)

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, len(raw))
        async with codec_on(gpus) as codec:
            with lease_buffer(bytearray(raw)) as lease:
                crc = await codec.decode(
                    *(
                        lease,
                        len(raw),
                        reference.crc32c(raw),
                        len(raw),
                        0,
                        [(0, 0, 0, len(raw), len(raw), ())],
                    ),
                    target,
                )
            assert crc == reference.crc32c(raw)
            assert codec.decoded_by == {}
        assert gpus.read(0, target, len(raw)) == raw

    with machine(gpus=1) as gpus:
        run(main(gpus))


def test_a_given_stream_orders_chunks_behind_its_work() -> None:
    raw = data_of("bf16")

    async def main(gpus: Machine) -> None:
        driver = gpus.driver
        address = gpus.allocate(0, bytes(CHUNK))
        host = bytearray(raw)
        with gpus.current(0):
            error, stream = driver.cuStreamCreate(1)
            assert int(error) == 0
        async with codec_on(gpus, stream=int(stream)) as codec:
            with lease_buffer(host) as source:
                gpus.world.link(0, to_device=4 << 20)  # slow: the copy up is still under way
                with gpus.current(0):
                    driver.cuMemcpyHtoDAsync(address, source.address, CHUNK, stream)
                await encoded(codec, address, raw, EncodePlan(DEFLATE, 0, transform=1))
        with gpus.current(0):
            driver.cuStreamSynchronize(stream)
            driver.cuStreamDestroy(stream)

    with machine(gpus=1) as gpus:
        run(main(gpus))


def test_two_gpus_work_side_by_side() -> None:
    raw = data_of("fp8")

    async def main(gpus: Machine) -> None:
        plan = EncodePlan(ANS, ans_type=2)
        async with codec_on(gpus, 0) as first, codec_on(gpus, 1) as second:
            assert live_codecs() == 2
            addresses = [gpus.allocate(gpu, raw) for gpu in (0, 1)]
            with gpus.stalled(0):
                with lease_buffer(bytearray(CHUNK)) as lease:
                    stuck = first.encode(lease, CHUNK, addresses[0], plan)
                    await encoded(second, addresses[1], raw, plan)
                    assert not stuck.done()
                    gpus.world.link(0, to_host=0)
                    assert (await stuck).planes

    with machine() as gpus:
        run(main(gpus))


def test_everything_is_given_back() -> None:
    async def main(gpus: Machine) -> None:
        world = gpus.world
        used, holds = world.used(0), outstanding()
        await until(
            lambda: "ckpt-codec" not in queue_threads()
        )  # of another test; one that ended is seen for a while
        makers = ("cuStreamCreate", "cuStreamCreateWithPriority", "cuEventCreate", "cuMemHostAlloc")
        made = {name: world.calls(name) for name in makers}
        async with codec_on(gpus, scratch_bytes=32 * MIB, lanes=2) as codec:
            assert (codec.scratch_bytes, codec.lanes, live_codecs()) == (32 * MIB, 2, 1)
            assert world.used(0) - used == 32 * MIB
            assert queue_threads().count("ckpt-codec") == 2
            raw = data_of("bf16")
            await encoded(codec, gpus.allocate(0, raw), raw, EncodePlan(DEFLATE, 1))
        gpus.free(0)
        await codec.aclose()
        assert codec.closed
        assert repr(codec) == "<DeviceCodec closed>"
        assert (live_codecs(), outstanding(), world.used(0)) == (0, holds, used)
        await until(lambda: "ckpt-codec" not in queue_threads())
        streams, urgent, events, tables = (world.calls(name) - made[name] for name in makers)
        assert (urgent, tables) == (2, world.calls("cuMemFreeHost")) == (2, 2)
        assert streams + urgent == world.calls("cuStreamDestroy")
        assert events == world.calls("cuEventDestroy") > 0

    with machine(gpus=1) as gpus:
        run(main(gpus))


def test_slots_of_a_ring_are_filled_by_many_tasks() -> None:
    raw = data_of("bf16")
    count = 40

    async def main(gpus: Machine) -> None:
        address = gpus.allocate(0, raw)
        with gpus.pinned(6, CHUNK) as ring:
            async with codec_on(gpus) as codec:

                async def one(i: int) -> int:
                    nbytes = CHUNK - 2 * i
                    with await ring.acquire() as slot:
                        found = await codec.encode(slot, nbytes, address, EncodePlan(ANS, ans_type=1))
                        with memoryview(slot) as view:
                            check(raw[:nbytes], bytes(view[: found.stored_bytes]), found)
                        return found.stored_bytes

                sizes = await asyncio.gather(*(one(i) for i in range(count)))
                assert codec.inflight == codec.running == 0
                assert count / 6 <= codec.batches <= count
            assert max(sizes) < 0.7 * CHUNK
            assert ring.free == 6
        assert isinstance(ring, StagingRing)

    with machine(gpus=1) as gpus:
        run(main(gpus))


@pytest.mark.parametrize("links", [1, 2])
def test_what_a_lane_does_not_hold_is_left_to_the_others(links: int) -> None:
    nbytes, count = MIB, 40
    raw = data_of("bf16")

    async def main(gpus: Machine) -> None:
        address = gpus.allocate(0, raw * (nbytes // CHUNK))
        plan = EncodePlan(ANS, ans_type=1)
        options = {"scratch_bytes": 24 * MIB, "chunk_bytes": nbytes, "lanes": 2, "links": links}
        async with codec_on(gpus, **options) as codec:
            assert codec.links == links
            await codec.prepare(plan)
            with gpus.pinned(count, nbytes) as ring:
                leases = [await ring.acquire() for _ in range(count)]
                found = await settled([codec.encode(lease, nbytes, address, plan) for lease in leases])
                for lease, each in zip(leases, found, strict=True):
                    with memoryview(lease) as view:
                        check(raw * (nbytes // CHUNK), bytes(view[: each.stored_bytes]), each)
                    assert lease.holds == 1
                    lease.release()
            assert count / 8 <= codec.batches <= count
            assert codec.inflight == codec.running == 0

    with machine(gpus=1) as gpus:
        run(main(gpus))


def test_forms_are_kept_apart_when_plans_alternate() -> None:
    chance = random.Random(8)
    plans = [chance.choice(PLANS) for _ in range(30)]
    raw = data_of("bf16")

    async def main(gpus: Machine) -> None:
        address = gpus.allocate(0, raw)
        async with codec_on(gpus) as codec:
            memory = [bytearray(CHUNK) for _ in plans]
            leases = [lease_buffer(part) for part in memory]
            found = await settled(
                [codec.encode(leases[i], CHUNK, address, plan) for i, plan in enumerate(plans)]
            )
            for part, each, plan in zip(memory, found, plans, strict=True):
                check(raw, bytes(part[: each.stored_bytes]), each)
                assert {plane[0] for plane in each.planes} <= {0, plan.codec_id}
            for lease in leases:
                lease.release()

    with machine(gpus=1) as gpus:
        run(main(gpus))
