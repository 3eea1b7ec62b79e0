"""Ranged GETs into leases: bytes go from the socket into the slot, and a cut one goes on where it stopped."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

from botocore.utils import get_environ_proxies

from ckptpipe.pyx.staging import Lease
from ckptpipe.storage_backends.errors import ObjectTruncated, StorageError, TransientError
from ckptpipe.storage_backends.s3.client import REQUEST_ERRORS, S3Client
from ckptpipe.storage_backends.s3.connections import Connections, Origin
from ckptpipe.storage_backends.s3.errors import Fault, from_answer, parse_error_body
from ckptpipe.storage_backends.s3.signing import Signing, Unsignable
from ckptpipe.storage_backends.s3.watch import Watch
from ckptpipe.storage_backends.s3.wire import Answer, StaleConnection, Wire
from ckptpipe.storage_backends.shielded import shielded

_PROGRESS = 65536  # bytes that make a cut answer a step forward
_ERROR_MAX = 65536
_SDK_READ = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)\Z", re.ASCII)
_REDIRECTS = ("PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed")


class _Refused(Exception):
    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.error)
        self.fault = fault


class _NotPlain(Exception):
    """The answer's form is one that only the SDK reads."""


@dataclass(slots=True)
class _Range:
    """``done`` of ``nbytes`` from ``offset`` are there. ``etag``: of the object that they came from."""

    what: str
    key: str
    offset: int
    nbytes: int
    target: memoryview
    done: int = 0
    etag: str = ""

    @property
    def first(self) -> int:
        return self.offset + self.done

    @property
    def last(self) -> int:
        return self.offset + self.nbytes - 1


