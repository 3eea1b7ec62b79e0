"""Small objects in one piece: manifest, index, lease. Conditional PUT, and what stands in for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ckptpipe.pyx.checksum import crc32c
from ckptpipe.pyx.staging import Lease, lease_buffer
from ckptpipe.storage_backends.errors import ObjectExists, ObjectNotFound, StorageError
from ckptpipe.storage_backends.s3.client import S3Client
from ckptpipe.storage_backends.s3.errors import Refused, is_redirect, request_errors
from ckptpipe.storage_backends.s3.operation import asking
from ckptpipe.storage_backends.s3.put import Put
from ckptpipe.storage_backends.s3.puts import Puts


class SmallObjects:
    """GET and PUT of whole objects of one bucket."""

    def __init__(self, client: S3Client, bucket: str, puts: Puts) -> None:
        self._client = client
        self._puts = puts
        self._bucket = bucket
        self._probing = asyncio.Lock()

    async def put(self, key: str, what: str, data: bytes) -> None:
        """Replace: S3 shows the old object or the new one."""
        await self._put(key, what, data)

    async def put_if_absent(self, key: str, what: str, data: bytes) -> None:
        """ObjectExists where there is one. Atomic where the store honours If-None-Match, which is found out
        once: by a second PUT of the same bytes over our own new object."""
        if self._client.facts.conditional:
            await self._create(key, what, data)
            return
        async with self._probing:
            await self._must_be_absent(key, what)
            if self._client.facts.conditional is False:
                await self._put(key, what, data)
                return
            try:
                await self._create(key, what, data)
            except StorageError as error:
                if not _not_implemented(error):
                    raise
                self._not_conditional("refuses")
                await self._put(key, what, data)
                return
            if self._client.facts.conditional is None:
                await self._probe(key, what, data)

    async def _probe(self, key: str, what: str, data: bytes) -> None:
        try:
            await self._put(key, what, data, IfNoneMatch="*")
        except ObjectExists:
            self._client.facts.conditional = True
        else:
            self._not_conditional("ignores")

    def _not_conditional(self, does: str) -> None:
        self._client.facts.conditional = False
        self._client.facts.note(
            f"the store {does} If-None-Match: whether an object is there is looked up before it is written"
        )

    async def _must_be_absent(self, key: str, what: str) -> None:
        try:
            await self._client.call(
                "head_object", what, {"Bucket": self._bucket, "Key": key, **self._client.owner()}
            )
        except ObjectNotFound:
            return
        raise ObjectExists(f"{what} exists already")

    async def _create(self, key: str, what: str, data: bytes) -> None:
        with lease_buffer(data or b"\0") as lease:
            put = self._new_put(key, what, data, lease, {"IfNoneMatch": "*"})
            try:
                with asking("PutObject"):
                    await self._puts.send(put)
            except ObjectExists as error:
                # An answer that was lost, and the request sent again: then the object is the one that we sent.
                if put.times > 1 and await self._holds(key, what, data):
                    return
                raise ObjectExists(f"{what} exists already") from error

    async def _holds(self, key: str, what: str, data: bytes) -> bool:
        try:
            return await self.read(key, what, limit=len(data)) == data
        except StorageError:
            return False

    async def _put(self, key: str, what: str, data: bytes, **condition: str) -> None:
        with lease_buffer(data or b"\0") as lease, asking("PutObject"):
            await self._puts.send(self._new_put(key, what, data, lease, condition))

    def _new_put(self, key: str, what: str, data: bytes, lease: Lease, condition: Mapping[str, str]) -> Put:
        # Not paced: the lease of a save is renewed however many parts are waiting.
        return Put(
            what,
            key,
            [(lease, len(data))],
            crc32c(data),
            parameters={**self._client.new_object(), **condition},
            paced=False,
        )

    async def read(self, key: str, what: str, *, limit: int) -> bytes:
        """A whole object. StorageError where it has more than ``limit`` bytes."""
        with asking("GetObject"):
            return await self._read(key, what, limit)

    async def _read(self, key: str, what: str, limit: int) -> bytes:
        tries = self._client.attempts()
        parameters = {"Bucket": self._bucket, "Key": key, **self._client.owner()}
        while True:
            control = self._client.control if self._client.plain else None
            try:
                if control is not None:
                    return await control.get(key, what, limit)
                async with asyncio.timeout(self._client.options.stall_timeout) as deadline:
                    answer = await (await self._client.api()).get_object(**parameters)
                    return await self._body(answer, what, limit, deadline)
            except Refused as refused:
                fault = refused.fault
            except request_errors() as error:
                fault = self._client.explain(what, error)
            if control is not None and is_redirect(fault):
                self._client.plain = False  # the SDK follows
            elif not self._client.adapt(fault, parameters):
                await tries.again(fault)

    async def _body(self, answer: Any, what: str, limit: int, deadline: asyncio.Timeout) -> bytes:
        loop = asyncio.get_running_loop()
        body = answer["Body"]
        try:
            size = int(answer["ContentLength"])
            if size > limit:
                raise StorageError(f"{what}: {size} bytes, at most {limit} are accepted")
            pieces = []
            left = size
            while left:
                piece = await body.read(min(left, 1 << 20))
                if not piece:
                    raise EOFError(f"{left} bytes are missing")
                pieces.append(piece)
                left -= len(piece)
                deadline.reschedule(loop.time() + self._client.options.stall_timeout)
            if not await body.read(1):
                return b"".join(pieces)
            raise StorageError(f"{what}: the store sent more bytes than it announced")
        finally:
            body.close()


def _not_implemented(error: StorageError) -> bool:
    text = error.message.lower()
    return any(word in text for word in ("notimplemented", "not implemented", "if-none-match", "http 501"))
