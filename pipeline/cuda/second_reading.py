"""Reading an image into memory that may be written twice: bytes that were bad once are read again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.errors import ImageCorrupt
from ckptpipe.pipeline.graph import Graph
from ckptpipe.pipeline.progress import ProgressCallback
from ckptpipe.pipeline.sinks.abc import Sink
from ckptpipe.pipeline.sources.image import Counts, ImageSource
from ckptpipe.storage_backends.shielded import shielded

TRIES = 2  # before the restore is given up


async def read_again_if_bad(
    context: GraphContext,
    make: Callable[[], Awaitable[tuple[ImageSource, Sink]]],
    progress: ProgressCallback | None,
) -> Counts:
    """``make`` gives the source, not yet open, and the sink of each try. ImageCorrupt where the last one fails."""
    for left in reversed(range(TRIES)):
        source, sink = await make()
        await source.open(context)
        graph = Graph(source, context, phase="restore")
        graph.add_sink(sink)
        try:
            await graph.run(progress)
            return source.counts
        except ImageCorrupt as error:
            if not left:
                raise
            context.notes.append(f"read again, since it was bad the first time: {error.message}")
        finally:
            await shielded(graph.aclose())
            await shielded(source.aclose())
    raise AssertionError("the last try returns or raises")
