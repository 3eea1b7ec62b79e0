"""Who decodes: the decompression engine where it can, nvCOMP for the rest, and nobody else than the one that was forced."""

from __future__ import annotations

import re
from typing import Any

import crc32c as reference
import pytest

from ckptpipe.pyx.codec_errors import DecoderUnavailableError
from ckptpipe.pyx.device_codec import DeviceCodec, EncodePlan, live_codecs
from ckptpipe.pyx.staging import lease_buffer
from tests.pyx.codecs import (
    ANS,
    CHUNK,
    DEFLATE,
    LZ4,
    SNAPPY,
    codec_on,
    data_of,
    deflated_plane,
    encoded,
)
from tests.pyx.gpu import MIB, Machine, done, machine
from tests.pyx.loops import run

ENGINE, NVCOMP = "decompression-engine", "nvcomp-cuda"
LENGTH = 4 << 20


async def decode(
    codec: DeviceCodec, stored: bytes, planes: Any, transform: int, nbytes: int, target: int
) -> int:
    with lease_buffer(bytearray(stored)) as lease:
        return await codec.decode(
            lease, len(stored), reference.crc32c(stored), nbytes, transform, planes, target
        )


def test_the_engine_decodes_deflate_and_nvcomp_the_rest() -> None:
    raw = data_of("bf16")

    async def main(gpus: Machine) -> None:
        async with codec_on(gpus) as codec:
            assert (codec.decoder, codec.backend, codec.why, codec.simulated) == (ENGINE, NVCOMP, "", True)
            assert codec.decodes == (1, 2, 3, 4, 5, 6, 7)
            source, target = gpus.allocate(0, raw), gpus.allocate(0, CHUNK)
            for plan, by in (
                (EncodePlan(DEFLATE, 0, transform=1), {ENGINE: 1}),
                (EncodePlan(DEFLATE, 1), {ENGINE: 2}),
                (EncodePlan(ANS, ans_type=1), {ENGINE: 2, NVCOMP: 1}),
            ):
                stored, found = await encoded(codec, source, raw, plan)
                crc = await decode(codec, stored, found.planes, found.transform, CHUNK, target)
                assert crc == found.raw_crc32c
                assert gpus.read(0, target, CHUNK) == raw
                assert codec.decoded_by == by
            assert gpus.world.calls("cuMemBatchDecompressAsync") == 2

    with machine(gpus=1, decompression=(1, LENGTH)) as gpus:
        run(main(gpus))


def test_what_the_engine_cannot_take_goes_to_nvcomp_unless_it_is_forced() -> None:
    """Blocks longer than it takes: the whole plane does."""
    raw = data_of("fp8")
    short, short_plane = deflated_plane(raw, 32768)
    long, long_plane = deflated_plane(raw, 40000)

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, CHUNK)
        async with codec_on(gpus) as codec:
            assert await decode(codec, short, [short_plane], 0, CHUNK, target) == reference.crc32c(raw)
            assert codec.decoded_by == {ENGINE: 1}
            assert await decode(codec, long, [long_plane], 0, CHUNK, target) == reference.crc32c(raw)
            assert codec.decoded_by == {ENGINE: 1, NVCOMP: 1}
        async with codec_on(gpus, decoder=ENGINE) as codec:
            assert (codec.decoder, codec.decodes) == (ENGINE, (DEFLATE, LZ4, SNAPPY))
            assert await decode(codec, short, [short_plane], 0, CHUNK, target) == reference.crc32c(raw)
            with pytest.raises(
                DecoderUnavailableError, match="a block is longer than the decompression engine takes"
            ):
                await decode(codec, long, [long_plane], 0, CHUNK, target)
            stored, found = await encoded(codec, gpus.allocate(0, raw), raw, EncodePlan(ANS))
            with pytest.raises(DecoderUnavailableError, match="does not take this format"):
                await decode(codec, stored, found.planes, 0, CHUNK, target)
            assert codec.decoded_by == {ENGINE: 1}

    with machine(gpus=1, decompression=(7, 32768)) as gpus:
        run(main(gpus))


