"""Device memory as a source: ranges of GPU memory, by stream name. Custom storage and device buffers share it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ckptpipe.pipeline.chunk import Chunk, released_on_error
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda.links import Link, Links
from ckptpipe.pipeline.edge import Outlet
from ckptpipe.pipeline.image.entries import StreamKind
from ckptpipe.pipeline.sources.abc import Source, Stream, clear_padding, first_error

COPIES = 16  # chunks that one GPU has under way at most: enough for the link, little enough for the ring


@dataclass(frozen=True, slots=True)
class DeviceRange:
    """One contiguous range of a GPU's memory and the stream that it is."""

    stream: str
    kind: StreamKind
    ordinal: int
    address: int
    nbytes: int


class DeviceMemory(ABC):
    """What a `DeviceSource` reads, and who prepares it."""

    kind: str
    links: Links
    need_bytes: int = 0  # what an uncompressed copy takes up at most; 0 where that is not known
    counted: str = ""  # how that came about, where it may be more than what is saved

    @abstractmethod
    async def open(self, context: GraphContext) -> list[DeviceRange] | None:
        """All checks and preparations; the ranges where they are known already."""

    @abstractmethod
    async def begin(self) -> list[DeviceRange]:
        """Every sink is ready: make the memory readable."""

    def facts(self) -> dict[str, Any]:
        return {"kind": self.kind}

    def process(self) -> dict[str, Any] | None:
        return None

    def notes(self) -> list[str]:
        return self.links.notes()


class DeviceSource(Source):
    """Emits the chunks of ``memory``'s ranges: several copies in flight on every GPU, GPUs side by side."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self.kind = memory.kind
        self.streams = []
        self.tree = []
        self.total_bytes = None
        self._ranges: list[DeviceRange] = []

    async def open(self, context: GraphContext) -> None:
        self._context = context
        ranges = await self.memory.open(context)
        if ranges is not None:
            self._take(ranges)

    def _take(self, ranges: list[DeviceRange]) -> None:
        self._ranges = ranges
        self.streams = [Stream(each.stream, each.kind, each.nbytes) for each in ranges]
        self.total_bytes = sum(each.nbytes for each in ranges)

    @property
    def need_bytes(self) -> int:
        return self.total_bytes if self.total_bytes is not None else self.memory.need_bytes

    async def run(self, outlet: Outlet) -> None:
        self._take(await self.memory.begin())
        groups: dict[int, list[int]] = {}
        for position, each in enumerate(self._ranges):
            groups.setdefault(each.ordinal, []).append(position)
        shares: dict[int, int] = {}  # how many GPUs share a ring
        for ordinal in groups:
            ring = self.memory.links[ordinal].ring
            shares[ring.address] = shares.get(ring.address, 0) + 1
        try:
            async with asyncio.TaskGroup() as group:
                for ordinal, positions in groups.items():
                    link, work = self.memory.links[ordinal], self._work(positions)
                    count = link.ring.slots // 2 // shares[link.ring.address]
                    for _ in range(max(2, min(count, COPIES))):
                        group.create_task(self._copy(link, work, outlet))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    async def _copy(self, link: Link, work: Iterator[tuple[int, int, int, int]], outlet: Outlet) -> None:
        for position, number, address, nbytes in work:
            if outlet.dropped:
                return
            with released_on_error(await link.ring.acquire()) as slot:
                scan = await link.queue.fetch(slot, nbytes, address)
                if scan.zero:
                    slot.release()
                    chunk = Chunk(position, number, nbytes, scan.crc32c, None)
                else:
                    clear_padding(slot, nbytes)
                    chunk = Chunk(position, number, nbytes, scan.crc32c, slot)
            await outlet.emit(chunk)

    def _work(self, positions: list[int]) -> Iterator[tuple[int, int, int, int]]:
        step = self._context.chunk_bytes
        for position in positions:
            each = self._ranges[position]
            for number, offset in enumerate(range(0, each.nbytes, step)):
                yield position, number, each.address + offset, min(step, each.nbytes - offset)

    def facts(self) -> dict[str, Any]:
        return self.memory.facts()

    def process(self) -> dict[str, Any] | None:
        return self.memory.process()

    def notes(self) -> list[str]:
        return self.memory.notes()

    async def aclose(self) -> None:
        return
