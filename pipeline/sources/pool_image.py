"""A stored image as a source for the pools of launched processes, which their driver reads from front to back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptpipe.pipeline.image.layout import padded
from ckptpipe.pipeline.image.reader import Extent, ImageReader
from ckptpipe.pipeline.image.records import ChunkRecord
from ckptpipe.pipeline.sources.image import ImageSource


class PoolImageSource(ImageSource):
    """Chunk after chunk in the order of ``streams``, which is not always that of the objects: what changed while it
    was saved was stored again at the end. `PoolSink` reads what lies in local files by itself, straight to its place."""

    def __init__(self, reader: ImageReader, streams: Sequence[str]) -> None:
        super().__init__(reader, decode=True, streams=streams, sink_loads=True)

    def _work(self) -> Iterator[Extent | ChunkRecord]:
        for stream in self._chosen:
            for row in self.reader.index.rows(stream):
                if row.zero:
                    yield row
                else:
                    yield Extent(row.object, row.offset, padded(row.stored_bytes), [row])
