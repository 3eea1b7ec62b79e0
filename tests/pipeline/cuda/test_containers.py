"""Processes in containers, of other users, and where the kernel forbids to trace: served, or refused with the cure."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import ckptpipe
from ckptpipe.pipeline.cuda.target import Target as Process
from ckptpipe.pipeline.launch import LaunchOptions, environment
from ckptpipe.pyx.staging import leaked, outstanding
from tests.pipeline.cuda.early import builds
from tests.pipeline.cuda.launched import SMALL, Launch, record
from tests.pipeline.cuda.runs import SETTINGS, Spawn, recover, restore, runs, save
from tests.pipeline.runs import run
from tests.preload.launched import BUFFERS, FIXED, MIB
from tests.simcuda import SimWorld, Target

as_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can make namespaces and become another user"
)

INSIDE = """
mkdir -p "$SIMCUDA_PROC" && mount --rbind /proc "$SIMCUDA_PROC" && mount -t proc proc /proc || exit 9
mount -t tmpfs tmpfs "$XDG_RUNTIME_DIR" || exit 9
exec "$0" "$@"
"""


class Contained(Target):
    """A target with PID, mount and network namespaces of its own: there its id is 1, /proc is its own, and the
    runtime directory is another one. ``pid`` is its id out here."""

    def __init__(self, world: SimWorld, options: LaunchOptions, folder: Path, buffers: Sequence[Any]) -> None:
        self.buffers, self.seed, self.steps, self._plain = tuple(buffers), 1, 0, True
        program = [str(world.library / "plain_target"), "1", *(f"{gpu}:{nbytes}" for gpu, nbytes in buffers)]
        self._child = subprocess.Popen(
            ["unshare", "--pid", "--mount", "--net", "--fork", "--kill-child", "sh", "-c", INSIDE, *program],
            env=environment(options, world.environment(SIMCUDA_PROC=str(folder / "proc"))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        try:
            assert self._line().split() == ["ready", "1"], "its own id there"
            children = Path(f"/proc/{self._child.pid}/task/{self._child.pid}/children")
            self.pid = int(children.read_text(encoding="ascii").split()[0])
        except BaseException:
            self.kill()
            raise


@pytest.fixture
def contained(world: SimWorld, tmp_path: Path) -> Iterator[Callable[..., Contained]]:
    started: list[Contained] = []

    def start(options: LaunchOptions = FIXED, buffers: Sequence[Any] = BUFFERS) -> Contained:
        started.append(Contained(world, options, tmp_path / f"{len(started)}", buffers))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@as_root
def test_a_target_in_a_container(
    world: SimWorld, contained: Callable[..., Contained], workdir: Path, runtime: Path
) -> None:
    target = contained()
    for cycle in range(3):
        result = save(target, workdir, name=f"{cycle}", capture="launch", evict=cycle > 0)
        assert result.facts.capture == "launch (simulated)"
        assert result.facts.processes[0].pid == target.pid
        if cycle:
            assert any("bytes of its pool were given back" in note for note in result.facts.notes)
            restore(workdir / f"{cycle}", target, early_start=cycle > 1)
        runs(world, target, runtime)
        assert outstanding() == 0 and leaked() == 0
    assert False not in builds(runtime)
    manifest = run(ckptpipe.show(str(workdir / "0")))
    assert manifest["process"]["processes"][0]["pid"] == target.pid


@as_root
def test_two_containers_are_evicted_together(
    world: SimWorld, contained: Callable[..., Contained], workdir: Path, runtime: Path
) -> None:
    """Each of the two is process 1 at its home."""
    both = [contained(FIXED, ((0, 3 * MIB + 5000),)), contained(FIXED, ((1, 2 * MIB),))]
    options: dict[str, Any] = {"processes": [each.pid for each in both], "settings": SETTINGS}
    run(ckptpipe.save(to=workdir, name="a", capture="launch", evict=True, **options))
    run(ckptpipe.restore(str(workdir / "a"), early_start=True, **options))
    for target in both:
        runs(world, target, runtime)


@as_root
def test_a_container_whose_pool_is_too_small(
    world: SimWorld, contained: Callable[..., Contained], workdir: Path, runtime: Path
) -> None:
    target = contained(SMALL, ((0, 8 * MIB),))
    result = save(target, workdir, capture="launch", leave="checkpointed")
    assert result.facts.capture == "driver-image (simulated)"
    restore(workdir / "a", target)
    runs(world, target, runtime)


# -- where tracing is forbidden -------------------------------------------------------------------------

WITHOUT_TRACING = """
import asyncio, ctypes, os, sys
if len(sys.argv) == 5:
    assert ctypes.CDLL(None).prctl(24, 19, 0, 0, 0) == 0  # PR_CAPBSET_DROP of CAP_SYS_PTRACE: gone with the next exec
    os.execv(sys.executable, [sys.executable, "-c", sys.orig_argv[2], *sys.argv[1:], "dropped"])
