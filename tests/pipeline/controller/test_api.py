"""`ckptpipe.save(pid=…)`, `restore` and `recover`: by the controller that runs, or here; the same call either way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.controller.controller import Controller
from ckptpipe.pipeline.controller.errors import ControllerUnavailable
from ckptpipe.pipeline.controller.local import LocalController
from tests.pipeline.controller.machine import Machine, machine
from tests.pipeline.controller.stand_in import on_loop

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-python: pip install 'ckptpipe[gpu]'")

SETTINGS = ckptpipe.Settings(chunk_bytes=1 << 20, ring_bytes=16 << 20)


@pytest.fixture
def here(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with machine(workdir) as made, made.world.attached():
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(made.runtime))
        yield made


@pytest.mark.parametrize("where", ["controller", "here"])
def test_save_restore_recover(here: Machine, where: ckptpipe.Where) -> None:
    target = here.target()
    url = here.images / "a"

    async def body() -> None:
        saved = await ckptpipe.save(
            pid=target.pid, to=here.images, name="a", leave="checkpointed", settings=SETTINGS, where=where
        )
        assert saved.facts.processes[0].state == "CHECKPOINTED"
        restored = await ckptpipe.restore(str(url), pid=target.pid, settings=SETTINGS, where=where)
        assert restored.facts.processes[0].state == "RUNNING"
        async with await Controller.connect(where=where) as controller:
            await controller.act("lock", target.pid)
        recovered = await ckptpipe.recover(target.pid, where=where)
        assert (recovered.before, recovered.after) == ("LOCKED", "RUNNING")

    if where == "controller":
        with pytest.raises(ControllerUnavailable):
            on_loop(body)
        here.serve()
        before = here.world.calls("cuInit")
    on_loop(body)
    if where == "controller":
        assert here.world.calls("cuInit") == before, "this process did not touch the driver"
    target.check()


def test_auto_takes_the_controller_where_one_runs(here: Machine) -> None:
    async def body() -> None:
        async with await Controller.connect() as controller:
            assert isinstance(controller, LocalController)
        here.serve()
        before = here.world.calls("cuInit")
        await ckptpipe.save(pid=target.pid, to=str(here.images), name="a", settings=SETTINGS)
        assert here.world.calls("cuInit") == before

    target = here.target()
    on_loop(body)
    target.check()


def test_several_calls_of_one_local_controller_initialise_once(here: Machine) -> None:
    async def body() -> None:
        async with await Controller.connect(where="here") as controller:
            before = here.world.calls("cuInit")
            await controller.save(target.pid, to=str(here.images), name="a", settings=SETTINGS)
            assert (await controller.state(target.pid))[0].state == "RUNNING"
            assert here.world.calls("cuInit") == before + 1
            assert await controller.jobs() == ()

    target = here.target()
    on_loop(body)
    target.check()
