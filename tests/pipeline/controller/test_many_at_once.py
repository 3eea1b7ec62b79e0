"""Several processes saved, cancelled, recovered and restored at the same time, by chance; their sums stay right."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from pathlib import Path

import pytest

from ckptpipe.pipeline.controller.controller import Controller
from ckptpipe.pipeline.settings import Settings
from tests.pipeline.controller.machine import Machine, machine
from tests.pipeline.controller.stand_in import on_loop, until
from tests.simcuda import Target

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-python: pip install 'ckptpipe[gpu]'")

QUICK = Settings(chunk_bytes=1 << 20, ring_bytes=16 << 20)


def test_whatever_happens_every_process_goes_on(workdir: Path) -> None:
    chance = random.Random(11)

    async def rounds(here: Machine, controller: Controller, target: Target, number: int) -> None:
        for turn in range(3):
            save = asyncio.create_task(
                controller.save(
                    target.pid,
                    to=str(here.images),
                    name=f"{number}-{turn}",
                    capture=chance.choice(["custom-storage", "driver-image"]),  # type: ignore[arg-type]
                    leave=chance.choice(["running", "checkpointed"]),  # type: ignore[arg-type]
                    settings=QUICK,
                )
            )
            if chance.random() < 0.6:  # anywhere: before it begins, in the middle, after its end
                await asyncio.wait({save}, timeout=chance.random() * 0.5)
                save.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await save
            await _bring_back(here, controller, target, f"{number}-{turn}-again")
            await asyncio.to_thread(target.check)

    with machine(workdir) as here:
        targets = [here.target() for _ in range(3)]
        server = here.serve()
        descriptors = f"/proc/{server.pid}/fd"
        before = len(os.listdir(descriptors))

        async def body() -> None:
            async with await here.connect() as controller:
                async with asyncio.TaskGroup() as group:
                    for number, target in enumerate(targets):
                        group.create_task(rounds(here, controller, target, number))
            await until(lambda: len(os.listdir(descriptors)) == before)

        on_loop(body)
        server.terminate()
        assert server.stderr is not None
        assert "Traceback" not in server.stderr.read()
        assert server.wait() == 0
        assert here.left() == []


async def _bring_back(here: Machine, controller: Controller, target: Target, name: str) -> None:
    """As the report of its state advises."""
    (report,) = await controller.state(target.pid)
    if report.state == "CHECKPOINTING":
        assert "recover" in report.advice
        await controller.recover(target.pid, to=str(here.images), name=name, leave="running", settings=QUICK)
    elif report.images:
        await controller.restore(report.images[0], target.pid, settings=QUICK)
    elif report.state != "RUNNING":
        await controller.recover(target.pid, settings=QUICK)
    assert (await controller.state(target.pid))[0].state == "RUNNING"
