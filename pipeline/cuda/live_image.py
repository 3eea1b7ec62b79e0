"""The driver's image in a living, checkpointed process, compared with the one that was saved of it."""

from __future__ import annotations

from collections.abc import Sequence

from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda.errors import CheckpointMismatch
from ckptpipe.pipeline.cuda.session import ProcessSession
from ckptpipe.pipeline.errors import ImageCorrupt
from ckptpipe.pipeline.image.reader import ImageReader
from ckptpipe.pipeline.parallel import in_parallel
from ckptpipe.pipeline.sources.abc import fillers
from ckptpipe.pipeline.sources.image import Counts


def live_mappings(session: ProcessSession, reader: ImageReader) -> list[tuple[int, int, int]]:
    """(stream, address, offset) of each of the process's streams; the offset is in its pool, -1 for memory of its
    own. CheckpointMismatch where they have moved."""
    assert session.record is not None
    prefix = f"proc/{session.k}/driver/"
    streams = {
        each.name: (position, each.bytes)
        for position, each in enumerate(reader.manifest.streams)
        if each.name.startswith(prefix)
    }
    found = []
    for number, (start, nbytes) in enumerate(session.record.mappings):
        position, saved = streams.get(f"{prefix}{number}", (-1, -1))
        if saved != nbytes:
            raise CheckpointMismatch(
                f"the image and {session} do not have the same driver image: {prefix}{number}"
            )
        offset = session.record.pool[number][2] if number < len(session.record.pool) else -1
        found.append((position, start, offset))
    if len(found) != len(streams):
        raise CheckpointMismatch(f"the image has {len(streams)} driver mappings, {session} has {len(found)}")
    return found


async def verify_live_image(
    sessions: Sequence[ProcessSession], reader: ImageReader, context: GraphContext
) -> Counts:
    """Every chunk of the processes' own memory, and of their pools, against its checksum in the index; what was
    evicted is not there and left out.

    ImageCorrupt at the first chunk that differs; nothing has been asked of the driver then.
    """
    counts, step = Counts(), context.chunk_bytes
    counts.streams = len(reader.manifest.streams)
    counts.raw_bytes = sum(stream.bytes for stream in reader.manifest.streams)
    for session in sessions:
        if session.pool is not None and session.pooled:
            session.pool.require(session.pooled)
            session.pool.map()
    rows = [
        (session, row, start + row.number * step, offset + row.number * step if offset >= 0 else -1)
        for session in sessions
        for stream, start, offset in live_mappings(session, reader)
        if not (session.evicted and offset >= 0)
        for row in reader.index.rows(stream)
    ]
    if not rows:
        return counts  # evicted: no ring is wanted
    work = iter(rows)

    async def check() -> None:
        for session, row, address, offset in work:
            if session.pool is not None and offset >= 0:
                with session.pool.lend(offset, row.raw_bytes) as lent:
                    scan = await context.workers.scan(lent, row.raw_bytes)
            else:
                with await context.ring.acquire() as slot:
                    scan = await context.workers.read_process(session.pid, address, slot, row.raw_bytes)
            counts.chunks += 1
            counts.zero_chunks += scan.zero
            if scan.crc32c != row.raw_crc32c:
                name = reader.manifest.streams[row.stream].name
                raise ImageCorrupt(
                    f"the memory of {session} at {address:#x} is not what {reader.url} has as {name} chunk {row.number}",
                    cure="the process was not touched; restore from its own memory without comparing: "
                    f"ckptpipe recover --pid {session.pid}",
                )

    await in_parallel(fillers(context), check)
    return counts
