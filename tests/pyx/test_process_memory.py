"""Reading another process's memory: right bytes and sums, errors that name the process and the place."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import crc32c as reference
import pytest

from ckptpipe.pyx.errors import IoError
from ckptpipe.pyx.staging import StagingRing, lease_buffer
from ckptpipe.pyx.workers import Scan, WorkerPool
from tests.pyx.loops import LoopFactory, each_loop, run, turns

PAGE = os.sysconf("SC_PAGESIZE")
TOTAL = (9 << 20) + 5 * PAGE
HOLE = TOTAL - 2 * PAGE  # one page that cannot be read, before the last
SIZES = [1, 4095, 4097, 32768, (1 << 20) - 1, 1 << 20, (3 << 20) + 77, 8 << 20, HOLE]

# The other process: TOTAL bytes of a known sequence, all zero from 1 MiB for 2 MiB, one page without access.
CHILD = """
import ctypes, mmap, random, sys
total, hole, page = map(int, sys.argv[1:])
memory = mmap.mmap(-1, total, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
data = bytearray(random.Random(11).randbytes(total))
data[1 << 20 : 3 << 20] = bytes(2 << 20)
memory[:] = bytes(data)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mprotect(ctypes.c_void_p(address + hole), ctypes.c_size_t(page), 0) == 0
print(address, flush=True)
sys.stdin.read()
"""


@dataclass
class Other:
    pid: int
    address: int
    data: bytes
    process: subprocess.Popen[str]


@pytest.fixture
def other() -> Iterator[Other]:
    with another() as made:
        yield made


@contextmanager
def another() -> Iterator[Other]:
    data = bytearray(random.Random(11).randbytes(TOTAL))
    data[1 << 20 : 3 << 20] = bytes(2 << 20)
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(TOTAL), str(HOLE), str(PAGE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield Other(process.pid, int(process.stdout.readline()), bytes(data), process)
        finally:
            process.kill()


@each_loop
@pytest.mark.parametrize("threads", [1, 4])
def test_bytes_and_sums_of_every_size(loop_factory: LoopFactory, threads: int, other: Other) -> None:
    async def main() -> None:
        memory = bytearray(TOTAL)
        async with WorkerPool(threads) as pool:
            with lease_buffer(memory) as lease:
                for offset in (0, 13):
                    for nbytes in SIZES:
                        nbytes = min(nbytes, HOLE - offset)
                        memory[:] = b"\xee" * TOTAL
                        scan = await pool.read_process(other.pid, other.address + offset, lease, nbytes)
                        part = other.data[offset : offset + nbytes]
                        assert scan == Scan(reference.crc32c(part), zero=False)
                        assert memory[:nbytes] == part
                        assert memory[nbytes:] == b"\xee" * (TOTAL - nbytes)
                zeros = await pool.read_process(other.pid, other.address + (1 << 20), lease, 2 << 20)
                assert zeros == (reference.crc32c(bytes(2 << 20)), True)
                assert await pool.read_process(other.pid, other.address, lease, 0) == Scan(0, zero=True)
                assert pool.inflight == 0

    run(main(), loop_factory)


def test_a_large_read_is_cut_over_idle_threads(other: Other) -> None:
    async def main() -> None:
        async with WorkerPool(4) as pool:
            with lease_buffer(bytearray(8 << 20)) as lease:
                for _ in range(20):
                    expected = reference.crc32c(other.data[: 8 << 20])
                    assert (
                        await pool.read_process(other.pid, other.address, lease, 8 << 20)
                    ).crc32c == expected
            used = [
                int(line.split()[1])
                for entry in os.listdir("/proc/self/task")
                if Path(f"/proc/self/task/{entry}/comm").read_text(encoding="ascii") == "ckpt-worker\n"
                for line in Path(f"/proc/self/task/{entry}/status").read_text(encoding="ascii").splitlines()
                if line.startswith("voluntary_ctxt_switches")
            ]
            assert len(used) == 4
            assert min(used) > 1, "a thread slept through all of it"

    run(main())


@each_loop
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("start", [0, 1, HOLE - 100, HOLE, HOLE + 7])
def test_an_unreadable_page_is_named(
    loop_factory: LoopFactory, threads: int, start: int, other: Other
) -> None:
    async def main() -> None:
        async with WorkerPool(threads) as pool:
            with lease_buffer(bytearray(TOTAL)) as lease:
                with pytest.raises(OSError, match="readable") as caught:
                    await pool.read_process(other.pid, other.address + start, lease, HOLE + 8 - start)
                assert isinstance(caught.value, IoError)
                assert caught.value.errno == errno.EFAULT
                assert f"process {other.pid} at {other.address + max(start, HOLE):#x}" in str(caught.value)
                assert "/proc/PID/maps" in str(caught.value)
                assert lease.holds == 1
                # the pool goes on
                scan = await pool.read_process(other.pid, other.address + HOLE + PAGE, lease, PAGE)
                assert scan.crc32c == reference.crc32c(other.data[HOLE + PAGE :])

    run(main(), loop_factory)


def test_a_process_that_has_ended(other: Other) -> None:
    async def main() -> None:
        async with WorkerPool(2) as pool:
            with lease_buffer(bytearray(4 << 20)) as lease:
                other.process.kill()
                other.process.wait()
                with pytest.raises(ProcessLookupError, match=f"process {other.pid} at .*ended"):
                    await pool.read_process(other.pid, other.address, lease, 4 << 20)

    run(main())


def test_a_process_of_somebody_else() -> None:
    """Reading as another user is refused; run in a child, because a user id cannot be taken back."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    text = """
        import asyncio, os, sys
        from ckptpipe.pyx.staging import lease_buffer
        from ckptpipe.pyx.workers import WorkerPool
        async def main():
            async with WorkerPool(1) as pool:
                with lease_buffer(bytearray(4096)) as lease:
                    try:
                        await pool.read_process(int(sys.argv[1]), int(sys.argv[2]), lease, 4096)
                    except PermissionError as error:
                        print(error)
        os.setresuid(65533, 65533, 65533)
        asyncio.run(main())
    """
    with another() as other:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(text), str(other.pid), str(other.address)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    assert (
        f"process_vm_readv process {other.pid} at {other.address:#x}: Operation not permitted" in done.stdout
    )
    assert "ptrace_scope" in done.stdout
    assert "CAP_SYS_PTRACE" in done.stdout


@each_loop
def test_a_cancelled_read_holds_its_slot_until_it_ended(loop_factory: LoopFactory, other: Other) -> None:
    async def main() -> None:
        ring = StagingRing(1, 8 << 20)
        async with WorkerPool(1) as pool:
            lease = await ring.acquire()
            futures = [pool.read_process(other.pid, other.address, lease, 8 << 20) for _ in range(4)]
            lease.release()
            for future in futures:
                future.cancel()
            await turns()
            assert ring.free == 0 or pool.inflight == 0
        assert (ring.free, pool.inflight) == (1, 0)
        ring.close()

    run(main(), loop_factory)


def test_what_cannot_be_is_refused() -> None:
    async def main() -> None:
        pool = WorkerPool(1)
        with lease_buffer(bytearray(16)) as lease, lease_buffer(bytes(16)) as readonly:
            for pid in (0, -1):
                with pytest.raises(ValueError, match="is no process"):
                    pool.read_process(pid, 4096, lease, 16)
            with pytest.raises(ValueError, match="no memory range"):
                pool.read_process(1, (1 << 64) - 8, lease, 16)
            with pytest.raises(ValueError, match="17 bytes asked of a lease of 16"):
                pool.read_process(1, 4096, lease, 17)
            with pytest.raises(ValueError, match="read-only"):
                pool.read_process(1, 4096, readonly, 16)
            assert (lease.holds, readonly.holds) == (1, 1)
            await pool.aclose()
            with pytest.raises(RuntimeError, match="closed"):
                pool.read_process(1, 4096, lease, 16)

    run(main())


def test_ones_own_memory_can_be_read() -> None:
    async def main() -> None:
        data = bytearray(random.Random(4).randbytes(3 << 20))
        async with WorkerPool(2) as pool:
            with lease_buffer(data) as source, lease_buffer(bytearray(len(data))) as lease:
                scan = await pool.read_process(os.getpid(), source.address, lease, len(data))
                assert scan == (reference.crc32c(bytes(data)), False)
                assert memoryview(lease) == data

    run(main())


def test_nothing_is_read_on_the_loops_thread(other: Other) -> None:
    """A page of the other process may have to come from a disk: even the smallest read goes to a thread."""

    async def main() -> None:
        async with WorkerPool(1) as pool:
            with lease_buffer(bytearray(16)) as lease:
                future = pool.read_process(other.pid, other.address, lease, 16)
                assert not future.done()
                assert pool.inflight == 1
                await future
                await asyncio.sleep(0)
                assert pool.jobs == 1

    run(main())
