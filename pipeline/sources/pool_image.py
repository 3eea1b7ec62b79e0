"""A stored image as a source for the pools of launched processes, which their driver reads from front to back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckptpipe.pipeline.cuda.image_window import ImageWindow
from ckptpipe.pipeline.image.layout import padded
from ckptpipe.pipeline.image.reader import Extent, ImageReader
from ckptpipe.pipeline.image.records import ChunkRecord
from ckptpipe.pipeline.sources.image import ImageSource, SinkWork


class PoolImageSource(ImageSource):
    """Chunk after chunk in the order of ``streams``, which is not always that of the objects: what changed while it
    was saved was stored again at the end. `PoolSink` reads what lies in local files by itself, straight to its place."""

    def __init__(
        self, reader: ImageReader, streams: Sequence[str], windows: Mapping[str, ImageWindow] | None = None
    ) -> None:
        """``windows``: streams that have no room for all their chunks at a time."""
        super().__init__(reader, decode=True, streams=streams, sink=SinkWork(loads=True))
        self._windows = {reader.select([name])[0]: window for name, window in (windows or {}).items()}

    async def _room(self, item: Extent | ChunkRecord) -> None:
        row = item.rows[0] if isinstance(item, Extent) else item
        if (window := self._windows.get(row.stream)) is not None:
            await window.room(row.number)

    def _work(self) -> Iterator[Extent | ChunkRecord]:
        for stream in self._chosen:
            for row in self.reader.index.rows(stream):
                if row.zero:
                    yield row
                else:
                    yield Extent(row.object, row.offset, padded(row.stored_bytes), [row])
