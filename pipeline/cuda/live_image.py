"""The driver's image in a living, checkpointed process, compared with the one that was saved of it."""

from __future__ import annotations

from collections.abc import Sequence

from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda.errors import CheckpointMismatch
from ckptpipe.pipeline.cuda.session import ProcessSession
from ckptpipe.pipeline.errors import ImageCorrupt
from ckptpipe.pipeline.image.reader import ImageReader
from ckptpipe.pipeline.sources.abc import fillers, in_parallel
from ckptpipe.pipeline.sources.image import Counts


def live_mappings(session: ProcessSession, reader: ImageReader) -> list[tuple[int, int, int]]:
    """(stream, address, bytes) of each of the process's streams. CheckpointMismatch where they have moved."""
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
        found.append((position, start, nbytes))
    if len(found) != len(streams):
        raise CheckpointMismatch(f"the image has {len(streams)} driver mappings, {session} has {len(found)}")
    return found


async def verify_live_image(
    sessions: Sequence[ProcessSession], reader: ImageReader, context: GraphContext
) -> Counts:
    """Every chunk of the processes' own memory against its checksum in the index.

    ImageCorrupt at the first chunk that differs; nothing has been asked of the driver then.
    """
    counts, step = Counts(), context.chunk_bytes
    counts.streams = len(reader.manifest.streams)
    counts.raw_bytes = sum(stream.bytes for stream in reader.manifest.streams)
    work = iter(
        [
            (session, row, start + row.number * step)
            for session in sessions
            for stream, start, _ in live_mappings(session, reader)
            for row in reader.index.rows(stream)
        ]
    )

    async def check() -> None:
        for session, row, address in work:
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
