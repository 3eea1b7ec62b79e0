"""Launched processes through the command line: evicted and brought back, by the controller and without one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.controller.machine import SMALL, Machine, machine

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-python: pip install 'ckptpipe[gpu]'")

from tests.preload.launched import FIXED, MANY, Launched


@pytest.fixture
def here(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with machine(workdir) as made:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(made.runtime))
        yield made


@pytest.mark.parametrize("controller", [True, False])
def test_evicted_and_brought_back(here: Machine, controller: bool) -> None:
    if controller:
        here.serve()
    with Launched(here.world) as it:
        pid, to = str(it.pid), str(here.images)
        save = ("save", "--pid", pid, "--to", to, "--capture", "launch", *SMALL)
        here.run(*save, "--name", "snapshot")
        it.target.check()
        told = here.run(*save, "--name", "a", "--evict", "--leave", "running", code=2)
        assert "--evict leaves the process checkpointed" in told
        saved = here.json(*save, "--name", "a", "--evict")
        assert saved["facts"]["capture"] == "launch (simulated)"
        assert saved["facts"]["processes"][0]["state"] == "CHECKPOINTED"
        assert any("evicted, " in note for note in saved["facts"]["notes"])
        (image,) = it.page.images()
        assert image.gate == "closed" and not any(it.read(image))
        told = here.run("action", "restore", "--pid", pid, code=1)
        assert "was evicted" in told and f"ckptpipe restore nvme:{to}/a --pid {pid}" in told
        if controller:
            (report,) = here.json("state", "--pid", pid)
            assert report["advice"] == f"ckptpipe restore nvme:{to}/a --pid {pid}"
        here.run("restore", f"{to}/a", "--pid", pid, *SMALL)
        it.target.check()
        here.run(*save, "--name", "b", "--evict")
        assert f"{to}/b" in here.run("recover", "--pid", pid)
        it.target.check()
        here.run(*save, "--name", "c", "--evict")
        here.run("restore", f"{to}/c", "--pid", pid, "--early-start", *SMALL)
        it.target.check()


def test_evict_goes_with_pid(here: Machine) -> None:
    assert "--evict goes with --pid" in here.run("save", "x", "--to", "y", "--evict", code=2)


def test_a_controller_that_is_killed_while_the_driver_checkpoints(here: Machine) -> None:
    with Launched(here.world) as it:
        pid, to = str(it.pid), str(here.images)
        server = here.serve()
        held = here.world.fault("cuCheckpointProcessCheckpoint", point="middle", hold=True, target=it.pid)
        save = ("save", "--pid", pid, "--to", to, "--capture", "launch", "--evict", *SMALL)
        client = here.start(*save, "--name", "a")
        held.wait()
        server.kill()
        told = client.communicate(timeout=60)[1]
        assert client.returncode == 1 and "controller" in told
        held.release()
        it.until(lambda pool: not pool.armed and here.state(it.target) == "CHECKPOINTED")
        here.serve()
        (report,) = here.json("state", "--pid", pid)
        assert (report["state"], report["busy"], report["images"]) == ("CHECKPOINTED", "", [])
        assert f"recover --pid {pid}" in report["advice"]
        here.run("recover", "--pid", pid)
        it.target.check()
        here.run("gc", to, "--older-than", "0")
        here.run(*save, "--name", "a")
        here.run("restore", f"{to}/a", "--pid", pid, "--early-start", *SMALL)
        it.target.check()


@pytest.mark.parametrize("then", ["another takes over", "nobody comes"])
def test_a_controller_that_is_killed_while_the_driver_restores(here: Machine, then: str) -> None:
    with Launched(here.world, FIXED, MANY, errors=subprocess.DEVNULL) as it:
        pid, to = str(it.pid), str(here.images)
        server = here.serve()
        here.run("save", "--pid", pid, "--to", to, "--capture", "launch", "--evict", "--name", "a", *SMALL)
        held = here.world.fault("cuCheckpointProcessRestore", point="middle", hold=True, target=it.pid)
        back = ("restore", f"{to}/a", "--pid", pid, "--early-start", *SMALL)
        client = here.start(*back)
        held.wait()
        it.page.deadlines(still=60, orphaned=60 if then == "another takes over" else 0.2)
        server.kill()
        told = client.communicate(timeout=60)[1]
        assert client.returncode == 1 and "controller" in told
        held.release()
        unlocks = here.world.calls("cuCheckpointProcessUnlock")
        if then == "nobody comes":
            assert it.target.wait() == 74 and "nobody feeds it" in it.page.pool().failure
            assert here.world.calls("cuCheckpointProcessUnlock") == unlocks
            assert f"no process with pid {pid}" in here.run(*back, code=1)
            return
        it.until(lambda pool: pool.gate_waiters > 0)
        here.serve()
        here.run(*back)
        it.target.check()
