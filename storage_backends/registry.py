"""Which backend serves a URL (contract)."""

from __future__ import annotations

from collections.abc import Mapping

from ckptpipe.storage_backends.abc import Backend, BackendContext


def scheme_of(url: str) -> str:
    """``nvme:/a,/b`` -> nvme; ``s3://…`` -> s3; a bare path -> nvme, or fuse where it lies on a FUSE mount."""
    raise NotImplementedError


async def open_backend(
    url: str, context: BackendContext, options: Mapping[str, object] | None = None
) -> Backend:
    """Open the backend of ``url``. UnknownScheme names the known ones. ``options`` are the backend's own."""
    raise NotImplementedError


def schemes() -> list[str]:
    """Registered schemes, sorted."""
    raise NotImplementedError
