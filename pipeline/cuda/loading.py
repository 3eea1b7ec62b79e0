"""Stored chunks that lie in local files go straight into device memory: no ring slot, no second copy.

The source passes them on unread, by their place in a file; the sink has the GPU's queue load them, and check them or
decode them there. The threads and buffers that do it are small: what a ring costs to prefault and to pin is saved too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptpipe.pipeline.chunk import Chunk
from ckptpipe.pipeline.image.reader import ImageReader
from ckptpipe.pyx.cuda import CopyQueue, LoadPlan
from ckptpipe.pyx.cuda_load import THREADS, cpus_of, threads_for
from ckptpipe.pyx.workers import Scan
from ckptpipe.storage_backends.directory import storage_error
from ckptpipe.storage_backends.errors import ObjectTruncated

if TYPE_CHECKING:
    from ckptpipe.pipeline.sources.image import ImageSource

THREADS_MIN = 2  # of each GPU, on a machine with many
OBJECTS_MAX = 64  # that are looked at in advance


def load_plan(workers: int, gpus: int, numa_node: int | None, chunk_bytes: int) -> LoadPlan:
    """``workers``: threads in all, 0 for as many as suit the CPUs; ``gpus``: how many share the CPUs of ``numa_node``."""
    gpus = max(gpus, 1)
    threads = min(workers // gpus, THREADS) if workers else threads_for(len(cpus_of(numa_node)) // gpus)
    return LoadPlan(threads=max(THREADS_MIN, threads)).of_chunks(chunk_bytes)


@dataclass(frozen=True, slots=True)
class Loadable:
    """Whether ``all`` objects of an image are local files that can be loaded from, or ``some``."""

    all: bool
    some: bool


async def loadable(reader: ImageReader) -> Loadable:
    objects = reader.manifest.objects
    local = 0
    for entry in objects[:OBJECTS_MAX]:
        file = await reader.backend.local_file(entry.name)
        if file is not None:
            file.release()
            local += 1
    return Loadable(all=local == len(objects), some=local > 0)


async def load(source: ImageSource, chunk: Chunk, queue: CopyQueue, address: int) -> Scan | None:
    """The stored bytes of a chunk that was passed on by its place, into device memory; what has arrived there. None
    for a coded one: who decodes it checksums it first.

    ImageIncomplete, StorageError and their kinds, as where they are read into a slot; CudaError.
    """
    assert chunk.place is not None
    file = chunk.place.file
    try:
        return await queue.load(file, chunk.place.offset, chunk.stored_bytes, address, scan=not chunk.planes)
    except EOFError as error:
        ended = ObjectTruncated(f"{file.path}: {error}")
        raise await source.missing(chunk.stream, chunk.number, ended) from error
    except OSError as error:
        raise storage_error(error, "read", file.path) from error
