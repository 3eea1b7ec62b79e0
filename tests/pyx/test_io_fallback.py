"""Which engine runs where: refused system calls, small limits, forks. Each in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
import textwrap

import pytest

from ckptpipe.pyx.errors import IoError
from ckptpipe.pyx.io_engine import EngineName, open_engine, probe
from tests.pyx.engines import REFUSED, engine, run

IO_URING_SETUP, IO_URING_ENTER, IO_URING_REGISTER = 425, 426, 427
IO_SETUP = {"x86_64": 206, "aarch64": 0}.get(platform.machine(), -1)
needs_uring = pytest.mark.skipif("io_uring" in REFUSED, reason=f"io_uring: {REFUSED.get('io_uring')}")

# Installs a filter that answers EPERM to the system calls in argv, as a container's seccomp profile does.
SECCOMP = """
import ctypes, struct, sys
refused = [int(number) for number in sys.argv[1].split(",")]
LOAD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
program = struct.pack("HBBI", LOAD, 0, 0, 0)
for number in refused:
    program += struct.pack("HBBI", JUMP_EQUAL, 0, 1, number) + struct.pack("HBBI", RETURN, 0, 0, 0x00050000 | 1)
program += struct.pack("HBBI", RETURN, 0, 0, 0x7FFF0000)
memory = ctypes.create_string_buffer(program)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
given = Program(len(program) // 8, ctypes.cast(memory, ctypes.c_void_p).value)
assert libc.prctl(22, 2, ctypes.byref(given), 0, 0) == 0, ctypes.get_errno()
"""

# Opens the engine "auto", does one round trip, and prints what ran.
ROUND_TRIP = """
import asyncio, json, os, tempfile
from ckptpipe.pyx.io_engine import open_engine
from ckptpipe.pyx.staging import StagingRing
async def main():
    ring = StagingRing(2, 1 << 20, huge_pages="off", prefault_threads=1)
    io = open_engine("auto", depth=2, buffers=[ring])
    with tempfile.TemporaryFile(buffering=0) as file, await ring.acquire() as out, await ring.acquire() as back:
        memoryview(out)[:4096] = bytes(range(256)) * 16
        written = await io.write(file.fileno(), out, 4096, 0, "file")
        read = await io.read(file.fileno(), back, 4096, 0, "file")
        await io.fsync(file.fileno(), "file")
        same = bytes(memoryview(out)[:4096]) == bytes(memoryview(back)[:4096])
    found = dict(name=io.name, requested=io.requested, why=io.why, notes=io.notes, good=same and written == read == 4096,
                 registered=getattr(io, "registered_bytes", 0))
    await io.aclose()
    ring.close()
    print(json.dumps(found))
asyncio.run(main())
"""


def python(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **environment},
    )


def report(script: str, *arguments: str, **environment: str) -> dict[str, object]:
    done = python(script, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    assert found["good"] is True
    return found


def test_auto_takes_the_fastest_that_runs() -> None:
    found = report(ROUND_TRIP)
    works = [engine.name for engine in probe() if engine.works]
    assert found["name"] == works[0]
    assert found["requested"] == "auto"
    assert bool(found["why"]) == (works[0] != "io_uring")


@pytest.mark.parametrize(
    ("denied", "name", "reasons"),
    [
        ("io_uring", "libaio", ["io_uring_setup: Operation not permitted"]),
        ("io_uring,libaio", "threads", ["io_uring_setup: Operation", "io_setup: Operation not permitted"]),
    ],
)
def test_variable_denies_engines(denied: str, name: str, reasons: list[str]) -> None:
    found = report(ROUND_TRIP, CKPTPIPE_DENY_IO=denied)
    assert found["name"] == name
    for reason in reasons:
        assert reason in str(found["why"])


@needs_uring
@pytest.mark.parametrize("call", [IO_URING_SETUP, IO_URING_ENTER, IO_URING_REGISTER])
def test_seccomp_refuses_io_uring(call: int) -> None:
    found = report(SECCOMP + ROUND_TRIP, str(call))
    name = {IO_URING_SETUP: "io_uring_setup", IO_URING_ENTER: "io_uring_enter"}.get(call, "io_uring_register")
    assert found["name"] == "libaio"
    assert str(found["why"]).startswith(f"{name}: Operation not permitted (a seccomp filter")


@needs_uring
@pytest.mark.skipif(IO_SETUP < 0, reason="the number of io_setup is not known on this architecture")
def test_seccomp_refuses_both() -> None:
    found = report(SECCOMP + ROUND_TRIP, f"{IO_URING_SETUP},{IO_SETUP}")
    assert found["name"] == "threads"
    assert "io_setup: Operation not permitted" in str(found["why"])


def test_forced_engine_that_cannot_run_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTPIPE_DENY_IO", "io_uring, libaio")

    async def main(kind: EngineName) -> None:
        open_engine(kind)

    for kind, call in (("io_uring", "io_uring_setup"), ("libaio", "io_setup")):
        with pytest.raises(IoError, match=f"^{call}: .*; use the I/O engine auto") as caught:
            run(main(kind))  # type: ignore[arg-type]
        assert isinstance(caught.value, PermissionError)


def test_probe_tells_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTPIPE_DENY_IO", "io_uring")
    found = probe()
    assert [engine.name for engine in found] == ["io_uring", "libaio", "threads"]
    assert not found[0].works
    assert found[0].why.startswith("io_uring_setup: Operation not permitted")
    assert found[2].works
    assert found[2].why == ""


# Without CAP_IPC_LOCK (bit 14), rings and registered buffers count against the limit of locked memory.
MEMLOCK = """
import ctypes, resource, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
head, data = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0)), ctypes.create_string_buffer(24)
assert libc.capget(head, data) == 0
words = list(struct.unpack("6I", data.raw))
words[0] &= ~(1 << 14)
words[1] &= ~(1 << 14)
assert libc.capset(head, ctypes.create_string_buffer(struct.pack("6I", *words))) == 0
resource.setrlimit(resource.RLIMIT_MEMLOCK, (int(sys.argv[1]), int(sys.argv[1])))
"""


@needs_uring
def test_memlock_limit_leaves_buffers_unregistered() -> None:
    found = report(MEMLOCK + ROUND_TRIP, str(1 << 18))
    assert found["name"] == "io_uring"
    assert found["registered"] == 0
    assert found["notes"] == ["io_uring: buffers not registered: the memlock limit is too small"]


def test_memlock_limit_that_forbids_even_the_ring() -> None:
    """Kernels differ in whether a ring itself counts; where it does, the reason is given."""
    found = report(MEMLOCK + ROUND_TRIP, "0")
    if found["name"] != "io_uring":
        assert "io_uring_setup: " in str(found["why"])
        assert "io_uring" in REFUSED or "(the memlock limit is too small)" in str(found["why"])


def test_no_descriptor_left_for_an_engine() -> None:
    done = python(
        """
        import asyncio, os, resource
        from ckptpipe.pyx.io_engine import live_engines, open_engine
        async def main():
            full = [os.open("/dev/null", os.O_RDONLY)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (full[0] + 1, full[0] + 1))
            for kind in ("auto", "io_uring", "libaio", "threads"):
                try:
                    open_engine(kind)
                except OSError as error:
                    print(error)
            assert live_engines() == 0
        asyncio.run(main())
        """
    )
    assert done.stdout.count("eventfd: Too many open files; raise the limit of open files") == 4, done.stderr


@pytest.mark.parametrize("kind", ["io_uring", "libaio", "threads"])
def test_child_after_fork_is_refused(kind: EngineName) -> None:
    if kind in REFUSED:
        pytest.skip(f"{kind} does not run here: {REFUSED[kind]}")
    done = python(
        """
        import asyncio, os, sys, warnings
        warnings.simplefilter("ignore")
        from ckptpipe.pyx.errors import CkptpipeError
        from ckptpipe.pyx.io_engine import live_engines, open_engine
        from ckptpipe.pyx.staging import lease_buffer
        async def main():
            io = open_engine(sys.argv[1])
            with lease_buffer(bytearray(10)) as lease, open("/dev/zero", "rb") as file:
                child = os.fork()
                if child == 0:
                    try:
                        io.read(file.fileno(), lease, 10, 0, "zero")
                    except CkptpipeError as error:
                        await io.aclose()
                        print(error, live_engines(), flush=True)
                    os._exit(0)
                os.waitpid(child, 0)
                assert await io.read(file.fileno(), lease, 10, 0, "zero") == 10
            await io.aclose()
        asyncio.run(main())
        """,
        kind,
    )
    assert done.returncode == 0, done.stderr
    assert "belongs to process" in done.stdout
    assert done.stdout.endswith("open an engine after the fork, or start the process with spawn 0\n")


@needs_uring
def test_operation_that_the_kernel_will_not_take_any_more() -> None:
    """A filter installed after the engine was opened: the operations fail by name, nothing stays held."""
    done = python(
        """
        import asyncio, sys
        from ckptpipe.pyx.io_engine import open_engine
        from ckptpipe.pyx.staging import lease_buffer, outstanding
        async def main():
            io = open_engine("io_uring", depth=4)
            exec(sys.argv[2], {})
            with lease_buffer(bytearray(10)) as lease, open("/dev/zero", "rb") as file:
                reads = [io.read(file.fileno(), lease, 10, 0, f"zero{i}") for i in range(6)]
                for error in await asyncio.gather(*reads, return_exceptions=True):
                    print(type(error).__name__, error)
            print(outstanding(), io.inflight, io.running)
            await io.aclose()
        asyncio.run(main())
        """,
        str(IO_URING_ENTER),
        SECCOMP,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(";")[0] for line in lines[:6]] == [
        f"IoPermissionError read zero{i}: Operation not permitted" for i in range(6)
    ]
    assert "io_uring_enter" in lines[0]
    assert lines[6] == "0 0 0"


def test_close_that_is_thrown_away_keeps_what_the_kernel_has() -> None:
    """A loop that stops in the middle of aclose(): closing the ring then would free memory under the kernel."""
    done = python(
        """
        import asyncio, os
        from ckptpipe.pyx.io_engine import live_engines, open_engine
        from ckptpipe.pyx.staging import StagingRing
        ring = StagingRing(1, 4096, huge_pages="off", prefault_threads=1)
        source, sink = os.pipe()
        loop = asyncio.new_event_loop()
        async def main():
            io = open_engine("threads")
            with await ring.acquire() as lease:
                io.read(source, lease, 1, -1, "pipe")
            await asyncio.sleep(0)
            return io
        io = loop.run_until_complete(main())
        closing = io.aclose()
        closing.send(None)
        closing.close()
        print(live_engines(), ring.in_use, io.running)
        os.write(sink, b"1")
        async def again():
            await io.aclose()
        loop.run_until_complete(again())
        print(live_engines(), ring.in_use, io.running)
        loop.close()
        """
    )
    assert (done.returncode, done.stdout) == (0, "1 1 1\n0 0 0\n"), done.stderr


def test_unclosed_engine_at_exit_of_the_loop() -> None:
    """A loop that ends with an operation in the kernel: the memory stays, the process ends."""
    done = python(
        """
        import asyncio, os
        from ckptpipe.pyx.io_engine import live_engines, open_engine
        from ckptpipe.pyx.staging import StagingRing
        source, sink = os.pipe()
        ring = StagingRing(1, 4096, huge_pages="off", prefault_threads=1)
        async def main():
            lease = await ring.acquire()
            open_engine("auto").read(source, lease, 1, -1, "pipe")
            await asyncio.sleep(0)
            lease.release()
        asyncio.run(main())
        print(live_engines(), ring.in_use)
        os.write(sink, b"1")
        """
    )
    assert (done.returncode, done.stdout) == (0, "1 1\n"), done.stderr


def test_engine_refuses_operations_of_no_loop() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        open_engine("threads")


def test_representation() -> None:
    async def main() -> None:
        async with engine("threads", depth=3) as io:
            assert repr(io) == "<ThreadsEngine threads depth=3 0 in flight>"
        assert repr(io) == "<ThreadsEngine threads depth=3 closed>"

    asyncio.run(main())
