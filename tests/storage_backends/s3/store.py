"""What the tests of the S3 backend share: a backend on a server, whole objects in one call, boto3 beside it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ckptpipe.pyx.checksum import crc32c
from ckptpipe.pyx.staging import StagingRing, leaked, outstanding
from ckptpipe.storage_backends.abc import BackendContext, Extent, ObjectInfo, ObjectWriter
from ckptpipe.storage_backends.s3 import S3Backend
from ckptpipe.storage_backends.testing import lent_context
from tests.services.s3_server import S3Server

MIB = 1 << 20
SLOT = MIB
T = TypeVar("T")


def data_of(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


@dataclass
class Store:
    context: BackendContext
    ring: StagingRing
    backend: S3Backend

    async def append(self, writer: ObjectWriter, data: bytes) -> int:
        """At most a slot."""
        with await self.ring.acquire() as lease:
            with memoryview(lease) as view:
                view[: len(data)] = data
            return await writer.append([Extent(lease, len(data), crc32c(data))])

    async def write(self, name: str, data: bytes, *, piece: int = SLOT) -> ObjectInfo:
        writer = await self.backend.create(name)
        try:
            for start in range(0, len(data), piece):
                await self.append(writer, data[start : start + piece])
            return await writer.finish()
        except BaseException:
            await writer.abort()
            raise

    async def read(self, name: str, nbytes: int, offset: int = 0) -> bytes:
        """Slots side by side, as many as the ring has."""

        async def piece(start: int) -> bytes:
            count = min(SLOT, nbytes - start)
            with await self.ring.acquire() as lease:
                await self.backend.read_into(name, offset + start, count, lease)
                with memoryview(lease) as view:
                    return bytes(view[:count])

        return b"".join(await asyncio.gather(*(piece(start) for start in range(0, nbytes, SLOT))))


def run(
    server: S3Server,
    main: Callable[[Store], Awaitable[T]],
    *,
    endpoint_url: str = "",
    inflight_bytes: int = 32 * MIB,
    slots: int = 40,
    prefix: str = "",
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    **options: Any,
) -> T:
    """``main`` on a loop of its own; afterwards nothing may be held. ``prefix`` "": one of this test's own."""

    async def lend() -> T:
        held, lost = outstanding(), leaked()
        ring = StagingRing(slots, SLOT, huge_pages="off", prefault_threads=1)
        async with lent_context(inflight_bytes=inflight_bytes) as context:
            url = f"s3://{server.bucket}/{prefix or f'tests/{random.getrandbits(48):012x}'}"
            chosen = {"endpoint_url": endpoint_url or server.endpoint_url, **options}
            backend = await S3Backend.open(url, context, chosen)
            try:
                result = await main(Store(context, ring, backend))
            finally:
                await backend.aclose()
        assert (outstanding() - held, leaked() - lost) == (0, 0)
        ring.close()
        return result

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(lend())


@contextmanager
def boto(server: S3Server) -> Iterator[Any]:
    """Another program's view of the same store."""
    import boto3
    from botocore.config import Config

    config = Config(
        response_checksum_validation="when_required", request_checksum_calculation="when_required"
    )
    client = boto3.client("s3", config=config, **server.client_options())
    try:
        yield client
    finally:
        client.close()


def uploads(client: Any, server: S3Server, prefix: str) -> list[str]:
    found = client.list_multipart_uploads(Bucket=server.bucket, Prefix=prefix)
    return [item["Key"] for item in found.get("Uploads", ())]


def key_prefix(backend: S3Backend) -> str:
    return backend.url.split("/", 3)[3] + "/"
