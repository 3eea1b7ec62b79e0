"""The driver's image in the pool: served, filled, read and given back, cycle after cycle."""

from __future__ import annotations

import array
import ctypes
import os
import subprocess
from pathlib import Path

import pytest

from ckptpipe.pipeline.launch import LaunchOptions, PoolSize
from tests.preload.launched import (
    CONTEXT,
    FIXED,
    IMAGE,
    MANY,
    MIB,
    PIECE,
    POOL,
    Launched,
    mapping,
    memory,
    payload,
)
from tests.simcuda import SimWorld
from tests.simcuda.driver import checkpoint, hold_contexts, lock


@pytest.mark.parametrize("hook", ["relocations", "symbols"])
@pytest.mark.parametrize("program", ["plain", "sums"])
def test_contents_survive_many_cycles(world: SimWorld, driver: ctypes.CDLL, program: str, hook: str) -> None:
    options = LaunchOptions(pool=PoolSize(nbytes=POOL), workers=3, hook=hook)  # type: ignore[arg-type]
    with Launched(world, options, program=program) as it:
        generations = set()
        for _ in range(5):
            it.target.check()
            image = it.checkpoint()
            assert image is not None
            assert (image.nbytes, image.phase, image.watermark) == (IMAGE, "writing", IMAGE)
            assert payload(it.read(image)) == it.expected()
            generations.add(image.generation)
            it.restore()
            assert not it.page.images()
        it.target.check()
        pool = it.page.pool()
        assert pool.hook == hook
        assert (pool.served, pool.returned, pool.fallbacks) == (5, 5, 0), pool.fallback_text
        assert len(generations) == 5
        assert it.target.finish() == 0


def test_the_image_is_the_shared_pool_and_no_new_anonymous_memory(
    world: SimWorld, driver: ctypes.CDLL
) -> None:
    with Launched(world) as it:
        it.until(lambda pool: pool.state == "ready")
        anonymous, shared = memory(it.pid, "RssAnon"), memory(it.pid, "RssShmem")
        assert shared >= POOL, "prefaulted before the first checkpoint"
        image = it.checkpoint()
        assert image is not None
        process = world.process(it.pid)
        assert (process.image_address, process.image_bytes) == (image.address, IMAGE)
        line = mapping(it.pid, image.address)
        assert "rw-s" in line and "memfd:ckptpipe-pool" in line
        assert memory(it.pid, "RssAnon") < anonymous + 8 * MIB
        it.restore()
        assert memory(it.pid, "RssShmem") >= POOL, "kept between cycles"
        it.target.check()


def test_every_second_cycle_meets_what_an_older_image_left(world: SimWorld, driver: ctypes.CDLL) -> None:
    """The image ends in the middle of a piece: what the driver never wrote is zeros, as in fresh memory."""
    buffers = [(0, 5 * MIB)]
    with Launched(world, FIXED, buffers) as it:
        for _ in range(2):
            image = it.checkpoint()
            assert image is not None
            assert (image.nbytes, image.watermark, image.settled) == (8 * MIB, CONTEXT + 5 * MIB, False)
            assert it.handover.settle() == MIB
            (image,) = it.page.images()
            assert (image.watermark, image.settled) == (8 * MIB, True)
            assert it.read(image, 7 * MIB) == bytes(MIB)
            # As if an earlier image had reached so far.
            os.pwrite(it.attach_pool(), b"\xff" * MIB, image.offset + 7 * MIB)
            it.restore()
            it.target.check()


