"""SHA-256 of what lies in leases, off the loop: for stores that want bodies signed."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from ckptpipe.pyx.staging import Lease
from ckptpipe.storage_backends.shielded import shielded


def sha256_of(ranges: Sequence[tuple[Lease, int]]) -> str:
    """SHA-256 in hex of ``ranges``, for a thread: hashlib lets the GIL go."""
    digest = hashlib.sha256()
    for lease, nbytes in ranges:
        with memoryview(lease) as whole, whole[:nbytes] as view:
            digest.update(view)
    return digest.hexdigest()


async def hash_ranges(ranges: Sequence[tuple[Lease, int]]) -> str:
    return await shielded(asyncio.to_thread(sha256_of, ranges))
