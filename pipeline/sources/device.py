"""Device memory as a source: ranges of GPU memory, by stream name. Custom storage and device buffers share it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptpipe.pipeline.chunk import Chunk, released_on_error
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda.links import Link, Links
from ckptpipe.pipeline.edge import Outlet
from ckptpipe.pipeline.image.entries import StreamKind
from ckptpipe.pipeline.image.records import PlaneRecord
from ckptpipe.pipeline.parallel import first_error
from ckptpipe.pipeline.sources.abc import Source, Stream, clear_padding
from ckptpipe.pyx.staging import Lease, StagingRing

if TYPE_CHECKING:
    from ckptpipe.pipeline.cuda.coding import Coder, Plans
    from ckptpipe.pipeline.spec import GraphSpec
    from ckptpipe.pipeline.stages.encoded import EncodedStage
    from ckptpipe.pyx.device_codec import Encoded

COPIES = 16  # chunks that one GPU has under way at most: enough for the link, little enough for the ring
CODED = 64  # the same where they are encoded there: a codec takes as many at once as its scratch holds


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
    comes_back: bool = False  # it is freed by the save, and may be put back from what was stored

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
    """Emits the chunks of ``memory``'s ranges: several copies in flight on every GPU, GPUs side by side.

    Branches that want chunks compressed get them from the GPU's own codec, where it has it; another branch of the
    same graph may want them raw. Each form has its own copies, its own ring and its own share of the outlet.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self.kind = memory.kind
        self.streams = []
        self.tree = []
        self.total_bytes = None
        self._ranges: list[DeviceRange] = []
        self._coders: dict[object, Coder] = {}
        self._notes: list[str] = []

    async def open(self, context: GraphContext) -> None:
        self._context = context
        ranges = await self.memory.open(context)
        if ranges is not None:
            self._take(ranges)

    async def take_stages(self, spec: GraphSpec) -> Mapping[str, tuple[EncodedStage, object]]:
        from ckptpipe.pipeline.cuda.coding import take_stages

        memory = self.memory
        taken = await take_stages(spec, memory.links, self._context, comes_back=memory.comes_back)
        self._coders = taken.coders
        self._notes += taken.notes
        return taken.stages

    def _take(self, ranges: list[DeviceRange]) -> None:
        self._ranges = ranges
        self.streams = [Stream(each.stream, each.kind, each.nbytes) for each in ranges]
        self.total_bytes = sum(each.nbytes for each in ranges)

    @property
    def need_bytes(self) -> int:
        return self.total_bytes if self.total_bytes is not None else self.memory.need_bytes

    async def run(self, outlet: Outlet) -> None:
        self._take(await self.memory.begin())
        try:
            async with asyncio.TaskGroup() as group:
                for number, (wants, part) in enumerate(outlet.parts().items()):
                    group.create_task(self._feed(number, self._coders.get(wants), part))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    async def _feed(self, number: int, coder: Coder | None, outlet: Outlet) -> None:
        """One form of the chunks, in slots of the ``number``-th ring of each link."""
        links = self.memory.links
        groups: dict[int, list[int]] = {}
        for position, each in enumerate(self._ranges):
            groups.setdefault(each.ordinal, []).append(position)
        shares: dict[int, int] = {}  # how many GPUs share a ring
        for ordinal in groups:
            address = links[ordinal].rings[number].address
            shares[address] = shares.get(address, 0) + 1
        plans = await coder.plans(self._ranges, self._context.chunk_bytes) if coder is not None else None
        async with asyncio.TaskGroup() as group:
            for ordinal, positions in groups.items():
                link, work = links[ordinal], self._work(positions)
                ring = link.rings[number]
                count = min(ring.slots // 2, COPIES) if coder is None else min(ring.slots, CODED)
                for _ in range(max(2, count // shares[ring.address])):
                    group.create_task(self._copy(link, ring, work, plans, outlet))
        outlet.end()

    async def _copy(
        self,
        link: Link,
        ring: StagingRing,
        work: Iterator[tuple[int, int, int, int]],
        plans: Plans | None,
        outlet: Outlet,
    ) -> None:
        for position, number, address, nbytes in work:
            if outlet.dropped:
                return
            plan = plans.of(position, number) if plans is not None else None
            with released_on_error(await ring.acquire()) as slot:
                if plan is None:
                    scan = await link.queue.fetch(slot, nbytes, address)
                    chunk = _raw(slot, scan.zero, position, number, nbytes, scan.crc32c)
                else:
                    assert link.codec is not None, "links of a source that encodes have codecs"
                    found = await link.codec.encode(slot, nbytes, address, plan)
                    chunk = _encoded(slot, found, position, number, nbytes)
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
        return [*self.memory.notes(), *self._notes]

    async def aclose(self) -> None:
        return


def _raw(slot: Lease, zero: bool, position: int, number: int, nbytes: int, crc32c: int) -> Chunk:
    if zero:
        slot.release()
        return Chunk(position, number, nbytes, crc32c, None)
    clear_padding(slot, nbytes)
    return Chunk(position, number, nbytes, crc32c, slot)


def _encoded(slot: Lease, found: Encoded, position: int, number: int, nbytes: int) -> Chunk:
    if found.zero or not found.planes:
        return _raw(slot, found.zero, position, number, nbytes, found.raw_crc32c)
    clear_padding(slot, found.stored_bytes)
    chunk = Chunk(position, number, nbytes, found.raw_crc32c, slot)
    chunk.stored_bytes, chunk.stored_crc32c = found.stored_bytes, found.stored_crc32c
    chunk.transform = found.transform
    chunk.planes = tuple(PlaneRecord(*plane) for plane in found.planes)
    return chunk
