"""The driver's image of a launched process, in the pool of its capture library, as a source: sent from where it lies,
and while the driver still writes it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping as MappingOf
from collections.abc import Sequence
from dataclasses import dataclass

from ckptpipe.pipeline.chunk import Chunk, released_on_error
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda.choice import shown
from ckptpipe.pipeline.cuda.driver import CudaDriver
from ckptpipe.pipeline.cuda.driver_builds import driver_build, known_builds, note_build
from ckptpipe.pipeline.cuda.errors import TargetError
from ckptpipe.pipeline.cuda.growing_image import GrowingImage
from ckptpipe.pipeline.cuda.launched_pool import LaunchedPool
from ckptpipe.pipeline.cuda.session import DRIVER_IMAGE, LAUNCH, ProcessSession
from ckptpipe.pipeline.cuda.target import Mapping
from ckptpipe.pipeline.edge import Outlet
from ckptpipe.pipeline.launch import HandoverFailed
from ckptpipe.pipeline.parallel import first_error
from ckptpipe.pipeline.sources.abc import Stream, fillers
from ckptpipe.pipeline.sources.driver_image import DriverImageSource, Piece, made
from ckptpipe.pipeline.spec import GraphSpec
from ckptpipe.pipeline.stages.encoded import EncodedStage
from ckptpipe.pyx.workers import WorkerPool
from ckptpipe.storage_backends.registry import scheme_of
from ckptpipe.storage_backends.shielded import in_thread

ALIGNMENT = 4096  # of what is stored: a chunk's padding ends there
TAKES_CHANGING = frozenset(("fuse", "null", "nvme"))  # schemes
SHORT, LONG = 0.002, 0.016  # seconds between looks at an image that grows, and at one that does not


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk to send. ``again``: the image's bytes of it changed since it was sent. ``compare``: send it again only
    where they did."""

    stream: int
    number: int
    again: bool = False
    compare: bool = False


