"""Compress what the sink has no time for: each chunk coded or raw, whichever gets it stored sooner."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Sequence

from ckptpipe.pipeline.chunk import Chunk
from ckptpipe.pipeline.codecs import CodecChoice
from ckptpipe.pipeline.codecs.choices_made import SMALLEST, ChoicesMade
from ckptpipe.pipeline.codecs.chooser import Chooser, Kind
from ckptpipe.pipeline.codecs.cpu_budget import CpuBudget
from ckptpipe.pipeline.codecs.encoding import TRANSFORM_AUTO, Encoding
from ckptpipe.pipeline.codecs.sink_rate import SinkRate
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.edge import Edge, Outlet
from ckptpipe.pipeline.parallel import in_parallel
from ckptpipe.pipeline.stages.abc import ChoosingStage, pass_each
from ckptpipe.pipeline.stages.compress import encode_chunk
from ckptpipe.pyx.staging import StagingRing

NICE = 10
"""What codec threads are nicer than the rest: copies, checksums and writes come first where CPUs are short."""
RECENT = 16
"""Chunks over which the share of coded bytes is held to what CPUs there are."""
SAMPLED = 1 << 20
"""Bytes; a stream whose first chunk is at least this large gets a look of its own."""
LOOK_SECONDS = 2e-3
"""Where the sink has that much to do, another look at bytes that were not worth coding costs nothing."""
LOOK_WORTH_SECONDS = 5e-3
PASSED_BY = 4
"""… and where the sink takes a chunk in less than that time, every fourth gets one."""
LEISURE = 20e6
"""Bytes a second for which ``leisure`` takes the sink: what is small counts, within what CPUs can do."""


class AutoStage(ChoosingStage):
    """Codes a chunk where that gets it into the sink sooner, and passes it on raw where it does not.

    A chunk waits for a codec thread only as long as the sink has enough to do: where the codecs cannot keep up, raw
    chunks fill the gap. Every chunk's row says what it is, so the encoding may change from chunk to chunk.
    """

    def __init__(
        self,
        name: str,
        context: GraphContext,
        *,
        sink_bytes: int,
        transform: int = TRANSFORM_AUTO,
        leisure: bool = False,
    ) -> None:
        """``sink_bytes``: what the sinks behind this stage keep in flight. ``transform``: the only one that is to be
        used, or any. ``leisure``: the smallest result counts, not the soonest."""
        super().__init__(name, CodecChoice("auto"))
        self.made = ChoicesMade()
        self._context = context
        self._threads = context.codecs.threads
        self._transform = transform
        self._leisure = leisure
        self._slots = self._threads + 1 + max(4, -(-sink_bytes // context.chunk_bytes))
        self._ring: StagingRing | None = None
        self._coding = 0
        self._passed_by = 0
        self._coded_share = 0.0  # of the bytes of about the last `RECENT` chunks
        self._budget = CpuBudget(len(os.sched_getaffinity(0)), lambda: context.codecs.cpu_seconds)
        self._changed = asyncio.Event()
        self._kinds: dict[int, Kind] = {}  # of each stream's last chunk that was looked at
        self._last: Kind | None = None

    async def run(self, edge: Edge, outlet: Outlet) -> None:
        sink = self._sink_rate()
        if sink is None:
            await self._pass_on(edge, outlet)
        else:
            self._context.codecs.nice = 0 if self._leisure else NICE
            sink.on_change = self._changed.set
            await self._choose(edge, outlet, sink)
        outlet.end()

    def _sink_rate(self) -> SinkRate | None:
        """What is known of the sinks before they are given anything; None where none of them is any limit."""
        if self._leisure:
            return SinkRate(LEISURE, 0, fixed=True)
        hints = [sink.rate_hint() for sink in self._sinks]
        guess = min([self._limit, *(hint.rate for hint in hints)])
        if math.isinf(guess):
            return None
        depth = max([2 * self._context.chunk_bytes, *(hint.depth for hint in hints)])
        depth = min(depth, self._slots * self._context.chunk_bytes // 2)
        return SinkRate(guess, depth, latency=max(hint.latency for hint in hints))

    async def _pass_on(self, edge: Edge, outlet: Outlet) -> None:
        self.made.reason = "the sink takes bytes as fast as memory does"

        async def count(chunk: Chunk) -> None:
            if not chunk.zero and not chunk.planes:
                self.raw += 1

        await pass_each(edge, outlet, count)

    async def _choose(self, edge: Edge, outlet: Outlet, sink: SinkRate) -> None:
        budget = None if self._leisure else self._budget
        chooser = Chooser(self._threads, sink, self._transform, budget)
        self.made.begin(chooser, sink)
        self._budget.begin()

        async def treat(chunk: Chunk) -> None:
            await self._treat(chunk, chooser, sink)
            if chunk.lease is not None:
                chunk.lease = sink.sent(chunk.lease, chunk.stored_bytes)

        # Two more than can be coded at a time: the sink is never without a chunk because codecs are busy.
        await in_parallel(self._threads + 2, lambda: pass_each(edge, outlet, treat))

    async def _treat(self, chunk: Chunk, chooser: Chooser, sink: SinkRate) -> None:
        """Code ``chunk``, or leave it as it is."""
        if chunk.lease is None or chunk.planes:
            return  # zeros, or encoded already (a copied image)
        kind = self._kinds.get(chunk.stream, self._last)
        encoding: Encoding | None = None
        if chunk.raw_bytes >= SMALLEST and await self._turn(chunk, kind, chooser, sink):
            try:
                kind = await self._look(chunk, chooser)
                self._kinds[chunk.stream] = self._last = kind
                encoding = chooser.choose(kind)
                if encoding is not None:
                    if self._leisure or self._pays(chunk, kind, encoding, chooser):
                        encoding = await self._code(chunk, kind, encoding, chooser)
                    else:
                        encoding = None
            finally:
                self._coding -= 1
                self._changed.set()
        self._budget.passed(chunk.raw_bytes)
        self._coded_share += ((encoding is not None) - self._coded_share) / RECENT
        if encoding is None:
            self.raw += 1
        else:
            self.compressed += 1
        self.made.add(chunk, self._kinds.get(chunk.stream), encoding)

    async def _turn(self, chunk: Chunk, kind: Kind | None, chooser: Chooser, sink: SinkRate) -> bool:
        """Wait for a codec thread. False where the chunk is stored sooner without."""
        while True:
            busy = self._coding >= self._threads
            sampled = chunk.stream in self._kinds or chunk.raw_bytes < SAMPLED
            if kind is not None and not self._leisure and (sampled or busy):
                likely = chooser.choose(kind)
                if likely is None and not self._looks_again(chunk, sink):
                    return False
                if likely is not None and not self._pays(chunk, kind, likely, chooser, waits=busy):
                    return False
            if not busy:
                self._coding += 1
                return True
            self._changed.clear()
            await self._changed.wait()

    def _looks_again(self, chunk: Chunk, sink: SinkRate) -> bool:
        """Whether a chunk is looked at though those before it were not worth coding."""
        if sink.lag < LOOK_SECONDS:
            return False
        self._passed_by += 1
        return chunk.raw_bytes / sink.rate > LOOK_WORTH_SECONDS or self._passed_by % PASSED_BY == 0

    def _pays(
        self, chunk: Chunk, kind: Kind, encoding: Encoding, chooser: Chooser, *, waits: bool = False
    ) -> bool:
        if not chooser.pays(kind, encoding, chunk.raw_bytes, waits=waits):
            chooser.skipped(kind, encoding)
            return False
        share = chooser.share(kind.learnt[encoding])
        return share >= 1 or self._coded_share < share

    async def _look(self, chunk: Chunk, chooser: Chooser) -> Kind:
        assert chunk.lease is not None
        return await self._context.codecs.look(chooser.look, chunk.lease, chunk.raw_bytes)

    async def _code(self, chunk: Chunk, kind: Kind, encoding: Encoding, chooser: Chooser) -> Encoding | None:
        """The encoding where the chunk got smaller by it, None where it is as it was."""
        slot = await self._output().acquire()
        coded = False
        start = time.perf_counter()
        try:
            coded = await encode_chunk(self._context, encoding, chunk, slot)
        finally:
            if not coded:
                slot.release()
        chooser.learn(kind, encoding, chunk.raw_bytes, chunk.stored_bytes, time.perf_counter() - start)
        return encoding if coded else None

    def _output(self) -> StagingRing:
        """Room for what is coded, more than sinks keep in flight, so that a slot always comes free. No page of it is
        touched before it is needed."""
        if self._ring is None:
            self._ring = self._context.make_ring(self._slots, on_demand=True)
        return self._ring

    def decisions(self, names: Sequence[str]) -> list[dict[str, object]]:
        return self.made.as_json(names)
