"""Evicting the image of a checkpointed, launched process from its pool, and filling the pool again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda.errors import TargetError
from ckptpipe.pipeline.cuda.image_window import Fillers, ImageWindow
from ckptpipe.pipeline.cuda.launched_pool import LaunchedPool
from ckptpipe.pipeline.cuda.live_image import live_mappings
from ckptpipe.pipeline.cuda.second_reading import read_again_if_bad
from ckptpipe.pipeline.cuda.session import ProcessSession
from ckptpipe.pipeline.image.reader import ImageReader
from ckptpipe.pipeline.progress import ProgressCallback
from ckptpipe.pipeline.sinks.abc import Sink
from ckptpipe.pipeline.sinks.pool import PoolRange, PoolSink
from ckptpipe.pipeline.sources.image import Counts, ImageSource
from ckptpipe.pipeline.sources.pool_image import PoolImageSource
from ckptpipe.storage_backends.shielded import in_thread, shielded

if TYPE_CHECKING:
    from ckptpipe.pipeline.cuda.early_start import Arrivals


async def evict(session: ProcessSession) -> None:
    """Give the pages of its image back to the system. The image must be durable, and the record name where.

    The record says so before it happens, so that nobody ever takes what a hole reads as for the image.
    """
    record = session.record
    assert record is not None and record.images, "only what is stored elsewhere may go"
    if not session.pooled:
        session.notes.append(f"{session}: nothing was evicted, since none of its image lies in a pool")
        return
    if len(record.mappings) > len(record.pool):
        kept = sum(nbytes for _, nbytes in record.mappings[len(record.pool) :])
        session.notes.append(f"{session}: {kept} bytes of its image stay in memory of its own")
    pool = await reached(session)
    await pool.drained()
    await session.note("checkpointed", evicted=True)
    freed = await in_thread(pool.evict, session.pooled)
    session.notes.append(f"{session}: evicted, {freed} bytes of its pool were given back")


async def reached(session: ProcessSession) -> LaunchedPool:
    """The pool that the present checkpoint is in. TargetError where it cannot be had any more."""
    await session.find_pool()
    if session.pool is None:
        raise TargetError(
            f"the pool of {session}, which holds its checkpoint, cannot be had: {session.no_pool}",
            pid=session.pid,
            cure="run as the process's user or as root, in its container or outside of all",
        )
    session.pool.require(session.pooled)
    return session.pool


async def refill(
    sessions: Sequence[ProcessSession],
    reader: ImageReader,
    context: GraphContext,
    progress: ProgressCallback | None = None,
) -> Counts:
    """Bring what was evicted of ``sessions`` back into their pools and verify all of it, behind closed gates.

    When this returns, the driver may be asked to restore. When it raises, it may not: the processes stay
    CHECKPOINTED and evicted, and what had arrived is given back.
    """
    ranges = await prepared(sessions, reader, context)
    try:
        counts = await fill(sessions, ranges, reader, context, progress)
    except BaseException:
        await shielded(empty(sessions))
        raise
    await admit(sessions)
    return counts


async def prepared(
    sessions: Sequence[ProcessSession], reader: ImageReader, context: GraphContext
) -> dict[str, PoolRange]:
    """Where each stream goes, in the order in which the driver is going to read them; the pools are mapped, and fit
    the image. Nothing is touched."""
    ranges: dict[str, PoolRange] = {}
    for session in reversed(sessions):
        pool = await reached(session)
        live_mappings(session, reader)  # are the sizes those of the image?
        await in_thread(lambda pool=pool: pool.map(writable=True))
        # A driver that still waits for a restorer who died does not give up: now somebody cares for it again.
        await in_thread(pool.handover.feed)
        for number, image in enumerate(session.pooled):
            ranges[f"proc/{session.k}/driver/{number}"] = PoolRange(pool, image)
    if not await _read_by_sink(reader):
        await context.prepare()
    return ranges


def is_being_restored(session: ProcessSession) -> bool:
    """Whether the driver has begun to read its image: for a restore whose controller died, or that failed."""
    if session.pool is None:
        return False
    generations = {image.generation for image in session.pooled}
    return any(
        each.generation in generations and each.phase == "reading" for each in session.pool.page.images()
    )


async def _read_by_sink(reader: ImageReader) -> bool:
    """Whether everything is read straight to its place, so that no staging ring is wanted."""
    stored = (row for row in reader.index.rows() if not row.zero)
    first = next(stored, None)
    if first is None:
        return True
    file = await reader.backend.local_file(reader.object_name(first.object))
    if file is None:
        return False
    file.release()
    return not first.planes and not any(row.planes for row in stored)


async def admit(sessions: Sequence[ProcessSession]) -> None:
    """Everything is there, verified: the driver may have all of it."""
    for session in sessions:
        assert session.pool is not None
        session.pool.admit(session.pooled)
        await session.note("checkpointed", evicted=False)


async def empty(sessions: Sequence[ProcessSession], *, allocate: bool = False, most: int = 0) -> None:
    """Holes, behind closed gates. Where ``allocate``, with memory for what comes, for ``most`` bytes of each image."""
    for session in sessions:
        if session.pool is None or not session.target.alive:
            continue
        await session.pool.drained()
        await in_thread(session.pool.evict, session.pooled)
        if allocate:
            await in_thread(session.pool.allocate, session.pooled, most)


async def fill(
    sessions: Sequence[ProcessSession],
    ranges: dict[str, PoolRange],
    reader: ImageReader,
    context: GraphContext,
    progress: ProgressCallback | None,
    arrivals: Arrivals | None = None,
    windows: Mapping[str, ImageWindow] | None = None,
    fillers: Fillers | None = None,
) -> Counts:
    """Read the streams into ``ranges``, twice where the first try met bad bytes. With ``arrivals``, the pools are
    empty already, and what has arrived stays. ``windows``: those of streams whose range is one. ``fillers``:
    see `PoolSink`."""

    async def make() -> tuple[ImageSource, Sink]:
        if arrivals is None:
            await empty(sessions, allocate=True)
        return PoolImageSource(reader, list(ranges), windows), PoolSink(ranges, context, arrivals, fillers)

    return await read_again_if_bad(context, make, progress)
