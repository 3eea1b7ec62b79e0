"""Running operations in tests: small chunks and rings, and backends that are broken on purpose."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ckptpipe.pipeline.context import GraphContext, graph_context
from ckptpipe.pipeline.image.layout import parse_object_name
from ckptpipe.pipeline.loop import new_event_loop
from ckptpipe.pipeline.settings import Settings
from ckptpipe.pipeline.sinks import image
from ckptpipe.storage_backends.abc import Backend, BackendContext
from ckptpipe.storage_backends.registry import open_backend
from ckptpipe.storage_backends.wrappers.faulty import Fault, Faults, FaultyBackend

T = TypeVar("T")

KIB = 1 << 10
MIB = 1 << 20
MEMORY_NEEDED = 512 * MIB
SMALL = Settings(chunk_bytes=64 * KIB, ring_bytes=2 * MIB, workers=2, codec_threads=2)
TIGHT = Settings(chunk_bytes=64 * KIB, ring_bytes=8 * 64 * KIB, workers=1, codec_threads=1)


def run(work: Coroutine[Any, Any, T]) -> T:
    """On the loop that commands run on (uvloop), or asyncio's own where CKPTPIPE_TEST_LOOP asks for it."""
    factory = None if os.environ.get("CKPTPIPE_TEST_LOOP") == "asyncio" else new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


def in_context(body: Callable[[GraphContext], Coroutine[Any, Any, T]], settings: Settings = SMALL) -> T:
    async def main() -> T:
        async with graph_context(settings) as context:
            return await body(context)

    return run(main())


@pytest.fixture(name="workdir")
def memory_dir(tmp_path: Path) -> Iterator[Path]:
    """In place of a folder on a disk, for tests of what happens and not of how bytes are stored: a folder in
    memory, where syncing costs nothing. A module takes it by importing it."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or shutil.disk_usage(memory).free < MEMORY_NEEDED:
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(prefix="ckptpipe-test-", dir=memory))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def break_sink(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Faults], Faults]:
    """``break_sink(part of a URL, faults)``: image sinks of such URLs get a faulty backend."""
    planned: dict[str, Faults] = {}

    async def opened(
        url: str, context: BackendContext, options: Mapping[str, object] | None = None
    ) -> Backend:
        backend = await open_backend(url, context, options)
        faults = next((faults for part, faults in planned.items() if part in url), None)
        return backend if faults is None else FaultyBackend(backend, faults)

    monkeypatch.setattr(image, "open_backend", opened)

    def plan(part: str, faults: Faults) -> Faults:
        planned[part] = faults
        return faults

    return plan


@asynccontextmanager
async def while_held(held: Fault, work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """``work`` as a task, which stands at ``held`` until this is left."""
    task = asyncio.get_running_loop().create_task(work)
    await held.reached.wait()
    yield task
    held.release.set()


def saves_at(image: Path) -> int:
    """How many saves have left objects in an image's directory: one, where nothing of another one is left."""
    parsed = [parse_object_name(path.name) for path in image.iterdir()]
    assert None not in parsed
    return len({name.save_id for name in parsed if name is not None and name.save_id})
