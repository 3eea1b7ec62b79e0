"""What copying needs of each GPU: its context, a queue of copies, pinned slots near it, a codec where one is used."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptpipe.pipeline.context import RING_MIN_SLOTS, GraphContext
from ckptpipe.pipeline.cuda import codec_device, topology
from ckptpipe.pipeline.cuda.driver import CudaDriver, Gpu
from ckptpipe.pipeline.cuda.loading import load_plan
from ckptpipe.pipeline.cuda.places import DevicePlaces
from ckptpipe.pipeline.parallel import first_error
from ckptpipe.pyx.cuda import CopyQueue, CudaError, FileLoader, Pinned, pin, prepare
from ckptpipe.pyx.cuda_errors import HOST_MEMORY_ALREADY_REGISTERED
from ckptpipe.pyx.memory import numa_nodes
from ckptpipe.pyx.staging import StagingRing
from ckptpipe.storage_backends.shielded import in_thread, shielded

if TYPE_CHECKING:
    from ckptpipe.pyx.device_codec import DeviceCodec


@dataclass(slots=True)
class Link:
    """One GPU of an operation. ``rings``: one for each form in which chunks leave it, all pinned."""

    gpu: Gpu
    context: int
    queue: CopyQueue
    rings: list[StagingRing]
    simulated: bool
    codec: DeviceCodec | None = None
    places: DevicePlaces | None = None  # for stored bytes that were loaded, and are to be decoded
    loader: FileLoader | None = None

    @property
    def ring(self) -> StagingRing:
        return self.rings[0]

    def decoded_by(self) -> dict[str, int]:
        """Chunks that the codec has decoded so far, by who did it, as a result names them."""
        if self.codec is None:
            return {}
        counts = self.codec.decoded_by.items()
        return {codec_device.shown([name], self.simulated): chunks for name, chunks in counts if chunks}

    async def drain(self) -> None:
        """Wait until nothing is in flight."""
        if self.codec is not None:
            await self.codec.drain()
        await self.queue.drain()


class Links:
    """`open` does everything that can fail, or takes long, before a target is touched; `aclose` waits for the
    copies in flight, then gives everything back. An asynchronous context manager."""

    def __init__(self, driver: CudaDriver, *, rings: bool = True) -> None:
        """``rings`` False: `open` makes none, since it may be that nothing goes through one."""
        self._driver = driver
        self._with_rings = rings
        self._links: dict[int, Link] = {}
        self._retained: list[int] = []
        self._pinned: list[Pinned] = []
        self._notes: list[str] = []
        self.problems: list[str] = []  # what `aclose` could not give back

    async def open(self, context: GraphContext, gpus: Iterable[Gpu]) -> None:
        """Add those of ``gpus`` that are not there yet. The links end before the context does."""
        gpus = [gpu for gpu in gpus if gpu.ordinal not in self._links]
        rings: dict[int, StagingRing] = {}
        handles: dict[int, int] = {}

        async def make_rings() -> None:
            rings.update(await in_thread(_rings, context, gpus))

        async def retain(gpu: Gpu) -> None:
            handles[gpu.ordinal] = await self._driver.retain(gpu.ordinal)
            self._retained.append(gpu.ordinal)

        # Each takes its time: prefaulting, making contexts, compiling the kernel the first time.
        try:
            async with asyncio.TaskGroup() as group:
                if self._with_rings:
                    group.create_task(make_rings())
                for gpu in gpus:
                    group.create_task(retain(gpu))
                    group.create_task(in_thread(prepare, gpu.ordinal))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        for gpu in gpus:
            handle = handles[gpu.ordinal]
            own = [rings[gpu.ordinal]] if self._with_rings else []
            for ring in own:
                await self._pin_once(ring, handle)
            queue = await CopyQueue.create(gpu.ordinal, handle, elide_zeros=True)
            self._links[gpu.ordinal] = Link(gpu, handle, queue, own, self.simulated)

    async def open_rings(self, context: GraphContext) -> None:
        """Those that `open` did not make."""
        bare = [link for link in self if not link.rings]
        if not bare:
            return
        rings = await in_thread(_rings, context, [link.gpu for link in bare])
        for link in bare:
            await self._pin_once(rings[link.gpu.ordinal], link.context)
            link.rings = [rings[link.gpu.ordinal]]

    async def open_loaders(self, context: GraphContext) -> None:
        """Threads on every GPU's queue that load files into its memory, on the CPUs that are near to it."""
        nodes = _nodes_of(link.gpu for link in self)

        async def open_one(link: Link) -> None:
            node = nodes[link.gpu.ordinal]
            gpus = sum(other == node for other in nodes.values())
            plan = load_plan(context.settings.workers, gpus, node, context.chunk_bytes)
            link.loader = await FileLoader.open(link.queue, link.context, plan, numa_node=node)

        try:
            async with asyncio.TaskGroup() as group:
                for link in self:
                    if link.loader is None:
                        group.create_task(open_one(link))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    async def open_codecs(self, context: GraphContext, decoder: str = "auto", *, loads: bool = False) -> None:
        """A codec on every GPU that has none, with ``gpu_scratch_bytes`` of its memory. ``decoder``: who decodes.
        ``loads``: part of that memory is for stored bytes that are loaded from files, where it is enough for both.

        CkptpipeError, with a cure, where that cannot be had.
        """
        places = codec_device.places(context) if loads else 0
        opened: list[Link] = []
        try:
            for link in self:
                if link.codec is None:
                    opened.append(link)
                    if places:
                        link.places = await DevicePlaces.open(
                            self._driver, link.context, places, context.chunk_bytes
                        )
                    taken = link.places.nbytes if link.places is not None else 0
                    link.codec = await codec_device.create(
                        self._driver, link.gpu, link.context, context, decoder, taken
                    )
        except BaseException:
            for link in opened:  # who can do without codecs shall have their memory
                await self._close_codec(link)
            raise
        context.gpu_scratch_bytes = context.settings.gpu_scratch_bytes if self._links else 0

    async def close_codecs(self, context: GraphContext) -> None:
        """Give their memory back."""
        for link in self:
            await self._close_codec(link)
        context.gpu_scratch_bytes = 0

    async def _close_codec(self, link: Link) -> None:
        codec, places, link.codec, link.places = link.codec, link.places, None, None
        if codec is not None:
            await self._given_back(codec.aclose())
        if places is not None:
            await link.queue.drain()
            await self._given_back(places.aclose())

    async def add_rings(self, context: GraphContext) -> None:
        """One more ring for each that there is: for chunks that leave the GPUs in one more form."""
        made: dict[int, StagingRing] = {}
        for link in self._links.values():
            first = link.ring
            if first.address not in made:
                made[first.address] = await in_thread(
                    lambda first=first: context.make_ring(first.slots, numa_node=first.numa_node)
                )
                await self._pin_once(made[first.address], link.context)
            link.rings.append(made[first.address])

    @property
    def simulated(self) -> bool:
        return self._driver.simulated

    def __iter__(self) -> Iterator[Link]:
        return iter(self._links.values())

    async def _pin_once(self, ring: StagingRing, context: int) -> None:
        if not any(pinned.address == ring.address for pinned in self._pinned):
            await self._driver.run(self._pin, ring, context)

    def _pin(self, ring: StagingRing, context: int) -> None:
        try:
            self._pinned.append(pin(ring, context=context))
        except CudaError as error:
            if error.code != HOST_MEMORY_ALREADY_REGISTERED:
                raise
            # An earlier run could not unregister this memory, and the ring lies there again: it is pinned.
            self._notes.append(f"the staging ring was pinned already: {error.message}")

    async def __aenter__(self) -> Links:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await self.aclose()
        if error is not None:
            for problem in self.problems:
                error.add_note(problem)

    def __getitem__(self, ordinal: int) -> Link:
        return self._links[ordinal]

    def notes(self) -> list[str]:
        """What the result should say of how the bytes were copied and checked."""
        return self._notes + [
            f"{link.gpu.uuid}: checksums on the CPU: {link.queue.why}"
            for link in self._links.values()
            if link.queue.why
        ]

    async def aclose(self) -> None:
        await shielded(self._close())

    async def _close(self) -> None:
        """Everything, whatever fails: an error here is neither the operation's outcome nor its end."""
        await asyncio.gather(*(self._close_link(link) for link in self._links.values()))
        self._links.clear()
        while self._pinned:
            await self._given_back(self._driver.run(self._pinned.pop().release))
        while self._retained:
            await self._given_back(self._driver.release(self._retained.pop()))

    async def _close_link(self, link: Link) -> None:
        await self._close_codec(link)
        if link.loader is not None:
            await self._given_back(link.loader.aclose())
        await self._given_back(link.queue.aclose())

    async def _given_back(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except CudaError as error:
            self.problems.append(f"not given back to the driver: {error.message}")


def _nodes_of(gpus: Iterable[Gpu]) -> dict[int, int | None]:
    """The NUMA node of each GPU, None where the machine has one node or does not say."""
    there = numa_nodes()
    places = {gpu.ordinal: topology.place_of(gpu.pci).numa_node if len(there) > 1 else None for gpu in gpus}
    return {ordinal: node if node in there else None for ordinal, node in places.items()}


def _rings(context: GraphContext, gpus: list[Gpu]) -> dict[int, StagingRing]:
    """A ring on the NUMA node of each GPU; one for all where the machine has one node, or the user chose it."""
    nodes: dict[int, int | None] = {gpu.ordinal: None for gpu in gpus}
    if context.settings.numa_node is None:
        nodes = _nodes_of(gpus)
    distinct = sorted({node for node in nodes.values() if node is not None})
    if not distinct:
        return dict.fromkeys(nodes, context.ring)
    share = max(context.ring_bytes // context.chunk_bytes // len(distinct), RING_MIN_SLOTS)
    context.settings = replace(
        context.settings, numa_node=distinct[0], ring_bytes=share * context.chunk_bytes
    )
    made = {distinct[0]: context.ring}
    for node in distinct[1:]:
        made[node] = context.make_ring(share, numa_node=node)
    return {ordinal: made[distinct[0] if node is None else node] for ordinal, node in nodes.items()}