def test_late_writes_are_recorded(world: SimWorld, driver: ctypes.CDLL) -> None:
    with Launched(world, FIXED, MANY) as it:
        image = it.checkpoint()
        assert image is not None
        late = it.page.late()
        assert image.late_count == len(late) == it.page.pool().late_serial == 4
        assert {each.generation for each in late} == {image.generation}
        assert all(each.nbytes == PIECE and each.start + each.nbytes < image.high for each in late)
        assert [each.serial for each in late] == [1, 2, 3, 4]
        assert it.page.late(after=3) == late[3:]
        numbers = array.array("I", it.page.pieces(image.offset // PIECE, image.nbytes // PIECE))
        assert all(
            started == finished > 0 for started, finished in zip(numbers[::2], numbers[1::2], strict=True)
        )
        it.restore()


def test_the_image_goes_where_the_driver_wants_it() -> None:
    place = 0x1234_0000_0000
    with SimWorld(gpus=2, image_address=place) as world, world.attached():
        hold_contexts(2)
        with Launched(world) as it:
            for _ in range(3):
                image = it.checkpoint()
                assert image is not None
                assert (image.address, image.moved) == (place, True)
                assert "memfd:ckptpipe-pool" in mapping(it.pid, place)
                with pytest.raises(LookupError):
                    mapping(it.pid, place + IMAGE)
                assert payload(it.read(image)) == it.expected()
                it.restore()
                with pytest.raises(LookupError):
                    mapping(it.pid, place)
                it.target.check()


def test_a_pool_that_grows_is_kept_with_a_margin(world: SimWorld, driver: ctypes.CDLL) -> None:
    with Launched(world, LaunchOptions(margin=50, workers=2, budget=PoolSize(nbytes=256 * MIB))) as it:
        assert it.until(lambda pool: pool.state == "ready").warm == 0
        assert memory(it.pid, "RssShmem") < IMAGE + 8 * MIB, "only the simulated GPUs are files, too"
        image = it.checkpoint()
        assert image is not None
        it.restore()
        space = -(-IMAGE // PIECE) * PIECE
        pool = it.until(lambda pool: pool.warm >= space * 3 // 2 // PIECE * PIECE)
        assert pool.budget_used >= pool.warm
        assert (pool.served, pool.fallbacks) == (1, 0)
        it.target.check()


def test_a_share_of_the_memory_makes_a_pool(world: SimWorld, driver: ctypes.CDLL) -> None:
    options = LaunchOptions(pool=PoolSize(percent=1), budget=PoolSize(nbytes=64 * MIB))
    with Launched(world, options, [(0, 5 * MIB)]) as it:
        pool = it.until(lambda pool: pool.state == "ready")
        assert 0 < pool.nbytes <= 64 * MIB
        assert pool.warm == pool.nbytes
        assert it.checkpoint() is not None
        it.restore()


def test_too_small_a_pool_is_the_drivers_way(world: SimWorld, driver: ctypes.CDLL) -> None:
    with Launched(world, LaunchOptions(pool=PoolSize(nbytes=4 * MIB))) as it:
        for cycle in (1, 2):
            assert it.checkpoint() is None
            pool = it.page.pool()
            assert (pool.fallbacks, pool.fallback_reason, pool.fallback_bytes) == (cycle, "too small", IMAGE)
            assert "no free range" in pool.fallback_text
            assert "rw-p" in mapping(it.pid, world.process(it.pid).image_address)
            it.restore()
            it.target.check()


def test_more_than_the_memory_there_is_is_the_drivers_way(world: SimWorld, driver: ctypes.CDLL) -> None:
    """As large a pool as the budget allows, which is more than is free once the pool is wanted."""
    options = LaunchOptions(pool=PoolSize(nbytes=POOL), budget=PoolSize(nbytes=POOL))
    encoded = options.encode().replace(f"pool-bytes={POOL}", f"pool-bytes={1 << 50}")
    encoded = encoded.replace(f"budget-bytes={POOL}", f"budget-bytes={1 << 51}")
    with Launched(world, options, encoded=encoded) as it:
        pool = it.until(lambda pool: pool.state == "gone")
        assert pool.reason == "memory"
        assert it.checkpoint() is None
        assert it.page.pool().fallback_reason == "memory"
        it.restore()
        it.target.check()


def test_a_failed_checkpoint_gives_the_pool_back(world: SimWorld, driver: ctypes.CDLL) -> None:
    with Launched(world) as it:
        world.fault(
            "cuCheckpointProcessCheckpoint", point="middle", error="CUDA_ERROR_UNKNOWN", target=it.pid
        )
        assert lock(it.pid) == "SUCCESS"
        assert checkpoint(it.pid) != "SUCCESS"
        assert not it.page.images()
        assert it.page.pool().returned == 1
        assert checkpoint(it.pid) == "SUCCESS"
        (image,) = it.page.images()
        assert payload(it.read(image)) == it.expected()
        it.restore()
        it.target.check()


PINNED = r"""
#define _GNU_SOURCE
#include <sys/mman.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int cuInit(unsigned);
/* What a driver does that pins host memory so: on the thread that asks, from inside of libcuda. */
int main(void) {
    int device = memfd_create("device", 0);
    if (ftruncate(device, 4096)) return 1;
    char *pinned = mmap(NULL, 8 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    memset(pinned, 1, 8 << 20);
    char *again = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, device, 0);
    return cuInit(0) || pinned == MAP_FAILED || again == MAP_FAILED || munmap(pinned, 8 << 20);
}
"""


def test_a_program_that_is_linked_with_the_driver_and_maps_the_same_way(
    world: SimWorld, driver: ctypes.CDLL, tmp_path: Path
) -> None:
    (tmp_path / "linked.c").write_text(PINNED, encoding="utf-8")
    program = tmp_path / "linked"
    library = "-l:libcuda.so.1"
    subprocess.run(
        ["cc", "-o", program, tmp_path / "linked.c", f"-L{world.library}", library, "-Wl,--no-as-needed"],
        check=True,
    )
    with Launched(world, connect=False) as it:
        done = subprocess.run([program], env=it.environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_an_allocation_that_only_looks_like_an_image_is_left_alone(
    world: SimWorld, driver: ctypes.CDLL
) -> None:
    """Smaller than images can be here: neither size nor flags alone make one."""
    options = LaunchOptions(pool=PoolSize(nbytes=POOL), image_min=1 << 30)
    with Launched(world, options) as it:
        assert it.checkpoint() is None
        assert it.page.pool().fallbacks == 0
        it.restore()
        it.target.check()


def test_hugetlb_pages_are_taken_or_said_to_be_missing(world: SimWorld, driver: ctypes.CDLL) -> None:
    options = LaunchOptions(pool=PoolSize(nbytes=16 * MIB), pages="hugetlb")
    with Launched(world, options) as it:
        pool = it.until(lambda pool: pool.state == "ready")
        if pool.pages == "hugetlb":
            assert (pool.page_bytes, pool.huge, pool.text) == (2 * MIB, 16 * MIB, "")
        else:
            assert pool.reason == "memory" and "no hugetlb pages" in pool.text
        image = it.checkpoint()
        assert image is not None
        assert payload(it.read(image)) == it.expected()
        it.restore()
        it.target.check()


def test_small_pages_on_request(world: SimWorld, driver: ctypes.CDLL) -> None:
    with Launched(world, LaunchOptions(pool=PoolSize(nbytes=16 * MIB), pages="small")) as it:
        pool = it.until(lambda pool: pool.state == "ready")
        assert (pool.pages, pool.page_bytes, pool.huge) == ("small", os.sysconf("SC_PAGESIZE"), 0)
        assert it.checkpoint() is not None
        it.restore()


def test_without_the_trees_budget_file_a_process_has_its_own(world: SimWorld, driver: ctypes.CDLL) -> None:
    """As after a change of user or of the root directory."""
    encoded = FIXED.encode("/nonexistent/budget")
    with Launched(world, FIXED, encoded=encoded) as it:
        pool = it.until(lambda pool: pool.state == "ready")
        assert "/nonexistent/budget" in pool.text
        assert it.checkpoint() is not None
        it.restore()
