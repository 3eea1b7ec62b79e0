"""Opening what is stored: a backend for reading, an image in it, and the context that both need."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from ckptpipe.pipeline.context import GraphContext, graph_context
from ckptpipe.pipeline.errors import ImageNotFound
from ckptpipe.pipeline.image.reader import ImageReader, open_image
from ckptpipe.pipeline.settings import Settings
from ckptpipe.storage_backends.abc import Backend
from ckptpipe.storage_backends.errors import StoreNotFound
from ckptpipe.storage_backends.registry import open_backend
from ckptpipe.storage_backends.shielded import shielded

Options = Mapping[str, object]


@asynccontextmanager
async def opened(
    url: str, options: Options | None, settings: Settings | None, *, image: bool = False
) -> AsyncIterator[tuple[Backend, GraphContext]]:
    """A backend for reading, on a context of its own. ``image``: ``url`` is one; ImageNotFound where not."""
    async with (
        graph_context(settings or Settings()) as context,
        _backend_in(context, url, options, image=image) as backend,
    ):
        yield backend, context


@asynccontextmanager
async def reading(
    url: str, options: Options | None, settings: Settings | None, expect_digest: str = ""
) -> AsyncIterator[tuple[ImageReader, GraphContext]]:
    """An image, on a context of its own with its size of chunks. ImageNotFound where there is none."""
    async with (
        graph_context(settings or Settings()) as context,
        image_in(context, url, options, expect_digest) as reader,
    ):
        context.take_chunk_bytes(reader.manifest.chunk_bytes)
        yield reader, context


@asynccontextmanager
async def image_in(
    context: GraphContext, url: str, options: Options | None, expect_digest: str = ""
) -> AsyncIterator[ImageReader]:
    """An image, on a context that there is already. ImageNotFound where there is none."""
    async with _backend_in(context, url, options, image=True) as backend:
        yield await open_image(backend, expect_digest=expect_digest)


@asynccontextmanager
async def _backend_in(
    context: GraphContext, url: str, options: Options | None, *, image: bool
) -> AsyncIterator[Backend]:
    backend = await open_backend(url, context.backend_context, options)
    try:
        try:
            await backend.check(writing=False)
        except StoreNotFound as error:
            if not image:
                raise
            raise ImageNotFound(f"no image at {backend.url}: {error.message}", cure=error.cure) from error
        yield backend
    finally:
        await shielded(backend.aclose())
