"""Saves of launched processes of many pieces that are looked at while the driver still checkpoints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import ckptpipe
from ckptpipe.pipeline.chunk import Chunk
from ckptpipe.pipeline.image.packer import Packer
from tests.pipeline.cuda.runs import KIB, saving
from tests.preload.launched import MANY, MIB, PIECE, Launched
from tests.simcuda import Fault, SimWorld

CHECKPOINT = "cuCheckpointProcessCheckpoint"
CHUNKS = sum(nbytes for _, nbytes in (*MANY, (0, 2 * MIB), (1, 2 * MIB))) // (256 * KIB)
BY_THE_MIDDLE = 9 * PIECE // (256 * KIB)
"""Chunks below the watermark when the simulated driver is half-way: the tenth piece is its second late one."""


def before_packing(monkeypatch: pytest.MonkeyPatch, look: Callable[[Chunk], Awaitable[None]]) -> None:
    """``look`` gets each chunk before the packer does; where it fails, the packer never does."""
    add = Packer.add

    async def looked(packer: Packer, chunk: Chunk) -> None:
        try:
            await look(chunk)
        except BaseException:
            chunk.release()
            raise
        await add(packer, chunk)

    monkeypatch.setattr(Packer, "add", looked)


class Arrived:
    """The chunks that the packer was given, and an event for when there are so many."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, count: int, then: Callable[[], Awaitable[None]] | None = None
    ):
        self.chunks: list[tuple[int, int]] = []
        self.enough = asyncio.Event()

        async def counted(chunk: Chunk) -> None:
            self.chunks.append((chunk.number, chunk.version))
            if len(self.chunks) >= count:
                self.enough.set()
                if then is not None:
                    await then()

        before_packing(monkeypatch, counted)


async def begun(
    world: SimWorld,
    it: Launched,
    to: object,
    enough: asyncio.Event | None = None,
    *,
    point: str = "middle",
    error: str = "CUDA_SUCCESS",
    **options: Any,
) -> tuple[Fault, asyncio.Task[ckptpipe.SaveResult]]:
    """A save, when it has gone on until ``enough``, and the driver's call, which is held half-way."""
    fault = world.fault(CHECKPOINT, point=point, error=error, hold=True, target=it.pid)
    task = asyncio.create_task(saving(it.pid, to, capture="launch", **options))
    await asyncio.to_thread(fault.wait)
    if enough is not None:
        await enough.wait()
    return fault, task


async def in_the_middle(
    world: SimWorld, it: Launched, to: object, arrived: Arrived, *, point: str = "middle", **options: Any
) -> ckptpipe.SaveResult:
    """Save; the driver is held half-way until the sink has got what is complete by then."""
    fault, task = await begun(world, it, to, arrived.enough, point=point, **options)
    try:
        assert world.process(it.pid).state == ("LOCKED" if point == "middle" else "CHECKPOINTED")
    finally:
        fault.release()
    return await task


def again(result: ckptpipe.SaveResult) -> tuple[int, int]:
    """(sent early, of these sent again), as the result says."""
    (note,) = (note for note in result.facts.notes if "while the driver worked" in note)
    words = note.split()
    at = words.index("chunks")
    return int(words[at - 3]), int(words[words.index("again,") - 3])


def builds(runtime: Path) -> list[bool]:
    """Which builds of the driver were found to write through the capture library alone."""
    try:
        return list(json.loads((runtime / "driver-builds.json").read_text()).values())
    except FileNotFoundError:
        return []
