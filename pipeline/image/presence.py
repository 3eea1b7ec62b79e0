"""Whether all that a save has stored is still in the store."""

from __future__ import annotations

from collections.abc import Iterable

from ckptpipe.pipeline.image.removal import AT_ONCE
from ckptpipe.pipeline.parallel import in_parallel
from ckptpipe.storage_backends.abc import Backend
from ckptpipe.storage_backends.errors import ObjectNotFound


async def missing(backend: Backend, expected: Iterable[tuple[str, int]]) -> list[str]:
    """Of objects by name and size in bytes, those that are not there, or not of that size, in words. One look at each,
    some side by side."""
    left = iter(expected)
    found: list[str] = []

    async def look() -> None:
        for name, size in left:
            try:
                has = (await backend.stat(name)).size
            except ObjectNotFound:
                found.append(name)
            else:
                if has != size:
                    found.append(f"{name} ({has} bytes are left of {size})")

    await in_parallel(AT_ONCE, look)
    return sorted(found)
