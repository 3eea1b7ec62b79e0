"""A stored image as a source for verify, which looks at what a restore has no use for, too."""

from __future__ import annotations

from ckptpipe.pipeline.image.layout import padded
from ckptpipe.pipeline.image.records import ChunkRecord
from ckptpipe.pipeline.sources.image import ImageSource
from ckptpipe.pyx.staging import Lease
from ckptpipe.storage_backends.abc import Landing


class VerifiedImage(ImageSource):
    """Padding that is not zeros is damage, though no chunk is the worse for it: the object's checksum is not that of
    the manifest any more, and something has written where nothing should."""

    def _wrong_padding(self, row: ChunkRecord, part: Lease) -> str:
        with memoryview(part) as view:
            rest = bytes(view[row.stored_bytes : padded(row.stored_bytes)])
        return "is padded with something else than zeros" if rest != bytes(len(rest)) else ""

    async def _landing_of(self, row: ChunkRecord) -> Landing | None:
        """What has padding is read into a slot, where that is seen."""
        return None if row.stored_bytes % padded(1) else await super()._landing_of(row)