class LaunchedImageSource(DriverImageSource):
    """Like `DriverImageSource`, for ``sessions`` that have a pool.

    What the driver has written is sent while it goes on. What it changes later is sent again, as a higher version of the
    chunk, when its call has returned; what was not sent by then goes out as a range of the pool itself. The driver
    waits for none of this. On a build of the driver that is not known to write through the capture library alone,
    everything sent early is compared with the image at the end.

    A chunk whose checksum the capture library knows is not read: it goes out as a range of the pool at once. That the
    driver may write to it while it is stored is borne by stores that do not look at what they store (`TAKES_CHANGING`):
    the bytes that are stored are then neither the old ones nor the new ones, and nobody refers to them. For any other
    store (S3 refuses a part whose checksum is not what was said; codecs work on what they see), and where nothing
    is known of a chunk, it is copied into the ring and its checksum taken on the way, while the driver works.

    Since nobody reads the chunk, memory that fails between the driver's write and the store's is not seen by the save:
    the row has the checksum of the driver's bytes, so that a restore or `verify` refuses the chunk. A store that looks
    refuses it at once.

    What the library leaves to the driver (the pool is too small, say) is read the driver image's way.
    """

    early = True  # send while the driver works
    sums = True  # take the checksums of the capture library; False: for comparisons
    early_jobs = 0  # threads that copy meanwhile, where the driver's leave a CPU idle; 0: half of the workers

    def __init__(self, driver: CudaDriver, sessions: Sequence[ProcessSession], lock_timeout: float) -> None:
        super().__init__(driver, sessions, lock_timeout)
        self.kind = shown(LAUNCH, driver.simulated)
        self._fallen_back = 0
        self._growing: dict[int, GrowingImage] = {}  # by stream
        self._aside: WorkerPool | None = None
        self._direct = False

    async def open(self, context: GraphContext) -> None:
        await super().open(context)
        for session in self._sessions:
            pool = _pool(session)
            if used := self._used.get(session.pid, 0):
                try:
                    await in_thread(pool.handover.prepare, used)
                except HandoverFailed as error:
                    session.notes.append(f"{session}: its pool was not made ready: {error.message}")
            await in_thread(pool.map)
        self._builds = await in_thread(known_builds)
        self._early_jobs = self.early_jobs or max(1, context.workers.threads // 2)
        self._early = asyncio.Semaphore(self._early_jobs)
        if self.early:
            self._aside = WorkerPool(self._early_jobs, idle=True)

    async def take_stages(self, spec: GraphSpec) -> MappingOf[str, tuple[EncodedStage, object]]:
        self._direct = self.sums and takes_changing(spec)
        return await super().take_stages(spec)

    async def run(self, outlet: Outlet) -> None:
        for session in self._sessions:
            await session.lock(self._lock_timeout)
        count = fillers(self._context)
        self._parts = asyncio.Queue[Part | None]()

        async def capture() -> None:
            for session in self._sessions:
                await self._capture(session)
            self.total_bytes = sum(piece.nbytes for piece in self._pieces)
            for _ in range(count):
                self._parts.put_nowait(None)

        async def fill() -> None:
            while (part := await self._parts.get()) is not None and not outlet.dropped:
                if (chunk := await self._part(part)) is not None:
                    await outlet.emit(chunk)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(capture())
                for _ in range(count):
                    group.create_task(fill())
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        await self._judge()

    # -- the checkpoint ----------------------------------------------------------------------------------

    async def _capture(self, session: ProcessSession) -> None:
        """Checkpoint one process and hand out all of its image; where that lies is noted, and told."""
        pool, first = _pool(session), len(self.streams)
        try:
            before: list[Mapping] | None = await asyncio.to_thread(session.target.maps)
        except TargetError:
            before = None  # its image can be had from the pool alone
        await in_thread(pool.handover.arm)
        was = pool.state
        known = self._builds.get(driver_build(session.pid, was))
        async with asyncio.TaskGroup() as group:
            call = group.create_task(session.checkpoint())
            if self.early and known is not False:
                await self._follow(session, call, was.generation)
        await in_thread(pool.handover.settle)
        await in_thread(pool.handover.disarm)
        state = pool.state
        images = self._look(session, was.generation, written=False)
        pool.require([image.image for image in images])
        session.notes.append(pool.describe())
        self._finish(session, images, trusted=self.sums and known is True)
        found = [self._pieces[image.stream] for image in images]
        if not images or state.fallbacks > was.fallbacks:
            if before is None:
                raise session.target.not_permitted()
            used = self._used.get(session.pid, 0) - sum(piece.nbytes for piece in found)
            own = await self._found(session, before, max(used, 0))
            found += own
            for piece in own:
                self._add(session, piece, len(self.streams) - first)
                step = self._context.chunk_bytes
                self._hand_out(len(self.streams) - 1, range(-(-piece.nbytes // step)))
            why = state.fallback_text or state.fallback_reason
            why = why if state.fallbacks > was.fallbacks else "the capture library did not see it"
            session.notes.append(f"{session}: the driver kept its image in memory of its own: {why}")
        if not images:
            self._fallen_back += 1
            if self._fallen_back == len(self._sessions):
                self.kind = shown(DRIVER_IMAGE, self._driver.simulated)
        await session.note(
            "checkpointed",
            capture=LAUNCH if images else DRIVER_IMAGE,
            mappings=tuple((piece.address, piece.nbytes) for piece in found),
            pool=tuple(
                (each.image.slot, each.image.generation, each.image.offset, each.image.nbytes)
                for each in images
            ),
        )
        if known is None:
            await self._compare(images)

    async def _follow(self, session: ProcessSession, call: asyncio.Task[None], after: int) -> None:
        """Hand out what the driver has written, until its call has returned."""
        pause = SHORT
        while not call.done():
            grown = False
            for image in self._look(session, after, written=True):
                ready = list(image.ready())
                self._hand_out(image.stream, ready)
                grown = grown or bool(ready)
            pause = SHORT if grown else min(2 * pause, LONG)
            await asyncio.wait({call}, timeout=pause)

    def _look(self, session: ProcessSession, after: int, *, written: bool) -> list[GrowingImage]:
        """The images of this checkpoint that are known; new ones become streams, with ``written`` once they hold
        something."""
        pool = _pool(session)
        mine = {
            each.image.generation: each
            for stream, each in self._growing.items()
            if self._pieces[stream].session is session
        }
        for state in pool.images(after):
            if state.generation not in mine and (state.watermark or not written):
                image = GrowingImage(pool, state, len(self.streams), self._context.chunk_bytes)
                self._add(session, Piece(session, state.address, state.nbytes, state.offset), len(mine))
                mine[state.generation] = self._growing[image.stream] = image
        return list(mine.values())

    def _add(self, session: ProcessSession, piece: Piece, number: int) -> None:
        self.streams.append(Stream(f"proc/{session.k}/driver/{number}", "driver", piece.nbytes))
        self._pieces.append(piece)

    def _hand_out(
        self, stream: int, numbers: Sequence[int], *, again: bool = False, compare: bool = False
    ) -> None:
        for number in numbers:
            self._parts.put_nowait(Part(stream, number, again, compare))

    def _finish(self, session: ProcessSession, images: Sequence[GrowingImage], *, trusted: bool) -> None:
        """Nothing is written any more: hand out the rest, and again what changed after it was read."""
        early = late = 0
        for image in images:
            image.settled, image.trusted = True, trusted
            changed = image.changed()
            early, late = early + image.early, late + len(changed)
            self._hand_out(image.stream, list(image.ready()))
            self._hand_out(image.stream, changed, again=True)
        if early:
            chunks = sum(image.chunks for image in images)
            session.notes.append(
                f"{session}: {early} of {chunks} chunks were sent while the driver worked, {late} of them again, since "
                "it wrote to them later"
            )

    # -- the check of an unknown driver ------------------------------------------------------------------

    async def _compare(self, images: Sequence[GrowingImage]) -> None:
        for _ in range(self._early_jobs):  # until none reads what was not settled when it began
            await self._early.acquire()
        for _ in range(self._early_jobs):
            self._early.release()
        for image in images:
            changed = set(image.changed())
            self._hand_out(image.stream, [each for each in image.sums if each not in changed], compare=True)

    async def _judge(self) -> None:
        """Trust a driver of whose image at least half was sent early, and was found to be the same at the end."""
        for session in self._sessions:
            images = [each for each in self._growing.values() if each.pool is session.pool]
            if unread := sum(each.unread for each in images):
                session.notes.append(
                    f"{session}: {unread} chunks went out as they lie in the pool, with the capture library's checksums"
                )
            build = driver_build(session.pid, _pool(session).state)
            if self._builds.get(build) is not None:
                continue
            differing = sum(each.differing for each in images)
            if differing:
                session.notes.append(
                    f"{session}: {differing} chunks were written in a way that the capture library does not see; they were "
                    f"sent again, and with this driver ({build}) nothing is sent early any more"
                )
            elif sum(each.early for each in images) * 2 < max(1, sum(each.chunks for each in images)):
                continue
            try:
                await in_thread(note_build, build, not differing)
            except OSError as error:
                session.notes.append(f"what was found out of its driver could not be kept: {error}")

    # -- chunks ------------------------------------------------------------------------------------------

    async def _part(self, part: Part) -> Chunk | None:
        image = self._growing.get(part.stream)
        if image is None:
            piece, step = self._pieces[part.stream], self._context.chunk_bytes
            start = part.number * step
            return await self._chunk(part.stream, part.number, piece, start, min(step, piece.nbytes - start))
        if not image.settled:
            if self._direct and (chunk := self._unread_chunk(image, part.number)) is not None:
                return chunk
            return await self._early_chunk(image, part.number)
        if (
            image.trusted
            and not part.compare
            and (chunk := self._unread_chunk(image, part.number)) is not None
        ):
            chunk.version = image.next_version(part.number) if part.again else 0
            return chunk
        chunk = await self._settled_chunk(
            image, part.number, image.sums[part.number] if part.compare else None
        )
        if chunk is not None and (part.again or part.compare):
            chunk.version = image.next_version(part.number)
        return chunk

    def _unread_chunk(self, image: GrowingImage, number: int) -> Chunk | None:
        """The range of the pool itself, with the capture library's checksum; None where it has none."""
        start, nbytes = image.range_of(number)
        if not image.settled:
            image.note(number)
        known = image.summed(number)
        if known is None or (nbytes % ALIGNMENT and not known[1]):
            if not image.settled:
                image.forget(number)
            return None
        crc32c, zero = known
        lease = None if zero else image.pool.lend(image.image.offset + start, nbytes)
        chunk = Chunk(image.stream, number, nbytes, crc32c, lease)
        if not image.settled:
            image.sums[number], chunk.unsettled = crc32c, True
        image.unread += 1
        return chunk

    async def _early_chunk(self, image: GrowingImage, number: int) -> Chunk | None:
        """A copy: what is stored must be what was checksummed, though the driver may write to it again."""
        start, nbytes = image.range_of(number)
        async with self._early:
            with released_on_error(await self._context.ring.acquire()) as slot:
                if not image.settled:
                    assert self._aside is not None
                    image.note(number)
                    with image.pool.lend(image.image.offset + start, nbytes) as lent:
                        await self._aside.copy(slot, lent, nbytes)
                    # Of the slot: the driver may have written between the reads for the checksum and for the copy.
                    scan = await self._aside.scan(slot, nbytes)
                    image.sums[number] = scan.crc32c
                    return made(image.stream, number, nbytes, scan, slot)
                slot.release()
        return await self._settled_chunk(image, number)

    async def _settled_chunk(
        self, image: GrowingImage, number: int, same_as: int | None = None
    ) -> Chunk | None:
        """The range of the pool itself; None where its checksum is ``same_as``."""
        context = self._context
        start, nbytes = image.range_of(number)
        with released_on_error(image.pool.lend(image.image.offset + start, nbytes)) as lent:
            scan = await context.workers.scan(lent, nbytes)
            if scan.crc32c == same_as:
                lent.release()
                return None
            image.differing += same_as is not None
            if nbytes % ALIGNMENT == 0 or scan.zero:
                return made(image.stream, number, nbytes, scan, lent)
            # Its padding is the process's memory, not ours to clear.
            with released_on_error(await context.ring.acquire()) as slot:
                scan = await context.workers.copy(slot, lent, nbytes)
                lent.release()
                return made(image.stream, number, nbytes, scan, slot)

    async def aclose(self) -> None:
        """Returns when nothing reads the pools any more: the driver may restore from them then."""
        if self._aside is not None:
            await self._aside.aclose()
        for session in self._sessions:
            if session.pool is not None:
                await session.pool.drained()


def takes_changing(spec: GraphSpec) -> bool:
    """Whether nothing behind the source looks at a chunk's bytes but to store them."""
    return all(
        sink.kind == "image" and scheme_of(sink.url) in TAKES_CHANGING for sink in spec.sinks
    ) and not any(stage.kind == "compress" for stage in spec.stages)


def _pool(session: ProcessSession) -> LaunchedPool:
    assert session.pool is not None, "launch was chosen for processes that have a pool"
    return session.pool
