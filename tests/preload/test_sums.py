"""The block table: what the library says of an image's bytes is what reading them says."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import pytest

from ckptpipe.pipeline.launch import environment
from ckptpipe.pyx.checksum import crc32c
from tests.preload.launched import CONTEXT, FIXED, IMAGE, MANY, MIB, PIECE, Launched
from tests.simcuda import SimWorld

BLOCK = 16 << 10


def known(it: Launched, start: int, nbytes: int) -> tuple[int, bool] | None:
    (image,) = it.page.images()
    return it.page.summed(image.slot, image.generation, start, nbytes)


def read(it: Launched, start: int, nbytes: int) -> tuple[int, bool]:
    (image,) = it.page.images()
    data = it.read(image, start, nbytes)
    return crc32c(data), not any(data)


@pytest.mark.parametrize(
    "buffers", [((0, 3 * MIB), (1, MIB)), MANY, ((0, MIB + 4096), (0, 4096), (0, PIECE))]
)
def test_the_sums_are_those_of_the_bytes(
    world: SimWorld, driver: ctypes.CDLL, buffers: Sequence[tuple[int, int]]
) -> None:
    with Launched(world, FIXED, buffers) as it:
        it.handover.arm()
        for _ in range(2):
            image = it.checkpoint()
            assert image is not None
            end = image.watermark // BLOCK * BLOCK
            for start in range(0, end, 5 * BLOCK):
                nbytes = min(5 * BLOCK, end - start)
                assert known(it, start, nbytes) == read(it, start, nbytes)
            assert known(it, 0, end) == read(it, 0, end)
            assert known(it, 0, 0) is None and known(it, 1, BLOCK) is None
            if end < image.nbytes:
                assert known(it, end, BLOCK) is None, "not all of it was written"
            it.handover.settle()
            assert known(it, 0, end) == read(it, 0, end)
            with pytest.raises(IndexError):
                known(it, 0, image.nbytes + 1)
            it.restore()
            assert it.page.summed(image.slot, image.generation, 0, BLOCK) is None
            it.target.check()


def test_what_was_written_twice_is_not_known(world: SimWorld, driver: ctypes.CDLL) -> None:
    with Launched(world, FIXED, MANY, SIMCUDA_REWRITES="3") as it:
        it.handover.arm()
        assert it.checkpoint() is not None
        (image,) = it.page.images()
        for piece in range(image.nbytes // PIECE):
            expected = None if piece in (0, 2, 4) else read(it, piece * PIECE, PIECE)
            assert known(it, piece * PIECE, PIECE) == expected


def test_the_table_says_what_was_written_not_what_is_there(world: SimWorld, driver: ctypes.CDLL) -> None:
    with Launched(world) as it:
        it.handover.arm()
        image = it.checkpoint()
        assert image is not None
        before = known(it, 0, IMAGE)
        (byte,) = it.read(image, CONTEXT + 12345, 1)
        os.pwrite(it.attach_pool(), bytes([byte ^ 1]), image.offset + CONTEXT + 12345)
        assert known(it, 0, IMAGE) == before != read(it, 0, IMAGE)


@pytest.mark.parametrize("why", ["nobody has armed the process", "switched off"])
def test_nothing_is_summed(world: SimWorld, driver: ctypes.CDLL, why: str) -> None:
    encoded = environment(FIXED, world.environment())["CKPTPIPE_LAUNCH"]
    with Launched(world, encoded=f"{encoded};checksum=0" if why == "switched off" else "") as it:
        if why == "switched off":
            it.handover.arm()
        assert it.checkpoint() is not None
        assert known(it, 0, BLOCK) is None
