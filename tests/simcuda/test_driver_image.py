"""The image that a checkpoint without custom storage leaves in its target's memory."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from tests.simcuda import SimWorld, Target
from tests.simcuda.driver import call, checkpoint, driver, error, hold_contexts, lock, restore, state, unlock
from tests.simcuda.storage import restore as restore_on

MIB = 1 << 20
CONTEXT = 2 * MIB


def _mappings(pid: int) -> dict[tuple[int, int], str]:
    found = {}
    for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines():
        span, modes, _offset, _device, inode, *name = line.split(maxsplit=5)
        first, last = (int(number, 16) for number in span.split("-"))
        found[first, last] = f"{modes} {inode} {''.join(name).strip()}"
    return found


def _writable(mappings: dict[tuple[int, int], str]) -> int:
    return sum(last - first for (first, last), what in mappings.items() if what == "rw-p 0 ")


def test_it_is_one_new_anonymous_mapping_that_holds_the_allocations(
    world: SimWorld, library: ctypes.CDLL
) -> None:
    buffers = [(0, 5 * MIB), (1, 3 * MIB)]
    with Target(world.environment(), buffers) as target:
        assert lock(target.pid) == "SUCCESS"
        before = _mappings(target.pid)
        assert checkpoint(target.pid) == "SUCCESS"
        grown = _writable(_mappings(target.pid)) - _writable(before)
        process = world.process(target.pid)
        first, last = process.image_address, process.image_address + process.image_bytes
        covering = [span for span in _mappings(target.pid) if span[0] < last and first < span[1]]
        assert _mappings(target.pid)[covering[0]] == "rw-p 0 "
        assert len(covering) == 1
        assert not any(span[0] < last and first < span[1] for span in before)
        assert process.image_bytes == grown == 2 * CONTEXT + 8 * MIB
        with Path(f"/proc/{target.pid}/mem").open("rb", buffering=0) as memory:
            memory.seek(first)
            image = memory.read(last - first)
        assert image[CONTEXT : CONTEXT + 5 * MIB] == target.buffer(0)
        assert image[2 * CONTEXT + 5 * MIB :] == target.buffer(1)
        assert restore(target.pid) == "SUCCESS"
        assert unlock(target.pid) == "SUCCESS"
        left = _mappings(target.pid)
        assert not any(span[0] < last and first < span[1] for span in left)
        target.check()


def test_gpu_memory_is_free_while_it_is_checkpointed() -> None:
    with SimWorld(gpus=1, memory=16 * MIB) as world, world.attached():
        hold_contexts(1)
        with Target(world.environment(), [(0, 9 * MIB)]) as target:
            assert error(driver.cuMemAlloc(9 * MIB)) == "OUT_OF_MEMORY"
            assert lock(target.pid) == "SUCCESS"
            assert checkpoint(target.pid) == "SUCCESS"
            assert world.used(0) == CONTEXT
            mine = call(driver.cuMemAlloc(9 * MIB))
            assert restore(target.pid) == "OUT_OF_MEMORY"
            assert state(target.pid) == "CHECKPOINTED"
            call(driver.cuMemFree(mine))
            assert restore(target.pid) == "SUCCESS"
            assert unlock(target.pid) == "SUCCESS"
            target.check()


def test_it_can_be_restored_onto_other_gpus(world: SimWorld, library: ctypes.CDLL) -> None:
    first, second = (gpu.uuid_bytes for gpu in world.gpus)
    with Target(world.environment(), [(0, 5 * MIB)]) as target:
        assert lock(target.pid) == "SUCCESS"
        assert checkpoint(target.pid) == "SUCCESS"
        code, _ = restore_on(library, target.pid, [(first, second)], custom=False)
        assert code == 0
        assert world.process(target.pid).bytes == (0, CONTEXT + 5 * MIB)
        assert unlock(target.pid) == "SUCCESS"
        target.check()
        target.check()


def test_a_target_without_python_keeps_its_contents(world: SimWorld, library: ctypes.CDLL) -> None:
    plain = str(world.library / "plain_target")
    with Target(world.environment(), [(0, 2 * MIB), (1, MIB)], program=plain, seed=9) as target:
        for _ in range(3):
            target.check()
            assert lock(target.pid) == "SUCCESS"
            assert checkpoint(target.pid) == "SUCCESS"
            assert restore(target.pid) == "SUCCESS"
            assert unlock(target.pid) == "SUCCESS"
        assert target.finish() == 0


def test_the_image_can_have_a_fixed_address() -> None:
    with SimWorld(gpus=1, image_address=0x1234_0000_0000) as world, world.attached():
        with Target(world.environment(), [(0, MIB)]) as target:
            assert lock(target.pid) == "SUCCESS"
            assert checkpoint(target.pid) == "SUCCESS"
            assert world.process(target.pid).image_address == 0x1234_0000_0000


WATCH = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static unsigned char *image;
static size_t length;

void *mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset) {
    void *(*next)(void *, size_t, int, int, int, off_t) = dlsym(RTLD_NEXT, "mmap");
    void *mapping = next(address, bytes, protection, flags, fd, offset);
    if (flags == (MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE) && protection == (PROT_READ | PROT_WRITE) && !address) {
        image = mapping;
        length = bytes;
        fprintf(stderr, "map %zu\n", bytes);
    }
    return mapping;
}

int munmap(void *address, size_t bytes) {
    int (*next)(void *, size_t) = dlsym(RTLD_NEXT, "munmap");
    if (image && address == image) fprintf(stderr, "unmap %zu\n", bytes);
    return next(address, bytes);
}

void *memcpy(void *to, const void *from, size_t bytes) {
    unsigned char *target = to;
    const unsigned char *source = from;
    if (image && bytes >= 4096 && target >= image && target < image + length)
        fprintf(stderr, "write %zu %zu\n", (size_t)(target - image), bytes);
    if (image && bytes >= 4096 && source >= image && source < image + length)
        fprintf(stderr, "read %zu %zu\n", (size_t)(source - image), bytes);
    return memmove(to, from, bytes);
}
"""