import ckptpipe
pid, to, capture, how = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
settings = ckptpipe.Settings(chunk_bytes=256 << 10, ring_bytes=4 << 20, workers=2)
async def main():
    options = {"evict": True} if how == "evict" else {"leave": "checkpointed"}
    try:
        result = await ckptpipe.save(pid=pid, to=to, name="a", capture=capture, settings=settings, **options)
        print(result.facts.capture)
        await ckptpipe.restore(to + "/a", pid=pid, early_start=how == "evict", settings=settings)
        print("restored")
    except ckptpipe.CkptpipeError as error:
        print(type(error).__name__, error, *getattr(error, "__notes__", ()), sep="; ")
asyncio.run(main())
"""


def said(world: SimWorld, script: str, *arguments: object) -> str:
    """What a script prints on that machine, from a folder that everybody may read."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(
        command, env=world.environment(), capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def without_tracing(world: SimWorld, target: Target, to: Path, capture: str, how: str = "") -> str:
    """A save and a restore by somebody who may not read the target's memory; what came of it."""
    return said(world, WITHOUT_TRACING, target.pid, to, capture, how)


@as_root
@pytest.mark.parametrize("how", ["evict", "leave"])
def test_a_pool_needs_no_permission_to_trace(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path, how: str
) -> None:
    it = launch()
    for _ in range(2):
        assert without_tracing(world, it.target, workdir, "launch", how) == "launch (simulated)\nrestored\n"
        runs(world, it.target, runtime)
        run(ckptpipe.delete(str(workdir / "a")))


@as_root
def test_a_driver_image_is_refused_before_the_process_is_touched(
    world: SimWorld, spawn: Spawn, workdir: Path, runtime: Path
) -> None:
    target = spawn(world)
    told = without_tracing(world, target, workdir, "driver-image")
    assert "may not be read" in told and "CAP_SYS_PTRACE" in told and "ckptpipe launch" in told
    assert world.calls("cuCheckpointProcessLock") == 0
    runs(world, target, runtime)


@as_root
def test_a_pool_that_is_too_small_where_tracing_is_forbidden(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path
) -> None:
    """Where the driver's image went, nobody may read: the process is brought back."""
    it = launch(SMALL, ((0, 8 * MIB),))
    told = without_tracing(world, it.target, workdir, "launch")
    assert "CAP_SYS_PTRACE" in told and "RUNNING again" in told
    runs(world, it.target, runtime)


@pytest.mark.parametrize(
    ("scope", "cure"),
    [
        (None, "or run as root or with CAP_SYS_PTRACE (containers: --cap-add SYS_PTRACE)"),
        ("0", "or run as root or with CAP_SYS_PTRACE (containers: --cap-add SYS_PTRACE)"),
        ("1", "set kernel.yama.ptrace_scope=0"),
        ("2", "set kernel.yama.ptrace_scope=0"),
        ("3", "3 cannot be changed"),
    ],
)
def test_the_cure_is_that_of_the_kernels_setting(
    spawn: Spawn, world: SimWorld, tmp_path: Path, scope: str | None, cure: str
) -> None:
    target = spawn(world)
    for name in (f"proc/{target.pid}/stat", f"proc/{target.pid}/status", "proc/sys/kernel/random/boot_id"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(Path("/", name).read_text(encoding="utf-8"))
    if scope is not None:
        yama = tmp_path / "proc/sys/kernel/yama/ptrace_scope"
        yama.parent.mkdir()
        yama.write_text(f"{scope}\n")
    process = Process.open(target.pid, tmp_path)
    try:
        text = str(process.not_permitted())
    finally:
        process.close()
    assert cure in text and "ckptpipe launch" in text
    assert (f"ptrace_scope is {scope}" in text) == (scope in ("1", "2", "3"))


# -- other users ----------------------------------------------------------------------------------------

AS_NOBODY = """
import asyncio, os, sys, tempfile
import ckptpipe, ckptpipe.pipeline.cuda.save
ckptpipe.save, ckptpipe.recover  # imported now: later, a home of root's cannot be read any more
from cuda.bindings import driver
driver.cuDriverGetVersion()
ckptpipe.pipeline.cuda.target.Target.open(int(sys.argv[1])).close()
os.setgid(65534)
os.setuid(65534)
folder = tempfile.mkdtemp()
os.environ["XDG_RUNTIME_DIR"] = folder
async def main():
    for work in (
        lambda: ckptpipe.save(pid=int(sys.argv[1]), to=folder, capture="launch"),
        lambda: ckptpipe.recover(int(sys.argv[1])),
    ):
        try:
            await work()
        except ckptpipe.CkptpipeError as error:
            print(type(error).__name__, error)
asyncio.run(main())
os.rmdir(folder)
"""


@as_root
@pytest.mark.parametrize("state", ["running", "evicted"])
def test_the_process_of_another_user(
    world: SimWorld, launch: Launch, workdir: Path, runtime: Path, state: str
) -> None:
    it = launch()
    if state == "evicted":
        save(it.pid, workdir, capture="launch", evict=True)
    for path in (world.directory, *world.directory.iterdir()):
        path.chmod(0o777)
    locks = world.calls("cuCheckpointProcessLock")
    lines = said(world, AS_NOBODY, it.pid).splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("TargetError") and "belongs to user 0, not to user 65534" in line
        assert "or as root" in line
    assert world.calls("cuCheckpointProcessLock") == locks
    if state == "evicted":
        assert record(runtime, it)["evicted"] is True
        recover(it.target)
    runs(world, it.target, runtime)
