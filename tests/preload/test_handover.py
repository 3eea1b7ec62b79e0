"""Who gets the pool, and what they can ask for."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ckptpipe.pipeline.launch import Handover, HandoverFailed, LaunchOptions, NotLaunched, PoolSize
from ckptpipe.pyx.control_page import ControlPage, ControlPageError, sealed_bytes
from tests.preload.launched import FIXED, IMAGE, MIB, POOL, Launched
from tests.simcuda import SimWorld, Target


def test_what_is_handed_over_is_sealed_unnamed_and_ours_alone(world: SimWorld, driver: ctypes.CDLL) -> None:
    with Launched(world) as it:
        for descriptor, nbytes in ((it.attach_pool(), POOL), (it.control_fd, None)):
            found = os.fstat(descriptor)
            assert found.st_mode & 0o777 == 0o600
            assert found.st_nlink == 0
            assert not os.get_inheritable(descriptor)
            seals = fcntl.fcntl(descriptor, 1034)  # F_GET_SEALS
            assert seals == 1 | 2 | 4  # F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW
            assert sealed_bytes(descriptor) == (nbytes or found.st_size)
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, 0)
        flags = smaps_flags(it.pid, "memfd:ckptpipe-pool")
        assert {"dc", "dd"} <= flags, "neither into forks nor into core dumps"
        assert {"dc", "dd"} <= smaps_flags(it.pid, "memfd:ckptpipe-control")
        for number in os.listdir(f"/proc/{it.pid}/fd"):
            if "ckptpipe" in os.readlink(f"/proc/{it.pid}/fd/{number}"):
                info = Path(f"/proc/{it.pid}/fdinfo/{number}").read_text(encoding="ascii")
                mode = int(info.split("flags:")[1].split()[0], 8)
                assert mode & os.O_CLOEXEC


def smaps_flags(pid: int, name: str) -> set[str]:
    flags: set[str] | None = None
    here = False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            here = name in line
        elif here and line.startswith("VmFlags:"):
            found = set(line.split()[1:])
            flags = found if flags is None else flags & found
    assert flags is not None
    return flags


def test_a_process_that_was_not_launched_has_nothing(world: SimWorld, driver: ctypes.CDLL) -> None:
    with Target(world.environment(), [(0, MIB)], program=str(world.library / "plain_target")) as target:
        with pytest.raises(NotLaunched, match="ckptpipe launch"):
            Handover.connect(target.pid)
    with pytest.raises(NotLaunched, match="no process"):
        Handover.connect(target.pid)


CONNECT = """
import os, sys
from ckptpipe.pipeline.launch import Handover, HandoverFailed
os.setgid(65534)
os.setuid(65534)
try:
    Handover.connect(int(sys.argv[1])).attach()
except HandoverFailed as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(world: SimWorld, driver: ctypes.CDLL) -> None:
    with Launched(world) as it:
        done = subprocess.run(
            [sys.executable, "-c", CONNECT, str(it.pid)], capture_output=True, text=True, check=False
        )
        assert "another user" in done.stdout, done.stderr
        assert "as root" in done.stdout
        it.handover.arm()
        assert it.page.pool().armed == 1


def test_a_name_that_somebody_else_took_is_no_target(world: SimWorld, driver: ctypes.CDLL) -> None:
    with Launched(world) as it:
        stat = Path(f"/proc/{os.getpid()}/stat").read_text(encoding="ascii")
        start = stat[stat.rindex(")") + 2 :].split()[19]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.bind(f"\0ckptpipe/{os.getpid()}/{start}/0")
            other.listen()
            # It is ours, so the kernel says our pid: a target's it can never say.
            child = subprocess.run(
                [sys.executable, "-c", SQUATTED, str(os.getpid()), str(it.pid)],
                capture_output=True,
                text=True,
            )
        assert child.stdout == "connected\n", child.stderr


SQUATTED = """
import sys
from pathlib import Path
from ckptpipe.pipeline.launch import handover
assert handover.Handover.connect(int(sys.argv[1])).pid == int(sys.argv[1])
# The same name, but the one who listens is not the process that is asked about.
real, asked = Path.read_text, int(sys.argv[2])
def read_text(path, **how):
    return real(Path(str(path).replace(f"/proc/{asked}/", f"/proc/{sys.argv[1]}/")), **how)
Path.read_text = read_text
try:
    handover.Handover.connect(asked)
except handover.NotLaunched:
    print("connected")
"""


