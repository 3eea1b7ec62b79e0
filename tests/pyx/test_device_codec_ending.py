"""Device codec when tasks are cancelled, when it is closed in the middle of its work, and when it is thrown away."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from ckptpipe.pyx import nvcomp
from ckptpipe.pyx.device_codec import DeviceCodec, EncodePlan, live_codecs
from ckptpipe.pyx.staging import lease_buffer
from tests.pyx.codecs import (
    CHUNK,
    DEFLATE,
    codec_on,
    data_of,
)
from tests.pyx.gpu import MIB, Machine, machine
from tests.pyx.loops import run, turns, until
from tests.pyx.test_cuda_queue import queue_threads

PLAN = EncodePlan(DEFLATE, 0, transform=1)


def test_what_was_cancelled_before_it_began_never_does() -> None:
    raw = data_of("bf16")

    async def main(gpus: Machine) -> None:
        address = gpus.allocate(0, raw)
        with gpus.pinned(4, CHUNK) as ring:
            async with codec_on(gpus, lanes=1) as codec:
                leases = [await ring.acquire() for _ in range(4)]
                with gpus.stalled(0):
                    first = codec.encode(leases[0], CHUNK, address, PLAN)
                    await until(lambda: codec.running == 1)
                    rest = [codec.encode(lease, CHUNK, address, PLAN) for lease in leases[1:]]
                    rest[0].cancel()
                    first.cancel()
                    await turns(5)
                    assert [lease.holds for lease in leases] == [
                        2
                    ] * 4  # the GPU may still write to the first
                    moved = gpus.world.moved(0)[0]
                assert all(found.planes for found in await asyncio.gather(*rest[1:]))
                await codec.drain()
                assert [lease.holds for lease in leases] == [1] * 4
                assert codec.encoded == 2 * CHUNK
                assert gpus.world.moved(0)[0] - moved < 2.5 * CHUNK
                assert bytes(memoryview(leases[1])[:4096]) == bytes(4096)
                for lease in leases:
                    lease.release()

    with machine(gpus=1) as gpus:
        run(main(gpus))


def test_closing_waits_for_what_is_under_way_also_when_cancelled() -> None:
    raw = data_of("bf16")

    async def main(gpus: Machine) -> None:
        address = gpus.allocate(0, raw)
        with gpus.pinned(3, CHUNK) as ring:
            codec = await DeviceCodec.create(
                0, gpus.context(0), scratch_bytes=32 * MIB, nvcomp=nvcomp.load(), chunk_bytes=CHUNK
            )
            leases = [await ring.acquire() for _ in range(3)]
            with gpus.stalled(0):
                futures = [codec.encode(lease, CHUNK, address, PLAN) for lease in leases]
                closing = asyncio.create_task(codec.aclose())
                await turns()
                with pytest.raises(RuntimeError, match="closed"):
                    codec.encode(leases[0], CHUNK, address, PLAN)
                closing.cancel()
                await turns(5)
                assert not closing.done()
                assert live_codecs() == 1
            with pytest.raises(asyncio.CancelledError):
                await closing
            assert all(future.result().planes for future in futures)
            assert live_codecs() == 0
            with pytest.raises(RuntimeError, match="closed"):
                await codec.prepare(PLAN)
            for lease in leases:
                lease.release()

    with machine(gpus=1) as gpus:
        run(main(gpus))


def test_creation_that_is_cancelled_leaves_nothing() -> None:
    async def main(gpus: Machine) -> None:
        used, threads = gpus.world.used(0), queue_threads()
        held = gpus.world.fault("cuMemAlloc", hold=True)
        options: dict[str, Any] = {"scratch_bytes": 32 * MIB, "nvcomp": nvcomp.load(), "chunk_bytes": CHUNK}
        task = asyncio.create_task(DeviceCodec.create(0, gpus.context(0), **options))
        await until(lambda: held.fired > 0)
        task.cancel()
        await turns(5)
        assert not task.done()
        held.release()
        with pytest.raises(asyncio.CancelledError):
            await task
        gc.collect()
        assert (live_codecs(), gpus.world.used(0), queue_threads()) == (0, used, threads)

    with machine(gpus=1) as gpus:
        run(main(gpus))


def test_a_codec_that_is_thrown_away_is_told_and_ended() -> None:
    async def main(gpus: Machine) -> None:
        raw = data_of("bf16")
        address = gpus.allocate(0, raw)
        codec = await DeviceCodec.create(
            0, gpus.context(0), scratch_bytes=32 * MIB, nvcomp=nvcomp.load(), chunk_bytes=CHUNK
        )
        with lease_buffer(bytearray(CHUNK)) as lease:
            await codec.encode(lease, CHUNK, address, PLAN)
        asyncio.get_running_loop().call_later(0, lambda: None)
        kept.append(codec)

    kept: list[DeviceCodec] = []
    with machine(gpus=1) as gpus:
        run(main(gpus))
        assert live_codecs() == 1
        with pytest.warns(ResourceWarning, match="a DeviceCodec of GPU 0 was not closed"):
            kept.clear()
            gc.collect()
        assert live_codecs() == 0
