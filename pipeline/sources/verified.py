"""A stored image as a source for verify, which looks at what a restore has no use for, too."""

from __future__ import annotations

from typing import Any

from ckptpipe.pipeline.chunk import Chunk
from ckptpipe.pipeline.image.layout import padded
from ckptpipe.pipeline.image.records import ChunkRecord
from ckptpipe.pipeline.sources.image import ImageSource
from ckptpipe.pyx.staging import Lease
from ckptpipe.storage_backends.abc import Landing


class VerifiedImage(ImageSource):
    """Padding that is not zeros is damage, though no chunk is the worse for it: the object's checksum is not that of
    the manifest any more, and something has written where nothing should."""

    async def _chunk(self, row: ChunkRecord, part: Lease, *args: Any, **kwargs: Any) -> Chunk:
        with memoryview(part) as view:
            rest = bytes(view[row.stored_bytes : padded(row.stored_bytes)])
        if rest != bytes(len(rest)):
            self._bad(self._corrupt(row, "is padded with something else than zeros"))
        return await super()._chunk(row, part, *args, **kwargs)

    async def _landing_of(self, row: ChunkRecord) -> Landing | None:
        """What has padding is read into a slot, where that is seen."""
        return None if row.stored_bytes % padded(1) else await super()._landing_of(row)
