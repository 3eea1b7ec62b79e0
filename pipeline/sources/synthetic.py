"""A source that costs nothing to read: for benchmarks and tests of everything behind it."""

from __future__ import annotations

import random
from collections.abc import Iterator

from ckptpipe.pipeline.chunk import released_on_error
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.edge import Outlet
from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.parallel import in_parallel
from ckptpipe.pipeline.sources.abc import Source, Stream, fillers, scanned_chunk
from ckptpipe.pyx.staging import Lease

PATTERNS = ("random", "zeros")


class SyntheticSource(Source):
    """One stream ``host/synthetic`` of ``nbytes``. ``random``: each slot is filled once, then sent as it is, so
    that no byte is moved (the bytes repeat with the ring's period and are not reproducible); ``zeros``: zeros,
    found by the zero test like any other source's."""

    kind = "synthetic"

    def __init__(self, nbytes: int, pattern: str = "random") -> None:
        if pattern not in PATTERNS:
            raise UsageError(f"pattern {pattern!r} is not known", cure=f"take one of {', '.join(PATTERNS)}")
        if nbytes < 0:
            raise UsageError(f"a synthetic source of {nbytes} bytes is not possible")
        self.streams = [Stream("host/synthetic", "buffer", nbytes)]
        self.tree = []
        self.total_bytes = nbytes
        self._pattern = pattern
        self._filled: set[int] = set()

    async def open(self, context: GraphContext) -> None:
        self._context = context

    async def run(self, outlet: Outlet) -> None:
        context, ring = self._context, self._context.ring
        block = random.Random(1).randbytes(min(context.chunk_bytes, 1 << 20))
        work = self._work(context.chunk_bytes)

        async def fill() -> None:
            for number, nbytes in work:
                if outlet.dropped:
                    return
                with released_on_error(ring.try_acquire() or await ring.acquire()) as slot:
                    if slot.slot not in self._filled:
                        self._fill(slot, block)
                    chunk = await scanned_chunk(context, slot, 0, number, nbytes)
                await outlet.emit(chunk)

        await in_parallel(min(fillers(context), 4), fill)

    def _fill(self, slot: Lease, block: bytes) -> None:
        with memoryview(slot) as view:
            for offset in range(0, len(view), len(block)):
                part = min(len(block), len(view) - offset)
                view[offset : offset + part] = block[:part] if self._pattern == "random" else bytes(part)
            if self._pattern == "random":
                view[:4] = slot.slot.to_bytes(4, "little")
        self._filled.add(slot.slot)

    def _work(self, step: int) -> Iterator[tuple[int, int]]:
        total = self.streams[0].nbytes
        for number, offset in enumerate(range(0, total, step)):
            yield number, min(step, total - offset)

    async def aclose(self) -> None:
        return