def test_a_forced_engine_that_is_not_there_is_an_error_and_no_fallback() -> None:
    async def main(gpus: Machine) -> None:
        used = gpus.world.used(0)
        with pytest.raises(DecoderUnavailableError, match="engine was asked for: GPU 0 has none") as caught:
            async with codec_on(gpus, decoder=ENGINE):
                raise AssertionError
        assert caught.value.exit_code == 2
        async with codec_on(gpus) as codec:
            assert (codec.decoder, codec.why) == (NVCOMP, "GPU 0 has none")
        with pytest.raises(DecoderUnavailableError, match="there is no nvCOMP"):
            async with codec_on(gpus, decoder=NVCOMP, nvcomp=None):
                raise AssertionError
        assert (live_codecs(), gpus.world.used(0)) == (0, used)

    with machine(gpus=1) as gpus:
        run(main(gpus))


def test_an_older_driver_does_not_serve_the_engine() -> None:
    async def main(gpus: Machine) -> None:
        async with codec_on(gpus) as codec:
            assert codec.decoder == NVCOMP
            assert re.fullmatch(r"this driver \([0-9.]+\) does not serve it", codec.why)

    with machine(gpus=1, decompression=(1, LENGTH), driver_version=12040) as gpus:
        run(main(gpus))


def test_forced_nvcomp_leaves_the_engine_alone() -> None:
    raw = data_of("fp8")
    stored, plane = deflated_plane(raw, 65536)

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, CHUNK)
        async with codec_on(gpus, decoder=NVCOMP) as codec:
            assert (codec.decoder, codec.why) == (NVCOMP, "nvCOMP was asked for")
            assert await decode(codec, stored, [plane], 0, CHUNK, target) == reference.crc32c(raw)
            assert codec.decoded_by == {NVCOMP: 1}
        assert gpus.world.calls("cuMemBatchDecompressAsync") == 0

    with machine(gpus=1, decompression=(7, LENGTH)) as gpus:
        run(main(gpus))


def test_without_nvcomp_the_engine_alone_decodes_and_nothing_is_encoded() -> None:
    raw = data_of("fp8")
    stored, plane = deflated_plane(raw, 65536)

    async def main(gpus: Machine) -> None:
        target = gpus.allocate(0, CHUNK)
        async with codec_on(gpus, nvcomp=None) as codec:
            assert (codec.backend, codec.decoder, codec.encodes, codec.decodes) == (
                "",
                ENGINE,
                (),
                (DEFLATE,),
            )
            assert await decode(codec, stored, [plane], 0, CHUNK, target) == reference.crc32c(raw)
            with lease_buffer(bytearray(CHUNK)) as lease:
                with pytest.raises(DecoderUnavailableError, match="encodes with nvCOMP, and there is none"):
                    codec.encode(lease, CHUNK, target, EncodePlan(DEFLATE))
                assert lease.holds == 1
            with pytest.raises(DecoderUnavailableError, match="nvCOMP, which would decode it, is not there"):
                await decode(codec, stored, [plane._replace(codec=ANS)], 0, CHUNK, target)

    with machine(gpus=1, decompression=(1, LENGTH)) as gpus:
        run(main(gpus))


@pytest.mark.parametrize("capable", [True, False])
def test_a_destination_that_the_engine_may_not_write_to_is_reached_by_way_of_scratch(capable: bool) -> None:
    raw = data_of("fp8")
    stored, plane = deflated_plane(raw, 65536)

    async def main(gpus: Machine) -> None:
        driver = gpus.driver
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = 0
        properties.allocFlags.usage = driver.CU_MEM_CREATE_USAGE_HW_DECOMPRESS if capable else 0
        access = driver.CUmemAccessDesc()
        access.location = properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        nbytes = 2 * MIB
        with gpus.current(0):
            handle = done(driver.cuMemCreate(nbytes, properties, 0))
            target = done(driver.cuMemAddressReserve(nbytes, 0, 0, 0))
            done(driver.cuMemMap(target, nbytes, 0, handle, 0))
            done(driver.cuMemSetAccess(target, nbytes, [access], 1))
        async with codec_on(gpus) as codec:
            asked = gpus.world.calls("cuPointerGetAttribute")
            assert await decode(codec, stored, [plane], 0, CHUNK, int(target)) == reference.crc32c(raw)
            assert gpus.read(0, int(target), CHUNK) == raw
            assert codec.decoded_by == {ENGINE: 1}
            assert gpus.world.calls("cuPointerGetAttribute") > asked
        with gpus.current(0):
            done(driver.cuMemUnmap(target, nbytes))
            done(driver.cuMemRelease(handle))
            done(driver.cuMemAddressFree(target, nbytes))

    with machine(gpus=1, decompression=(1, LENGTH)) as gpus:
        run(main(gpus))
