"""A queue of copies that loads files: for tests of the file loader."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ckptpipe.pyx import cuda
from tests.pyx.gpu import Machine

PIECE = 64 << 10
PLAN = cuda.LoadPlan(threads=2, buffers=4, copy_bytes=PIECE, part_bytes=PIECE // 4)


class Loading:
    """A queue with a loader, closed in order."""

    def __init__(self, gpus: Machine, plan: cuda.LoadPlan = PLAN, **options: Any) -> None:
        self._gpus, self._plan, self._options = gpus, plan, options

    async def __aenter__(self) -> cuda.CopyQueue:
        context = self._gpus.context(0)
        self.queue = cuda.CopyQueue(0, context, **self._options)
        self.loader = await cuda.FileLoader.open(self.queue, context, self._plan)
        return self.queue

    async def __aexit__(self, *exc: object) -> None:
        await self.loader.aclose()
        await self.queue.aclose()


def load_threads() -> int:
    names = []
    for entry in os.listdir("/proc/self/task"):
        try:
            names.append(Path(f"/proc/self/task/{entry}/comm").read_text(encoding="ascii").strip())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return names.count("ckpt-cuda-load")
