"""``s3://bucket/prefix``: multipart uploads straight from ring slots, ranged GETs straight into them."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from ckptpipe.pyx.staging import Lease
from ckptpipe.storage_backends.abc import (
    WRITE_PROBE,
    Backend,
    BackendContext,
    BackendReport,
    Capabilities,
    Landing,
    ObjectInfo,
    ObjectWriter,
    PendingUpload,
    check_name,
    is_name,
)
from ckptpipe.storage_backends.errors import EndpointUnreachable, ObjectNotFound, StorageError
from ckptpipe.storage_backends.options import parse_options
from ckptpipe.storage_backends.s3.address import Address, parse_address
from ckptpipe.storage_backends.s3.client import UNLISTED, S3Client, connect
from ckptpipe.storage_backends.s3.control import Control
from ckptpipe.storage_backends.s3.errors import no_bucket
from ckptpipe.storage_backends.s3.multipart import S3Writer, part_target
from ckptpipe.storage_backends.s3.operation import asking
from ckptpipe.storage_backends.s3.options import MAX_PARTS, SPARE_PARTS, S3Options
from ckptpipe.storage_backends.s3.put import decode_crc32c
from ckptpipe.storage_backends.s3.puts import Puts
from ckptpipe.storage_backends.s3.ranged_get import RangedGet
from ckptpipe.storage_backends.s3.see_through import see_through
from ckptpipe.storage_backends.s3.small_object import SmallObjects
from ckptpipe.storage_backends.s3.upload import Upload, abort_upload
from ckptpipe.storage_backends.s3.wires import Wires

_CHECK_WITHIN = 20.0  # seconds
_CHECK_TRIES = 4  # within that time
_LISTED_TOGETHER = 8


class _Shared:
    """What a backend and its children have together."""

    def __init__(self, client: S3Client, bucket: str) -> None:
        self.client = client
        self.wires = Wires(client, bucket)
        client.control = Control(client, self.wires)
        self.get = RangedGet(client, bucket, self.wires)
        self.puts = Puts(client, bucket, self.wires)
        self.small = SmallObjects(client, bucket, self.puts)
        self.writers: set[S3Writer] = set()
        self.closed = False


class S3Backend(Backend):
    """An object store that speaks S3. Atomic: an object is there whole or not at all, for S3 shows neither an
    upload that is not completed nor half of a PUT. Read-after-write: as S3 itself since 2020."""

    scheme: ClassVar[str] = "s3"
    options_type: ClassVar[type[Any]] = S3Options

    def __init__(self, address: Address, shared: _Shared) -> None:
        self._address = address
        self._shared = shared
        self.url = address.url

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]  # what is learnt changes it
        client = self._shared.client
        target = part_target(client.options.part_bytes, client.context.inflight_bytes)
        return Capabilities(
            write_size=target,
            lanes=1,
            max_object_bytes=target * (MAX_PARTS - SPARE_PARTS),
            put_atomic="put" if client.facts.conditional is False else "conditional-put",
            if_absent="checked" if client.facts.conditional is False else "atomic",
            durable=True,
            takes_files=self._shared.puts.sends_files,
            reads_through=self._shared.get.goes_through,
            reads_anew=True,
        )

    @classmethod
    async def open(cls, url: str, context: BackendContext, options: Mapping[str, object]) -> Self:
        address = parse_address(url)
        chosen = parse_options(S3Options, options, cls.scheme)
        client = await connect(address.bucket, chosen, context)
        return cls(address, _Shared(client, address.bucket))

    async def check(self, *, writing: bool, need_bytes: int = 0) -> None:
        try:
            async with asyncio.timeout(_CHECK_WITHIN):
                await self._check_reading()
                if writing:
                    await self._check_writing()
        except TimeoutError:
            raise EndpointUnreachable(
                f"{self.url}: {self._shared.client.place.endpoint} did not answer within {_CHECK_WITHIN:.0f} s",
                cure="check the option endpoint_url or AWS_ENDPOINT_URL, and that the server runs",
            ) from None

    async def _check_reading(self) -> None:
        try:
            await self._call(
                "list_objects_v2",
                self.url,
                {"Prefix": self._address.prefix, "MaxKeys": 1},
                attempts=_CHECK_TRIES,
            )
        except ObjectNotFound as error:
            # Some stores say NoSuchKey, or just 404, of a bucket that is not there.
            raise no_bucket(self._shared.client.place) from error

    async def _check_writing(self) -> None:
        """Begin an upload and abort it: proves the permission to write, and leaves nothing."""
        client, puts = self._shared.client, self._shared.puts
        key = self._address.prefix + WRITE_PROBE
        probe = Upload(client, puts, self._address.bucket, key, self.url, attempts=_CHECK_TRIES)
        try:
            await probe.id()
        finally:
            await see_through(probe.abort())

    def child(self, name: str) -> Self:
        return type(self)(self._address.below(check_name(name)), self._shared)

    async def children(self, *, unfinished: bool = False) -> builtins.list[str]:
        names = await self._folders()
        if not self._shared.client.is_aws:
            names = await self._with_objects(names)
        if unfinished:
            keys = [item["Key"] async for item in self._uploads()]
            names |= {_first_part(key, self._address.prefix) for key in keys}
        return sorted(name for name in names if is_name(name))

    async def _folders(self) -> set[str]:
        """Names under which the store lists something; foreign ones too."""
        start = len(self._address.prefix)
        found: set[str] = set()
        async for page in self._pages(""):
            for item in page.get("CommonPrefixes", ()):
                found.add(item["Prefix"][start:].rstrip("/"))
        return found

    async def _with_objects(self, names: set[str]) -> set[str]:
        """A store that lies on a file system lists folders from which every object was deleted."""
        gate = asyncio.Semaphore(_LISTED_TOGETHER)
        try:
            async with asyncio.TaskGroup() as group:
                checks = {name: group.create_task(self._has_objects(name, gate)) for name in names if name}
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return {name for name, check in checks.items() if check.result()}

    async def _has_objects(self, name: str, gate: asyncio.Semaphore) -> bool:
        async with gate:
            page = await self._call(
                "list_objects_v2", self.url, {"Prefix": f"{self._address.prefix}{name}/", "MaxKeys": 1}
            )
        return bool(page.get("Contents"))

    async def create(self, name: str, *, lane: int = 0, size_hint: int = 0) -> ObjectWriter:
        self._check_open()
        writer = S3Writer(
            name,
            self._address.bucket,
            self._key(name),
            self._shared.client,
            self._shared.puts,
            what=self._what(name),
            on_close=self._shared.writers.discard,
        )
        self._shared.writers.add(writer)
        return writer

    async def read_into(self, name: str, offset: int, nbytes: int, lease: Lease) -> int | None:
        self._check_open()
        with asking("GetObject"):
            return await self._shared.get.read_into(self._key(name), self._what(name), offset, nbytes, lease)

    async def read_through(self, name: str, offset: int, to: Sequence[Landing]) -> builtins.list[int] | None:
        self._check_open()
        with asking("GetObject"):
            return await self._shared.get.read_through(self._key(name), self._what(name), offset, to)

    async def read_bytes(self, name: str, *, limit: int) -> bytes:
        return await self._shared.small.read(self._key(name), self._what(name), limit=limit)

    async def put_atomic(self, name: str, data: bytes, *, if_absent: bool = False, lane: int = 0) -> None:
        put = self._shared.small.put_if_absent if if_absent else self._shared.small.put
        await see_through(put(self._key(name), self._what(name), bytes(data)))

    async def stat(self, name: str) -> ObjectInfo:
        asked = {"ChecksumMode": "ENABLED"} if self._shared.client.facts.checksum is not False else {}
        found = await self._call("head_object", self._what(name), {"Key": self._key(name), **asked})
        whole = found.get("ChecksumType") != "COMPOSITE"
        value = decode_crc32c(found.get("ChecksumCRC32C", "")) if whole else None
        return ObjectInfo(name, int(found["ContentLength"]), found["LastModified"].timestamp(), value)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        start = len(self._address.prefix)
        found = []
        async for page in self._pages(prefix):
            for item in page.get("Contents", ()):
                name = item["Key"][start:]
                if name and "/" not in name:  # a "folder" object of the prefix itself is none of ours
                    found.append(ObjectInfo(name, int(item["Size"]), item["LastModified"].timestamp()))
        found.sort(key=lambda info: info.name)
        for info in found:
            yield info

    async def delete(self, name: str) -> None:
        try:
            await self._call("delete_object", self._what(name), {"Key": self._key(name)})
        except ObjectNotFound:
            return

    async def remove_if_empty(self) -> None:
        """S3 has no directories."""

    async def pending(self) -> builtins.list[PendingUpload]:
        start = len(self._address.prefix)
        found = []
        async for item in self._uploads(Delimiter="/"):
            name = item["Key"][start:]
            if name and "/" not in name:
                found.append(PendingUpload(name, item["UploadId"], item["Initiated"].timestamp()))
        return sorted(found, key=lambda upload: (upload.name, upload.token))

    async def _uploads(self, **asked: str) -> AsyncIterator[dict[str, Any]]:
        """Every incomplete upload whose key starts with the prefix."""
        markers: dict[str, str] = {}
        while True:
            page = await self._call(
                "list_multipart_uploads", self.url, {"Prefix": self._address.prefix, **asked, **markers}
            )
            for item in page.get("Uploads", ()):
                yield item
            following = {
                "KeyMarker": page.get("NextKeyMarker", ""),
                "UploadIdMarker": page.get("NextUploadIdMarker", ""),
            }
            if not page.get("IsTruncated") or following == markers or not following["KeyMarker"]:
                return
            markers = following

    async def discard(self, upload: PendingUpload) -> None:
        place = {"Bucket": self._address.bucket, "Key": self._key(upload.name)}
        await abort_upload(self._shared.client, place, upload.token, self._what(upload.name))

    def report(self) -> BackendReport:
        facts = self._shared.client.facts
        pace = self._shared.client.pace
        notes = list(facts.notes)
        if pace.slowdowns:
            notes.append(f"the store asked {pace.slowdowns} times to slow down")
        unlisted = "" if facts.lists_uploads else UNLISTED
        return BackendReport(self.scheme, self._shared.client.scheme, "", facts.retries, notes, unlisted)

    async def aclose(self) -> None:
        shared = self._shared
        if shared.closed:
            return
        shared.closed = True
        try:
            for writer in builtins.list(shared.writers):
                await writer.abort()
        finally:
            try:
                await shared.wires.aclose()
            finally:
                await shared.client.aclose()

    # Parts.

    def _check_open(self) -> None:
        if self._shared.closed:
            raise StorageError(f"{self.url}: the backend is closed")

    def _key(self, name: str) -> str:
        return self._address.prefix + check_name(name)

    def _what(self, name: str) -> str:
        return f"{self.url}/{name}"

    async def _call(
        self, operation: str, what: str, parameters: Mapping[str, Any], *, attempts: int = 0
    ) -> dict[str, Any]:
        client = self._shared.client
        named = {"Bucket": self._address.bucket, **client.owner(), **parameters}
        return await client.call(operation, what, named, attempts=attempts)

    async def _pages(self, prefix: str) -> AsyncIterator[dict[str, Any]]:
        more: dict[str, str] = {}
        while True:
            page = await self._call(
                "list_objects_v2",
                self.url,
                {"Prefix": self._address.prefix + prefix, "Delimiter": "/", **more},
            )
            yield page
            token = page.get("NextContinuationToken", "")
            if not page.get("IsTruncated") or not token:
                return
            more = {"ContinuationToken": token}


def _first_part(key: str, prefix: str) -> str:
    """The name of the child that the key lies in, "" where it lies in none."""
    name, slash, _ = key.removeprefix(prefix).partition("/")
    return name if slash else ""
