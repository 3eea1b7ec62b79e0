"""The leak check itself: each kind of thing is seen when it stays, and not when it goes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.inner_pytest import inner_pytest
from tests.leaks import Holdings, Ledger


def left(before: Holdings) -> list[str]:
    return Ledger().left_since(before, settle=0.0)


def test_sees_a_descriptor() -> None:
    before = Holdings.now()
    reading, writing = os.pipe()
    try:
        lines = left(before)
    finally:
        os.close(reading)
        os.close(writing)
    assert [line.startswith("descriptor ") and "pipe:" in line for line in lines] == [True, True]
    assert left(before) == []


def test_sees_a_descriptor_that_took_an_old_number() -> None:
    first = socket.socket()
    before = Holdings.now()
    number = first.fileno()
    first.close()
    reading, writing = os.pipe()
    try:
        assert number in (reading, writing)
        assert any(line.startswith(f"descriptor {number} (pipe:") for line in left(before))
    finally:
        os.close(reading)
        os.close(writing)


def test_sees_a_thread() -> None:
    gate = threading.Event()
    before = Holdings.now()
    thread = threading.Thread(target=gate.wait)
    thread.start()
    try:
        lines = left(before)
    finally:
        gate.set()
        thread.join()
    assert len(lines) == 1
    assert lines[0].startswith(f"thread {thread.native_id} ")
    assert Ledger().left_since(before) == []


def test_sees_a_child_running_and_dead() -> None:
    before = Holdings.now()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        lines = left(before)
        assert any(line.startswith(f"child process {child.pid} (") for line in lines), lines
        os.kill(child.pid, 9)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert any("zombie" in line for line in left(before))
    finally:
        child.kill()
        child.communicate()
    assert left(before) == []


def test_sees_leases() -> None:
    staging = pytest.importorskip("ckptpipe.pyx.staging")
    before = Holdings.now()
    lease = staging.lease_buffer(bytearray(4096))
    try:
        assert [line for line in left(before) if "leases" in line]
    finally:
        lease.release()
    assert left(before) == []


def test_adopted_things_are_no_leaks() -> None:
    ledger = Ledger()
    before = Holdings.now()
    reading, writing = os.pipe()
    try:
        ledger.adopt(before, Holdings.now())
        assert ledger.left_since(before, settle=0.0) == []
    finally:
        os.close(reading)
        os.close(writing)


def test_a_leaking_test_fails(tmp_path: Path) -> None:
    """The real conftest around a test that leaks, in a pytest of its own."""
    conftest = "from tests.conftest import *\nfrom tests.conftest import _nothing_left, _settled_process\n"
    test = (
        "import os\n"
        "def test_clean(): pass\n"
        "def test_leaks(): os.open('/dev/null', os.O_RDONLY)\n"
        "def test_clean_again(): pass\n"
    )
    run = inner_pytest(tmp_path, conftest, test)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "3 passed, 1 error" in run.stdout
    assert "left behind:" in run.stdout
    assert "(/dev/null)" in run.stdout


def test_what_a_real_driver_keeps_is_no_leak() -> None:
    """It opens devices and starts threads at any call; pipes and eventfds when it is first used."""
    cuda = frozenset({"/libcuda.so"})
    devices = {(30, "/dev/nvidia0"): "/dev/nvidia0", (31, "/dev/nvidiactl"): "/dev/nvidiactl"}
    unnamed = {(32, "pipe:[7]"): "pipe:[7]", (33, "anon_inode:[eventfd]"): "anon_inode:[eventfd]"}
    file = {(34, "/tmp/x"): "/tmp/x"}
    first = Holdings(
        threads={1: "cuda-EvtHandlr", 2: "cuda00001400006", 3: "ckpt-cuda-load"},
        descriptors=devices | unnamed | file,
        keepers=cuda,
    )
    assert first.beyond(Holdings()) == ["thread 3 (ckpt-cuda-load)", "descriptor 34 (/tmp/x)"]
    later = Holdings(threads={1: "cuda-EvtHandlr"}, descriptors=devices | unnamed, keepers=cuda)
    assert later.beyond(Holdings(keepers=cuda)) == [
        "descriptor 32 (pipe:[7])",
        "descriptor 33 (anon_inode:[eventfd])",
    ]
    without = Holdings(threads={1: "cuda-EvtHandlr"}, descriptors=devices)
    assert len(without.beyond(Holdings())) == 3
