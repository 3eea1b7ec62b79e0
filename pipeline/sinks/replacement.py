"""A sink that writes an image anew in its own place."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.edge import Edge
from ckptpipe.pipeline.errors import ImageCorrupt, ImageReplaced
from ckptpipe.pipeline.image.index import Index
from ckptpipe.pipeline.image.layout import MANIFEST_NAME
from ckptpipe.pipeline.image.manifest import MANIFEST_LIMIT, Manifest, digest_of
from ckptpipe.pipeline.image.reader import ImageReader
from ckptpipe.pipeline.sinks.image import ImageSink
from ckptpipe.pipeline.sources.abc import Source
from ckptpipe.pipeline.stages.abc import CodingStage
from ckptpipe.storage_backends.abc import Backend
from ckptpipe.storage_backends.errors import ObjectNotFound


class NotSmaller(Exception):
    """What was written saves nothing: it was not committed."""


class ReplacementSink(ImageSink):
    """Replaces the image that ``reader`` has open, and no other, by the same contents stored otherwise.

    The old manifest stands until the new one takes its place, in which every chunk has the raw CRC32C that it had.
    """

    def __init__(
        self,
        reader: ImageReader,
        context: GraphContext,
        *,
        save_id: str,
        options: Mapping[str, object],
        compress: CodingStage,
        gain: float,
    ) -> None:
        """``gain``: the share of the stored bytes that must be saved, or NotSmaller is raised in place of a commit."""
        super().__init__(
            "image",
            reader.url,
            context,
            save_id=save_id,
            image_name=reader.manifest.name,
            overwrite=True,
            policy="required",
            deadline=0.0,
            options=options,
            compress=compress,
        )
        self._reader = reader
        self._gain = gain

    async def _place(self, container: Backend) -> Backend:
        return container  # the URL is the image's own

    async def check(self, source: Source) -> None:
        await super().check(source)
        self._require_same(self._replaced)

    async def run(self, edge: Edge) -> None:
        await super().run(edge)
        assert self._packer is not None
        before = self._reader.manifest.totals.stored_bytes
        if self._packer.stored_bytes > before * (1 - self._gain):
            raise NotSmaller(self._packer.stored_bytes)

    async def _look_again(self) -> None:
        try:
            stands = await self._image.read_bytes(MANIFEST_NAME, limit=MANIFEST_LIMIT)
        except ObjectNotFound:
            stands = b""
        self._require_same(stands)

    def _require_same(self, manifest: bytes) -> None:
        if digest_of(manifest) != self._reader.digest:
            raise ImageReplaced(
                f"{self._reader.url} was {'replaced' if manifest else 'deleted'} while it was recompressed; "
                "what stands there was not touched",
                cure="run it again" if manifest else "",
            )

    async def _before_commit(self, manifest: bytes) -> None:
        await asyncio.to_thread(self._compare, Manifest.decode(manifest))

    def _compare(self, manifest: Manifest) -> None:
        """Every chunk of the new index against the old one's: a second for a million."""
        assert self._encoded is not None
        old, new = self._reader.index, Index.decode(self._encoded.stored, manifest)
        for was, now in zip(old.rows(), new.rows(), strict=True):
            if (was.stream, was.number, was.raw_bytes, was.raw_crc32c) != (
                now.stream,
                now.number,
                now.raw_bytes,
                now.raw_crc32c,
            ):
                raise ImageCorrupt(
                    f"{self._reader.url}: stream {was.stream} chunk {was.number} would not be what it was; "
                    "the old image stands"
                )

    def _codec_facts(self, source: Source) -> dict[str, object]:
        return super()._codec_facts(source) | {"recompressed_from": self._reader.digest}