def test_it_is_made_through_libc_in_pieces_as_the_real_driver_makes_it(
    world: SimWorld, library: ctypes.CDLL, tmp_path: Path
) -> None:
    (tmp_path / "watch.c").write_text(WATCH, encoding="utf-8")
    watch, log = tmp_path / "watch.so", tmp_path / "log"
    subprocess.run(
        ["cc", "-O1", "-fno-builtin", "-shared", "-fPIC", "-o", watch, tmp_path / "watch.c", "-ldl"],
        check=True,
    )
    plain = str(world.library / "plain_target")
    with log.open("w") as sink:
        environment = world.environment(LD_PRELOAD=str(watch))
        with Target(
            environment, [(0, 59 * MIB), (1, 5 * MIB)], program=plain, errors=sink.fileno()
        ) as target:
            assert lock(target.pid) == "SUCCESS"
            assert checkpoint(target.pid) == "SUCCESS"
            assert restore(target.pid) == "SUCCESS"
            assert unlock(target.pid) == "SUCCESS"
    lines = [line.split() for line in log.read_text(encoding="utf-8").splitlines()]
    total = 59 * MIB + 5 * MIB + 2 * CONTEXT
    assert lines[0] == ["map", str(total)]
    assert lines[-1] == ["unmap", str(total)]
    writes = [(int(at), int(size)) for what, at, *rest in lines[1:-1] if what == "write" for size in rest]
    reads = [(int(at), int(size)) for what, at, *rest in lines[1:-1] if what == "read" for size in rest]
    assert max(size for _, size in writes) == 2 * MIB
    assert sorted(writes) == sorted(reads)
    assert reads == sorted(reads), "restore reads it in sequence"
    late = [at for k, (at, _) in enumerate(writes) if at < max([other for other, _ in writes[:k]], default=0)]
    assert len(late) == 4, "all but four offsets go up"
    at = 0
    for start, size in reads:
        assert start == at, "every byte once"
        at += size
    assert at == total
