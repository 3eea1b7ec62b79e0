"""Programs that must not notice: forks, execs, threads, signals, allocators, no CUDA at all."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptpipe.pipeline.launch import Handover, LaunchOptions, NotLaunched, PoolSize, environment
from ckptpipe.pyx.control_page import ControlPage
from tests.preload.launched import FIXED, IMAGE, MIB, Launched, memory
from tests.simcuda import SimWorld

PROGRAMS = Path(__file__).resolve().parent / "programs"


def compiled(folder: Path, name: str, *options: str) -> Path:
    program = folder / name
    subprocess.run(
        [
            "cc",
            "-std=gnu11",
            "-O1",
            "-Wall",
            "-o",
            program,
            PROGRAMS / f"{name}.c",
            *options,
            "-pthread",
            "-ldl",
        ],
        check=True,
    )
    return program


def run(
    command: Sequence[str | Path], env: dict[str, str], **how: object
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, **how)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("hook", ["auto", "symbols"])
@pytest.mark.parametrize(
    "command",
    [
        ["sh", "-c", "echo hello | cat; exit 3"],
        [sys.executable, "-c", "print('hello'); raise SystemExit(3)"],
        ["awk", 'BEGIN { print "hello"; exit 3 }'],
    ],
    ids=["shell", "python", "awk"],
)
def test_a_program_without_cuda_is_as_it_was(command: list[str], hook: str) -> None:
    done = run(command, environment(LaunchOptions(hook=hook), os.environ))  # type: ignore[arg-type]
    assert (done.returncode, done.stdout, done.stderr) == (3, "hello\n", "")


def test_a_program_without_cuda_has_no_thread_no_pool_and_no_descriptor() -> None:
    script = "import os; print(len(os.listdir('/proc/self/task')), len(os.listdir('/proc/self/fd')))"
    plain = run([sys.executable, "-c", script], dict(os.environ))
    launched = run([sys.executable, "-c", script], environment(FIXED, os.environ))
    assert launched.stdout == plain.stdout
    script = "print('ckptpipe-' in open('/proc/self/maps').read())"
    assert run([sys.executable, "-c", script], environment(FIXED, os.environ)).stdout == "False\n"


def test_a_static_binary(tmp_path: Path) -> None:
    program = compiled(tmp_path, "static", "-static")
    done = run([program], environment(FIXED, os.environ))
    assert (done.returncode, done.stdout, done.stderr) == (0, "static\n", "")


@pytest.mark.parametrize("hook", ["auto", "symbols"])
def test_a_program_with_the_address_sanitizer(tmp_path: Path, hook: str) -> None:
    """It stands in front of mmap and memcpy itself, and wants to be first."""
    try:
        program = compiled(tmp_path, "static", "-fsanitize=address")
    except subprocess.CalledProcessError:
        pytest.skip("the compiler has no address sanitizer")
    done = run([program], environment(LaunchOptions(hook=hook), os.environ))  # type: ignore[arg-type]
    assert (done.returncode, done.stdout, done.stderr) == (0, "static\n", "")


def test_a_program_with_its_own_allocator(world: SimWorld, driver: ctypes.CDLL, tmp_path: Path) -> None:
    """Its malloc calls mmap before any constructor has run, and with every flag that an image has."""
    with Launched(world, program=str(compiled(tmp_path, "allocator"))) as it:
        for _ in range(2):
            assert it.checkpoint() is not None
            it.restore()
            it.target.check()
        assert it.page.pool().fallbacks == 0
        assert it.target.finish() == 0


def test_other_preloaded_libraries_are_kept(world: SimWorld, driver: ctypes.CDLL, tmp_path: Path) -> None:
    """One that stands in front of mmap, munmap and memcpy itself; ours goes on to it."""
    other = compiled(tmp_path, "other", "-shared", "-fPIC", "-fno-builtin")
    log = tmp_path / "log"
    with Launched(world, LD_PRELOAD=str(other), OTHER_LOG=str(log)) as it:
        assert str(other) in it.environment["LD_PRELOAD"]
        for _ in range(2):
            assert it.checkpoint() is not None
            it.restore()
            it.target.check()
        assert it.page.pool().fallbacks == 0
        assert it.target.finish() == 0
    assert "mmap" in log.read_text(encoding="ascii")


@pytest.mark.parametrize("how", ["fork", "vfork", "exec", "threads", "signals", "close"])
def test_a_busy_process(world: SimWorld, driver: ctypes.CDLL, tmp_path: Path, how: str) -> None:
    """programs/restless.c is plain_target that does ``how`` all the while, cycles included."""
    errors = tmp_path / "errors"
    restless = compiled(tmp_path, "restless", f"-I{PROGRAMS}")
    with errors.open("w") as sink:
        with Launched(
            world, program=str(restless), RESTLESS=how, errors=sink.fileno(), connect=how != "close"
        ) as it:
            for _ in range(3):
                it.target.check()
                if how == "close":
                    from tests.simcuda.driver import checkpoint, lock

                    assert lock(it.pid) == "SUCCESS"
                    assert checkpoint(it.pid) == "SUCCESS"
                else:
                    assert it.checkpoint() is not None
                it.restore()
            it.target.check()
            if how != "close":
                assert it.page.pool().served == 3
            assert it.target.finish() == 0
    assert errors.read_text(encoding="ascii") == ""


def test_a_forked_child_does_not_keep_the_pool(world: SimWorld, driver: ctypes.CDLL, tmp_path: Path) -> None:
    """It has neither the pool's mapping nor a descriptor of it: with its parent the memory goes."""
    restless = compiled(tmp_path, "restless", f"-I{PROGRAMS}")
    with Launched(world, program=str(restless), RESTLESS="child") as it:
        it.until(lambda pool: pool.state == "ready")
        (child,) = Path(f"/proc/{it.pid}/task/{it.pid}/children").read_text(encoding="ascii").split()
        try:
            held = [os.readlink(f"/proc/{child}/fd/{each}") for each in os.listdir(f"/proc/{child}/fd")]
            assert not [name for name in held if "ckptpipe" in name]
            assert "ckptpipe-pool" not in Path(f"/proc/{child}/maps").read_text(encoding="utf-8")
            with pytest.raises(NotLaunched):
                Handover.connect(int(child))
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_a_new_program_in_the_same_process_has_a_pool_of_its_own(
    world: SimWorld, driver: ctypes.CDLL
) -> None:
    """exec: the old pool is gone, the new image of the process makes another under the same pid."""
    plain = world.library / "plain_target"
    script = f"import ctypes, os; l = ctypes.CDLL('libcuda.so.1'); assert l.cuInit(0) == 0; os.execv('{plain}', ['{plain}', '1', '0:{MIB}'])"
    env = environment(FIXED, world.environment())
    with subprocess.Popen([sys.executable, "-c", script], env=env, stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == f"ready {child.pid}\n"
        with Handover.connect(child.pid) as handover:
            pool, control = handover.attach()
            with ControlPage(control) as page:
                assert page.pool().generation == 0
            os.close(control)
            if pool is not None:
                os.close(pool)
        assert memory(child.pid, "RssShmem") < 2 * 64 * MIB
        child.stdin.close()
        assert child.wait() == 0


def test_a_child_that_uses_cuda_first_in_itself(world: SimWorld, driver: ctypes.CDLL) -> None:
    """The parent has loaded libcuda and not used it, as with multiprocessing's fork: the child's pool is its own."""
    script = (
        "import ctypes, os, sys\n"
        "library = ctypes.CDLL('libcuda.so.1')\n"
        "child = os.fork()\n"
        "if child: sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "assert library.cuInit(0) == 0\n"
        "print('ready', os.getpid(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    env = environment(FIXED, world.environment())
    with subprocess.Popen([sys.executable, "-c", script], env=env, stdin=-1, stdout=-1, text=True) as parent:
        assert parent.stdout is not None and parent.stdin is not None
        pid = int(parent.stdout.readline().split()[1])
        with pytest.raises(NotLaunched):
            Handover.connect(parent.pid)
        with Handover.connect(pid) as handover:
            handover.prepare(IMAGE)
        parent.stdin.close()
        assert parent.wait() == 0


@pytest.mark.skipif(shutil.which("python3") is None, reason="needs another interpreter")
def test_every_process_of_a_tree_has_its_own_pool_within_one_budget(
    world: SimWorld, driver: ctypes.CDLL, runtime: Path
) -> None:
    options = LaunchOptions(pool=PoolSize(nbytes=32 * MIB), budget=PoolSize(nbytes=64 * MIB), workers=1)
    with Launched(world, options, [(0, MIB)]) as first:
        first.until(lambda pool: pool.state == "ready")
        encoded = first.environment["CKPTPIPE_LAUNCH"]  # the same tree
        with Launched(world, options, [(0, MIB)], encoded=encoded) as second:
            assert second.until(lambda pool: pool.state != "absent").state in ("warming", "ready")
            with Launched(world, options, [(0, MIB)], encoded=encoded) as third:
                pool = third.until(lambda pool: pool.state == "gone")
                assert (pool.reason, pool.budget_bytes, pool.budget_used) == ("budget", 64 * MIB, 64 * MIB)
                assert third.checkpoint() is None
                third.restore()
                third.target.check()
        # Both were killed: the kernel let their seats go.
        with Launched(world, options, [(0, MIB)], encoded=encoded) as fourth:
            assert fourth.until(lambda pool: pool.state != "absent").state in ("warming", "ready")
            assert fourth.target.finish() == 0
        (budget,) = (runtime / "ckptpipe" / "budgets").iterdir()
        assert budget.stat().st_mode & 0o777 == 0o600
        assert first.target.finish() == 0
    assert not list((runtime / "ckptpipe" / "budgets").iterdir()), "the last one out removes it"


def test_the_budget_of_a_killed_tree_is_forgotten_by_the_next_launch(
    world: SimWorld, driver: ctypes.CDLL, runtime: Path
) -> None:
    with Launched(world) as it:
        it.until(lambda pool: pool.state == "ready")
    assert len(list((runtime / "ckptpipe" / "budgets").iterdir())) == 1
    environment(FIXED, os.environ)
    assert not list((runtime / "ckptpipe" / "budgets").iterdir())