def test_pages_are_made_ready_when_they_are_asked_for(world: SimWorld, driver: ctypes.CDLL) -> None:
    with Launched(world, LaunchOptions(workers=2, budget=PoolSize(nbytes=POOL))) as it:
        assert it.handover.prepare(IMAGE) >= IMAGE
        assert it.page.pool().warm >= IMAGE
        with pytest.raises(HandoverFailed, match="smaller"):
            it.handover.prepare(POOL * 2)
        assert it.checkpoint() is not None
        it.restore()


def test_without_a_pool_the_control_page_says_why(world: SimWorld, driver: ctypes.CDLL) -> None:
    options = LaunchOptions(pool=PoolSize(nbytes=POOL), budget=PoolSize(nbytes=POOL))
    encoded = options.encode().replace(f"budget-bytes={POOL}", f"budget-bytes={4 * MIB}")
    with Launched(world, options, encoded=encoded) as it:
        pool = it.until(lambda pool: pool.state == "gone")
        assert (pool.reason, pool.nbytes) == ("budget", 0)
        assert it.pool_fd is None
        with pytest.raises(HandoverFailed, match="budget"):
            it.handover.prepare(IMAGE)
        assert it.checkpoint() is None
        assert it.page.pool().fallback_reason == "budget"
        it.restore()


def test_arming_ends_with_the_connection(world: SimWorld, driver: ctypes.CDLL) -> None:
    with Launched(world) as it:
        with Handover.connect(it.pid) as other:
            other.arm()
            it.handover.arm()
            assert it.page.pool().armed == 2
            it.handover.disarm()
        it.until(lambda pool: pool.armed == 0)


def test_too_many_at_a_time_are_told(world: SimWorld, driver: ctypes.CDLL) -> None:
    with Launched(world) as it:
        others = [Handover.connect(it.pid) for _ in range(7)]
        try:
            for other in others:
                other.arm()
            with Handover.connect(it.pid) as late, pytest.raises(HandoverFailed):
                late.arm()
        finally:
            for other in others:
                other.close()
        it.until(lambda pool: pool.armed == 0)
        with Handover.connect(it.pid) as again:
            again.arm()


def test_nonsense_is_answered_with_an_error(world: SimWorld, driver: ctypes.CDLL) -> None:
    with Launched(world) as it:
        for packet in (b"x", bytes(24), b"\xff" * 4096):
            it.handover._socket.send(packet)
            answer = it.handover._socket.recv(4096)
            assert int.from_bytes(answer[8:12], sys.byteorder) == 71  # EPROTO
        it.handover.arm()


def test_a_stopped_process_does_not_hang_its_caller(world: SimWorld, driver: ctypes.CDLL) -> None:
    with Launched(world) as it:
        os.kill(it.pid, 19)
        os.waitid(os.P_PID, it.pid, os.WSTOPPED | os.WNOWAIT)  # its threads stop one after the other
        try:
            with (
                Handover.connect(it.pid, timeout=0.2) as other,
                pytest.raises(HandoverFailed, match="kill -CONT"),
            ):
                other.arm()
        finally:
            os.kill(it.pid, 18)
        it.handover.arm()


def test_only_a_sealed_page_of_this_version_is_believed() -> None:
    descriptor = os.memfd_create("page", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, 65536)
        with pytest.raises(ControlPageError, match="not sealed"):
            ControlPage(descriptor)
        fcntl.fcntl(descriptor, 1033, 2 | 4)
        with pytest.raises(ControlPageError, match="something else"):
            ControlPage(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another network namespace")
def test_a_target_in_another_network_and_pid_namespace(world: SimWorld, driver: ctypes.CDLL) -> None:
    with Launched(world, FIXED, connect=False) as it:
        inside = subprocess.Popen(
            ["unshare", "--net", "--pid", "--fork", str(world.library / "plain_target"), "1", f"0:{MIB}"],
            env=it.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with inside:
            assert inside.stdout is not None
            assert inside.stdout.readline() == "ready 1\n", "its own id there"
            children = Path(f"/proc/{inside.pid}/task/{inside.pid}/children")
            pid = int(children.read_text(encoding="ascii").split()[0])
            with Handover.connect(pid) as handover:
                pool, control = handover.attach()
                with ControlPage(control) as page:
                    assert page.pool().pid == 1
                os.close(control)
                if pool is not None:
                    os.close(pool)
            assert inside.stdin is not None
            inside.stdin.close()
            assert inside.wait() == 0
