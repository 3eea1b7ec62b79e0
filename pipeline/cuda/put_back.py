"""Bring processes back from an image that was made with custom storage: the end of a restore, and of a save
that leaves its processes running."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.cuda.custom_storage import ranges_of
from ckptpipe.pipeline.cuda.gpu_decoding import GpuDecoding, plan_decoding
from ckptpipe.pipeline.cuda.links import Links
from ckptpipe.pipeline.cuda.second_reading import read_again_if_bad
from ckptpipe.pipeline.cuda.session import ProcessSession
from ckptpipe.pipeline.cuda.states import ProcessState
from ckptpipe.pipeline.cuda.target import while_alive
from ckptpipe.pipeline.image.reader import ImageReader
from ckptpipe.pipeline.progress import ProgressCallback
from ckptpipe.pipeline.sinks.abc import Sink
from ckptpipe.pipeline.sinks.device import DeviceSink
from ckptpipe.pipeline.sources.device import DeviceRange
from ckptpipe.pipeline.sources.image import Counts, ImageSource
from ckptpipe.pyx.errors import CkptpipeError


async def put_back(
    sessions: Sequence[ProcessSession],
    reader: ImageReader,
    context: GraphContext,
    links: Links,
    *,
    pairs: Mapping[int, Mapping[str, str]] | None = None,
    decoding: GpuDecoding | None = None,
    progress: ProgressCallback | None = None,
) -> Counts:
    """CHECKPOINTED (or RESTORING, where an earlier try left it there) -> RUNNING for every session.

    ``pairs``: of each session (by k), old GPU to new GPU. ``decoding``: what `plan_decoding` said. Prepares one
    after another, copies all together, completes and unlocks in reverse order. Nothing is completed before every
    byte has arrived verified. A process that cannot be prepared does not hold up the others: they run again, and
    then its error is raised.
    """
    decoding = decoding or await plan_decoding(links, context, reader)
    ready: list[ProcessSession] = []
    failed: list[CkptpipeError] = []
    renamed: dict[str, str] = {}
    for session in sessions:
        mapped = dict((pairs or {}).get(session.k, {}))
        session.touched = True
        try:
            if session.operation is None:
                await session.restore_custom(mapped)
            await session.find_memory()
            ready.append(session)
        except CkptpipeError as error:
            failed.append(error)
        renamed |= {
            f"proc/{session.k}/gpu/{new}": f"proc/{session.k}/gpu/{old}" for old, new in mapped.items()
        }
    counts = Counts()
    if ready:
        ranges = [_as_saved(each, renamed) for each in ranges_of(ready)]
        targets = [session.target for session in ready]
        counts = await while_alive(targets, _copy(ranges, reader, context, links, decoding, progress))
        for session in reversed(ready):
            await session.complete(ProcessState.LOCKED)
        for session in reversed(ready):
            await session.unlock()
    if failed:
        raise failed[0]
    return counts


def _as_saved(target: DeviceRange, renamed: Mapping[str, str]) -> DeviceRange:
    """The range under the name that its GPU had when the image was made."""
    name = renamed.get(target.stream, target.stream)
    return DeviceRange(name, target.kind, target.ordinal, target.address, target.nbytes)


async def _copy(
    ranges: Sequence[DeviceRange],
    reader: ImageReader,
    context: GraphContext,
    links: Links,
    decoding: GpuDecoding,
    progress: ProgressCallback | None,
) -> Counts:
    async def make() -> tuple[ImageSource, Sink]:
        source = ImageSource(
            reader,
            decode=True,
            streams=[each.stream for each in ranges],
            sink=DeviceSink.work(ranges, links, decoding),
        )
        return source, DeviceSink(ranges, links, context)

    return await read_again_if_bad(context, make, progress)
