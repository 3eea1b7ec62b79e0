"""What the graph lends to a backend, lent by a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ckptpipe.pyx.io_engine import EngineName, open_engine
from ckptpipe.pyx.workers import WorkerPool
from ckptpipe.storage_backends.abc import BackendContext


@asynccontextmanager
async def lent_context(
    *, io_engine: EngineName = "auto", depth: int = 32, workers: int = 2, inflight_bytes: int = 128 << 20
) -> AsyncIterator[BackendContext]:
    """An engine and a worker pool on the running loop, closed at the end."""
    engine = open_engine(io_engine, depth=depth)
    try:
        pool = WorkerPool(workers)
        try:
            yield BackendContext(engine, pool, inflight_bytes)
        finally:
            await pool.aclose()
    finally:
        await engine.aclose()