class RangedGet:
    def __init__(self, client: S3Client, bucket: str) -> None:
        self._client = client
        self._bucket = bucket
        self._signing = Signing(client, bucket)
        options = client.options
        self._connections = Connections(
            verify=client.verify,
            connect_timeout=options.connect_timeout,
            stall_timeout=options.stall_timeout,
        )
        self._through_sdk = ""  # why, where it is so
        proxies = get_environ_proxies(client.endpoint)
        if proxies.get(client.scheme):
            self._leave_to_sdk("a proxy is set for the endpoint")
        elif bucket.endswith("--x-s3"):
            self._leave_to_sdk("directory buckets have signatures of their own")

    async def read_into(self, key: str, what: str, offset: int, nbytes: int, lease: Lease) -> None:
        if nbytes < 0 or offset < 0 or nbytes > lease.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} into a lease of {lease.nbytes}")
        if nbytes == 0:
            return
        with memoryview(lease) as whole, whole[:nbytes] as target:
            await self._read(_Range(what, key, offset, nbytes, target))

    async def aclose(self) -> None:
        await self._connections.aclose()

    def _leave_to_sdk(self, why: str) -> None:
        self._through_sdk = why
        self._client.facts.note(f"reads go through the SDK, which copies: {why}")

    async def _read(self, wanted: _Range) -> None:
        tries = self._client.attempts()
        redirected = False
        while True:
            before = wanted.done
            try:
                async with self._client.pace:
                    if self._through_sdk:
                        await self._by_sdk(wanted)
                    else:
                        await self._by_wire(wanted)
                    self._client.pace.went_well()
                    return
            except _NotPlain:
                self._leave_to_sdk("the store answers in chunks")
                continue
            except Unsignable:
                self._leave_to_sdk("the store wants the SDK's own signatures")
                continue
            except _Refused as refused:
                fault = refused.fault
            except REQUEST_ERRORS as error:
                fault = self._client.explain(wanted.what, error)
            if wanted.done - before >= _PROGRESS:
                tries.progressed()
            if (fault.status in (301, 302, 307, 308) or fault.code in _REDIRECTS) and not redirected:
                redirected = True
                # The SDK finds the bucket's region, and signs and sends elsewhere from then on.
                await self._client.call(
                    "head_object", wanted.what, {"Bucket": self._bucket, "Key": wanted.key}
                )
                self._signing.forget()
                continue
            await tries.again(fault)

    async def _by_wire(self, wanted: _Range) -> None:
        origin, request = await self._signing.request(wanted.key, wanted.first, wanted.last, wanted.etag)
        fresh = False
        while True:
            wire = await self._connections.lend(origin, fresh=fresh)
            try:
                await self._exchange(origin, wire, request, wanted)
            except StaleConnection:
                if fresh:
                    raise
                fresh = True  # the server closed an idle connection: no fault of this request
            else:
                return

    async def _exchange(self, origin: Origin, wire: Wire, request: bytes, wanted: _Range) -> None:
        keep = False
        try:
            async with asyncio.timeout(self._client.options.stall_timeout) as deadline:
                with Watch(wire.bytes_moved, deadline, self._client.options.stall_timeout):
                    answer = await wire.ask(request)
                    try:
                        if answer.status in (200, 206):
                            await self._take(wire, answer, wanted)
                        else:
                            await self._refused(wire, answer, wanted)
                    finally:
                        keep = answer.keep and self._whole(answer)
        finally:
            await self._connections.give_back(origin, wire, keep=keep)

    @staticmethod
    def _whole(answer: Answer) -> bool:
        return answer.length() == answer.received

    async def _take(self, wire: Wire, answer: Answer, wanted: _Range) -> None:
        length = answer.length()
        if length is None:
            raise _NotPlain
        left = wanted.nbytes - wanted.done
        text = answer.headers.get("content-range", "")
        if text or answer.status == 206:  # some stores say 200 and a range
            found = _CONTENT_RANGE.match(text)
            if found is None or int(found[1]) != wanted.first or int(found[2]) - int(found[1]) + 1 != length:
                raise StorageError(f"{wanted.what}: the store sent another range than was asked for")
            if found[3] != "*" and int(found[3]) <= wanted.last:
                raise _truncated(wanted, int(found[3]))
            if length > left:
                raise StorageError(f"{wanted.what}: the store sent more bytes than were asked for")
        elif wanted.first != 0:
            raise StorageError(f"{wanted.what}: the store ignores Range: it can't be read in parts")
        elif length < left:
            raise _truncated(wanted, length)
        if not wanted.etag:
            wanted.etag = answer.headers.get("etag", "")
        try:
            with wanted.target[wanted.done :] as rest:
                try:
                    await wire.body(rest, min(length, left))
                except BaseException:
                    await self._out_of(wire)
                    raise
        finally:
            wanted.done += answer.received
        if wanted.done < wanted.nbytes:
            short = TransientError(f"{wanted.what}: the store sent {length} of {left} bytes")
            raise _Refused(Fault(short, again=True))

    async def _out_of(self, wire: Wire) -> None:
        """The loop must not have the lease's memory any more when the lease is released."""
        wire.abort()
        await shielded(wire.closed())

    async def _refused(self, wire: Wire, answer: Answer, wanted: _Range) -> None:
        length = answer.length()
        if (length is not None and length <= _ERROR_MAX) or length is None:
            await wire.body(None, length or 0)
        else:
            answer.keep = False
        if answer.status == 416:
            total = answer.headers.get("content-range", "").rpartition("/")[2]
            raise _truncated(wanted, int(total) if total.isascii() and total.isdigit() else None)
        if answer.status == 412 and wanted.etag:
            raise StorageError(
                f"{wanted.what}: the object was replaced while it was read", cure="start again"
            )
        said = parse_error_body(bytes(answer.text))
        region = answer.headers.get("x-amz-bucket-region", "") or said.get("Region", "")
        raise _Refused(
            from_answer(
                self._client.place,
                wanted.what,
                answer.status,
                said.get("Code", ""),
                said.get("Message", ""),
                region=region,
            )
        )

    async def _by_sdk(self, wanted: _Range) -> None:
        stall = self._client.options.stall_timeout
        loop = asyncio.get_running_loop()
        match = {"IfMatch": wanted.etag} if wanted.etag else {}
        async with asyncio.timeout(stall) as deadline:
            answer = await self._client.api.get_object(
                Bucket=self._bucket,
                Key=wanted.key,
                Range=f"bytes={wanted.first}-{wanted.last}",
                **match,
                **self._client.owner(),
            )
            body = answer["Body"]
            try:
                wanted.etag = wanted.etag or str(answer.get("ETag", ""))
                ranged = _CONTENT_RANGE.match(answer.get("ContentRange", ""))
                if ranged is None and wanted.first:
                    raise StorageError(f"{wanted.what}: the store ignores Range: it can't be read in parts")
                if ranged is not None and ranged[3] != "*" and int(ranged[3]) <= wanted.last:
                    raise _truncated(wanted, int(ranged[3]))
                while wanted.done < wanted.nbytes:
                    data = await body.read(min(_SDK_READ, wanted.nbytes - wanted.done))
                    if not data:
                        raise _truncated(wanted, wanted.first)
                    wanted.target[wanted.done : wanted.done + len(data)] = data
                    wanted.done += len(data)
                    deadline.reschedule(loop.time() + stall)
            finally:
                body.close()


def _truncated(wanted: _Range, size: int | None) -> ObjectTruncated:
    end = wanted.offset + wanted.nbytes
    where = f"ends at byte {size}" if size is not None else "ends early"
    return ObjectTruncated(f"{wanted.what}: the object {where}, {end} were to be read")
