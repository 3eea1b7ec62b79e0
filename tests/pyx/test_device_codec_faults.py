"""Device codec when bytes are bad, plans cannot be, the driver refuses, or memory is short."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import crc32c as reference
import pytest

from ckptpipe.pyx import cuda, nvcomp
from ckptpipe.pyx.codec_errors import (
    DecodeError,
    DecoderUnavailableError,
    ScratchTooSmallError,
    StoredMismatch,
)
from ckptpipe.pyx.device_codec import DeviceCodec, EncodePlan, live_codecs
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.pyx.staging import lease_buffer, outstanding
from tests.pyx.codecs import (
    ANS,
    CHUNK,
    DEFLATE,
    codec_on,
    data_of,
    deflated,
    deflated_plane,
    encoded,
    settled,
)
from tests.pyx.gpu import MIB, Machine, machine, pattern
from tests.pyx.loops import run
from tests.pyx.test_cuda_queue import queue_threads

PLAN = EncodePlan(DEFLATE, 0, transform=1)


def test_no_decoder_sees_bytes_with_another_checksum() -> None:
    raw = data_of("bf16")

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, b"\xaa" * CHUNK)
        async with codec_on(gpus) as codec:
            stored, found = await encoded(codec, gpus.allocate(0, raw), raw, PLAN)
            bad = bytearray(stored)
            bad[len(bad) // 2] ^= 1
            started = gpus.world.calls("cuMemBatchDecompressAsync")
            with lease_buffer(bytearray(stored)) as good_lease, lease_buffer(bad) as bad_lease:
                answers = await settled(
                    [
                        codec.decode(
                            *(lease, len(stored), found.stored_crc32c, CHUNK, found.transform, found.planes),
                            target,
                        )
                        for lease in (bad_lease, bad_lease)
                    ]
                )
                assert [type(answer) for answer in answers] == [StoredMismatch] * 2
                assert answers[0].found == reference.crc32c(bytes(bad))
                assert answers[0].expected == found.stored_crc32c
                assert gpus.read(0, target, CHUNK) == b"\xaa" * CHUNK
                assert gpus.world.calls("cuMemBatchDecompressAsync") == started
                # in one batch with good ones, it fails alone
                answers = await settled(
                    [
                        codec.decode(
                            *(lease, len(stored), found.stored_crc32c, CHUNK, found.transform, found.planes),
                            target,
                        )
                        for lease in (good_lease, bad_lease, good_lease)
                    ]
                )
                assert answers[0] == answers[2] == found.raw_crc32c
                assert isinstance(answers[1], StoredMismatch)
                assert (good_lease.holds, bad_lease.holds) == (1, 1)
            assert gpus.read(0, target, CHUNK) == raw

    for engine in ((0, 0), (1, 4 << 20)):
        with machine(gpus=1, decompression=engine) as gpus:
            run(main(gpus))


@pytest.mark.parametrize("engine", [(0, 0), (1, 4 << 20)])
def test_a_block_that_decodes_to_another_length_is_told(engine: tuple[int, int]) -> None:
    """Its checksum is right: the image was written wrong. Other chunks of the batch are not concerned."""
    raw = data_of("fp8")[:131072]
    good, plane = deflated_plane(raw, 65536)
    short = deflated(raw[:65536]) + deflated(raw[65536:-7])
    long = deflated(raw[:65536] + b"more") + deflated(raw[65536:])
    junk = b"\xff" * 500 + deflated(raw[65536:])

    def planes(stored: bytes, first: int) -> list[Any]:
        return [plane._replace(stored_bytes=len(stored), block_lengths=(first, len(stored) - first))]

    cases = [(short, planes(short, plane.block_lengths[0]), 1)]
    if not engine[0]:  # what an engine does with these is not defined
        cases.append((long, planes(long, len(deflated(raw[:65536] + b"more"))), 0))
        cases.append((junk, planes(junk, 500), 0))

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, 4 * len(raw))
        async with codec_on(gpus) as codec:
            leases = [lease_buffer(bytearray(stored)) for stored, _, _ in cases]
            last = lease_buffer(bytearray(good))
            futures = [
                codec.decode(
                    lease, len(stored), reference.crc32c(stored), len(raw), 0, records, target + i * len(raw)
                )
                for i, (lease, (stored, records, _)) in enumerate(zip(leases, cases, strict=True))
            ]
            futures.append(
                codec.decode(
                    last, len(good), reference.crc32c(good), len(raw), 0, [plane], target + 3 * len(raw)
                )
            )
            *answers, crc = await settled(futures)
            for answer, (_, _, block) in zip(answers, cases, strict=True):
                assert isinstance(answer, DecodeError), answer
                assert (answer.plane, answer.block) == (0, block)
                assert f"block {block} of plane 0 does not decode (deflate" in str(answer)
            assert "65529 bytes instead of 65536" in str(answers[0])
            assert crc == reference.crc32c(raw)
            assert sum(codec.decoded_by.values()) == 1
            for lease in (*leases, last):
                lease.release()

    with machine(gpus=1, decompression=engine) as gpus:
        run(main(gpus))


def test_planes_that_cannot_be_are_refused_before_any_work() -> None:
    raw = data_of("fp8")[:100_000]
    stored, plane = deflated_plane(raw, 65536)
    first, second = plane.block_lengths
    wrong: list[tuple[int, list[Any]]] = [
        (0, []),
        (1, [plane]),
        (3, [plane]),
        (0, [plane._replace(raw_bytes=99_999)]),
        (0, [plane._replace(block_lengths=(first, second, 1))]),
        (0, [plane._replace(block_lengths=(first,))]),
        (0, [plane._replace(block_lengths=(first + 1, second))]),
        (0, [plane._replace(block_lengths=(first + second, 0))]),
        (0, [plane._replace(block_bytes=4095)]),
        (0, [plane._replace(block_bytes=100_001)]),
        (0, [plane._replace(codec=8)]),
        (0, [plane._replace(codec=-1)]),
        (0, [plane._replace(codec=0)]),
        (0, [plane._replace(stored_bytes=plane.stored_bytes - 1, block_lengths=(first, second - 1))]),
        (0, [plane._replace(stored_bytes=1 << 31, block_lengths=(first, (1 << 31) - first))]),
    ]

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, len(raw))
        async with codec_on(gpus) as codec:
            with lease_buffer(bytearray(stored)) as lease:
                for transform, planes in wrong:
                    with pytest.raises(ValueError, match=r"plane|planes|stored"):
                        codec.decode(lease, len(stored), 0, len(raw), transform, planes, target)
                for nbytes, raw_bytes, address in (
                    (0, len(raw), target),
                    (len(stored), len(stored) - 1, target),
                    (len(stored), CHUNK + 1, target),
                    (len(stored), len(raw), 0),
                    (len(stored), len(raw), (1 << 64) - 5),
                ):
                    with pytest.raises(ValueError, match=r"stored bytes|a chunk has|no device memory"):
                        codec.decode(lease, nbytes, 0, raw_bytes, 0, [plane], address)
                with pytest.raises(ValueError, match="lease"), lease.slice(0, 100) as part:
                    codec.decode(part, len(stored), 0, len(raw), 0, [plane], target)
                assert lease.holds == 1
                assert codec.inflight == 0

    with machine(gpus=1) as gpus:
        run(main(gpus))


def test_plans_that_cannot_be() -> None:
    async def main(gpus: Machine) -> None:
        address = gpus.allocate(0, CHUNK)
        async with codec_on(gpus) as codec:
            with lease_buffer(bytearray(CHUNK)) as lease:
                for plan, why in (
                    (EncodePlan(0), "codec 0"),
                    (EncodePlan(1), "codec 1 is none that a GPU writes"),
                    (EncodePlan(9), "codec 9"),
                    (EncodePlan(DEFLATE, 6), "deflate has no level 6"),
                    (EncodePlan(DEFLATE, -1), "deflate has no level -1"),
                    (EncodePlan(DEFLATE, transform=3), "transform"),
                    (EncodePlan(ANS, ans_type=3), "ans_type"),
                    (EncodePlan(DEFLATE, block_bytes=65552), "4096 to 65536"),
                    (EncodePlan(DEFLATE, block_bytes=4100), "a multiple of 16"),
                    (EncodePlan(DEFLATE, block_bytes=2048), "4096 to 65536"),
                ):
                    with pytest.raises(ValueError, match=why):
                        codec.encode(lease, CHUNK, address, plan)
                    with pytest.raises(ValueError, match=why):
                        await codec.prepare(plan)
                with pytest.raises(ValueError, match="1 to 262144"):
                    codec.encode(lease, CHUNK + 1, address, PLAN)
                with pytest.raises(ValueError, match="no device memory"):
                    codec.encode(lease, CHUNK, 0, PLAN)
                with pytest.raises(ValueError, match="lease"), lease.slice(0, 100) as part:
                    codec.encode(part, CHUNK, address, PLAN)
                assert lease.holds == 1
            await codec.prepare(PLAN)

    with machine(gpus=1) as gpus:
        run(main(gpus))


BOTH_CALLS = ["cuLaunchKernel", "cuMemsetD8Async", "cuEventRecord", "cuEventSynchronize"]
ENCODE_CALLS = [*BOTH_CALLS, "cuMemcpyDtoHAsync", "cuStreamWaitEvent"]
DECODE_CALLS = [*BOTH_CALLS, "cuMemcpyHtoDAsync", "cuMemBatchDecompressAsync"]


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
@pytest.mark.parametrize("call", ENCODE_CALLS)
def test_each_step_of_an_encoding_can_fail(call: str, nth: int) -> None:
    raw = data_of("bf16")

    async def main(gpus: Machine) -> None:
        address = gpus.allocate(0, raw)
        async with codec_on(gpus) as codec:
            await encoded(codec, address, raw, PLAN)
            with lease_buffer(bytearray(CHUNK)) as lease:
                fault = gpus.world.fault(call, nth=nth, error="CUDA_ERROR_ILLEGAL_ADDRESS", times=1)
                (answer,) = await settled([codec.encode(lease, CHUNK, address, PLAN)])
                assert lease.holds == 1
                if fault.fired:
                    assert isinstance(answer, cuda.CudaError), answer
                    assert (answer.code, answer.call) == (700, call)
                    assert f"{CHUNK} bytes of GPU 0 at {address:#x}" in str(answer)
            fault.cancel()
            await encoded(codec, address, raw, PLAN)  # the codec goes on

    with machine(gpus=1) as gpus:
        run(main(gpus))


@pytest.mark.parametrize("engine", [(0, 0), (1, 4 << 20)])
@pytest.mark.parametrize("call", DECODE_CALLS)
def test_each_step_of_a_decoding_can_fail(call: str, engine: tuple[int, int]) -> None:
    raw = data_of("bf16")

    async def main(gpus: Machine) -> None:
        async with codec_on(gpus) as codec:
            stored, found = await encoded(codec, gpus.allocate(0, raw), raw, PLAN)
            target = gpus.allocate(0, CHUNK)
            with lease_buffer(bytearray(stored)) as lease:
                arguments = (lease, len(stored), found.stored_crc32c, CHUNK, 1, found.planes, target)
                fault = gpus.world.fault(call, error="CUDA_ERROR_LAUNCH_FAILED")
                (answer,) = await settled([codec.decode(*arguments)])
                assert lease.holds == 1
                if call == "cuMemBatchDecompressAsync" and not engine[0]:
                    assert answer == found.raw_crc32c
                    assert not fault.fired
                    return
                assert isinstance(answer, cuda.CudaError), answer
                assert (answer.code, answer.call) == (719, call)
                assert await codec.decode(*arguments) == found.raw_crc32c
                assert gpus.read(0, target, CHUNK) == raw

    with machine(gpus=1, decompression=engine) as gpus:
        run(main(gpus))


def test_a_lost_context_fails_all_and_can_be_closed() -> None:
    raw = data_of("bf16")

    async def main(gpus: Machine) -> None:
        address = gpus.allocate(0, raw)
        async with codec_on(gpus) as codec:
            leases = [lease_buffer(bytearray(CHUNK)) for _ in range(12)]
            gpus.world.fault("cuLaunchKernel", nth=2, error="CUDA_ERROR_ILLEGAL_ADDRESS", scope="context")
            answers = await settled([codec.encode(lease, CHUNK, address, PLAN) for lease in leases])
            assert all(isinstance(answer, cuda.CudaError) and answer.code == 700 for answer in answers)
            assert "the context is lost" in answers[0].cure
            assert [lease.holds for lease in leases] == [1] * 12
            for lease in leases:
                lease.release()

    holds = outstanding()
    with machine(gpus=1) as gpus:
        run(main(gpus))
        assert (live_codecs(), outstanding()) == (0, holds)
        gpus.contexts.clear()  # lost: nothing of it can be given back
        gpus._allocated.clear()
        gpus.close = lambda: None  # type: ignore[method-assign]


def test_out_of_device_memory_names_the_cure() -> None:
    async def main(gpus: Machine) -> None:
        used, threads = gpus.world.used(0), queue_threads()
        with pytest.raises(cuda.CudaError, match=r"64 MiB of scratch memory.*--gpu-scratch") as caught:
            gpus.world.fault("cuMemAlloc", error="CUDA_ERROR_OUT_OF_MEMORY")
            async with codec_on(gpus):
                raise AssertionError
        assert caught.value.code == 2
        assert (live_codecs(), gpus.world.used(0), queue_threads()) == (0, used, threads)

    with machine(gpus=1) as gpus:
        run(main(gpus))


@pytest.mark.parametrize(
    "call", ["cuStreamCreate", "cuEventCreate", "cuMemHostAlloc", "cuModuleLoadData", "cuCtxPushCurrent"]
)
def test_what_was_made_goes_back_when_opening_fails(call: str) -> None:
    async def main(gpus: Machine) -> None:
        used, threads = gpus.world.used(0), queue_threads()
        gpus.world.fault(call, nth=1, error="CUDA_ERROR_UNKNOWN")
        with pytest.raises(cuda.CudaError, match=call):
            async with codec_on(gpus):
                raise AssertionError
        assert (live_codecs(), gpus.world.used(0), queue_threads()) == (0, used, threads)
        async with codec_on(gpus):
            pass

    with machine(gpus=1) as gpus:
        run(main(gpus))


@pytest.mark.parametrize("plan", [PLAN, EncodePlan(DEFLATE, 5), EncodePlan(ANS)])
def test_scratch_that_holds_no_chunk_names_the_least_that_does(plan: EncodePlan) -> None:
    nbytes = 4 * MIB
    raw = data_of("bf16", MIB) * 4

    async def main(gpus: Machine) -> None:
        address = gpus.allocate(0, raw)
        async with codec_on(gpus, scratch_bytes=4 * MIB, chunk_bytes=nbytes) as codec:
            assert codec.lanes == 1
            with lease_buffer(bytearray(nbytes)) as lease:
                with pytest.raises(
                    ScratchTooSmallError, match=r"allow at least \d+ MiB \(--gpu-scratch"
                ) as caught:
                    codec.encode(lease, nbytes, address, plan)
                with pytest.raises(ScratchTooSmallError):
                    await codec.prepare(plan)
                assert lease.holds == 1
        least = caught.value.needed_bytes
        assert 4 * MIB < least < 30 * MIB
        async with codec_on(gpus, scratch_bytes=least, chunk_bytes=nbytes, lanes=1) as codec:
            await encoded(codec, address, raw, plan)

    with machine(gpus=1) as gpus:
        run(main(gpus))


def test_a_chunk_that_does_not_fit_to_be_decoded_fails_alone() -> None:
    raw = data_of("bf16", MIB) * 4
    stored, plane = deflated_plane(raw, 65536)
    small, small_plane = deflated_plane(raw[:50_000], 65536)

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, len(raw))
        async with codec_on(gpus, scratch_bytes=3 * MIB, chunk_bytes=4 * MIB) as codec:
            with lease_buffer(bytearray(stored)) as lease, lease_buffer(bytearray(small)) as other:
                answers = await settled(
                    [
                        codec.decode(
                            lease, len(stored), reference.crc32c(stored), len(raw), 0, [plane], target
                        ),
                        codec.decode(
                            *(other, len(small), reference.crc32c(small), 50_000, 0, [small_plane]), target
                        ),
                    ]
                )
            assert isinstance(answers[0], ScratchTooSmallError)
            assert answers[1] == reference.crc32c(raw[:50_000])

    with machine(gpus=1) as gpus:
        run(main(gpus))


def test_wrong_use_is_told() -> None:
    async def main(gpus: Machine) -> None:
        good: dict[str, Any] = {"scratch_bytes": 32 * MIB, "nvcomp": nvcomp.load(), "chunk_bytes": CHUNK}
        for changed, why in (
            ({"chunk_bytes": 100}, "chunk_bytes is 4096"),
            ({"chunk_bytes": 65 * MIB}, "chunk_bytes is 4096"),
            ({"scratch_bytes": 1000}, "at least 1 MiB"),
            ({"lanes": 9}, "lanes is 0"),
            ({"links": 3}, "links is 0"),
            ({"decoder": "gpu"}, "decoder is auto"),
        ):
            with pytest.raises(ValueError, match=why):
                await DeviceCodec.create(0, gpus.context(0), **(good | changed))
        with pytest.raises(ValueError, match="context"):
            await DeviceCodec.create(0, 0, **good)
        with pytest.raises(TypeError, match="create"):
            DeviceCodec()
        async with codec_on(gpus) as codec:
            with lease_buffer(bytearray(CHUNK)) as lease:

                def elsewhere() -> None:
                    with pytest.raises(CkptpipeError, match="another thread"):
                        codec.encode(lease, CHUNK, 4096, PLAN)

                await asyncio.to_thread(elsewhere)

    with machine(gpus=1) as gpus:
        run(main(gpus))


def test_errors_can_be_pickled() -> None:
    errors = [
        StoredMismatch(1, 2),
        DecodeError("words", 1, 2),
        ScratchTooSmallError(1 << 20, 5 << 20),
        DecoderUnavailableError("words", cure="cure"),
    ]
    for error in errors:
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert error.message == again.message
    assert "at least 5 MiB (--gpu-scratch 5MiB)" in str(errors[2])
    assert DecoderUnavailableError.exit_code == 2


def test_raw_bytes_reach_the_lease_of_a_chunk_that_does_not_shrink() -> None:
    raw = pattern(CHUNK, 9)

    async def main(gpus: Machine) -> None:
        address = gpus.allocate(0, raw)
        async with codec_on(gpus) as codec:
            gpus.world.fault("cuMemcpyDtoHAsync", nth=1, error="CUDA_ERROR_ILLEGAL_ADDRESS")
            with lease_buffer(bytearray(CHUNK)) as lease:
                (answer,) = await settled([codec.encode(lease, CHUNK, address, PLAN)])
                assert isinstance(answer, cuda.CudaError)
                assert lease.holds == 1
                found = await codec.encode(lease, CHUNK, address, PLAN)
                assert (found.planes, found.stored_crc32c) == ((), reference.crc32c(raw))
                assert memoryview(lease) == raw

    with machine(gpus=1) as gpus:
        run(main(gpus))
