"""Ranged GETs into leases and files: bytes go from the socket to where they belong, and a cut one goes on where it
stopped."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckptpipe.pyx.errors import IoError
from ckptpipe.pyx.staging import Lease
from ckptpipe.storage_backends.abc import Landing
from ckptpipe.storage_backends.errors import ObjectTruncated, StorageError, TransientError
from ckptpipe.storage_backends.s3.client import S3Client
from ckptpipe.storage_backends.s3.errors import Fault, Refused, is_redirect, request_errors
from ckptpipe.storage_backends.s3.signing import Unsignable
from ckptpipe.storage_backends.s3.wire import Answer, Wire, number_of_bytes
from ckptpipe.storage_backends.s3.wires import Wires
from ckptpipe.storage_backends.shielded import shielded

_PROGRESS = 65536  # bytes that make a cut answer a step forward
_SDK_READ = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)\Z", re.ASCII)


class _NotPlain(Exception):
    """The answer's form is one that only the SDK reads."""


class _NotThrough(Exception):
    """Only memory can take what comes in this way."""


@dataclass(slots=True)
class _Range:
    """``done`` of ``nbytes`` from ``offset`` are there. ``etag``: of the object that they came from. ``crc32cs``: of
    what is there, in memory or in each landing; empty once a part of it came without."""

    what: str
    key: str
    offset: int
    nbytes: int
    target: memoryview | Sequence[Landing]
    crc32cs: list[int]
    done: int = 0
    etag: str = ""

    @property
    def first(self) -> int:
        return self.offset + self.done

    @property
    def last(self) -> int:
        return self.offset + self.nbytes - 1

    def missing(self, nbytes: int) -> tuple[int, list[Landing]]:
        """Where the next ``nbytes`` go, and the number of the first of these landings."""
        assert not isinstance(self.target, memoryview)
        left: list[Landing] = []
        first = start = 0
        until = self.done + nbytes
        for to in self.target:
            end = start + to.nbytes
            if end <= self.done and not left:
                first += 1
            elif start < until:
                skipped = max(self.done - start, 0)
                left.append(replace(to, nbytes=min(end, until) - start - skipped, offset=to.offset + skipped))
            start = end
        return first, left


class RangedGet:
    def __init__(self, client: S3Client, bucket: str, wires: Wires) -> None:
        self._client = client
        self._bucket = bucket
        self._wires = wires
        self._through_sdk = ""  # why, where it is so

    @property
    def goes_through(self) -> bool:
        """Whether threads can receive: from a store that the SDK is not needed for."""
        return not self._wires.why_not and not self._through_sdk

    async def read_into(self, key: str, what: str, offset: int, nbytes: int, lease: Lease) -> int | None:
        if nbytes < 0 or offset < 0 or nbytes > lease.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} into a lease of {lease.nbytes}")
        with memoryview(lease) as whole, whole[:nbytes] as target:
            found = await self._read(_Range(what, key, offset, nbytes, target, [0]))
        return found[0] if found else None

    async def read_through(self, key: str, what: str, offset: int, to: Sequence[Landing]) -> list[int] | None:
        if offset < 0 or any(landing.nbytes < 0 for landing in to):
            raise ValueError(f"{[landing.nbytes for landing in to]} bytes at {offset}")
        if not self.goes_through:
            return None
        nbytes = sum(landing.nbytes for landing in to)
        try:
            return await self._read(_Range(what, key, offset, nbytes, to, [0] * len(to)))
        except _NotThrough:
            return None

    def _leave_to_sdk(self, why: str) -> None:
        self._through_sdk = why
        self._client.facts.note(f"reads go through the SDK, which copies: {why}")

    async def _read(self, wanted: _Range) -> list[int]:
        if not wanted.nbytes:
            return wanted.crc32cs
        tries = self._client.attempts()
        redirected = False
        if self._wires.why_not and not self._through_sdk:
            self._leave_to_sdk(self._wires.why_not)
        while True:
            before = wanted.done
            try:
                async with self._client.pace:
                    if self._through_sdk:
                        await self._by_sdk(wanted)
                    else:
                        await self._by_wire(wanted)
                    self._client.pace.went_well()
                    return wanted.crc32cs
            except IoError:
                raise  # of the file that it goes to
            except _NotPlain:
                self._leave_to_sdk("the store answers in chunks")
                continue
            except Unsignable:
                self._leave_to_sdk("the store wants the SDK's own signatures")
                continue
            except Refused as refused:
                fault = refused.fault
            except request_errors() as error:
                fault = self._client.explain(wanted.what, error)
            if wanted.done - before >= _PROGRESS:
                tries.progressed()
            if is_redirect(fault) and not redirected:
                redirected = True
                # The SDK finds the bucket's region, and signs and sends elsewhere from then on.
                await self._client.call(
                    "head_object", wanted.what, {"Bucket": self._bucket, "Key": wanted.key}
                )
                self._wires.signing.forget()
                continue
            await tries.again(fault)

    async def _by_wire(self, wanted: _Range) -> None:
        origin, request = await self._wires.signing.get(wanted.key, wanted.first, wanted.last, wanted.etag)

        async def talk(wire: Wire) -> None:
            answer = await wire.ask(request)
            if answer.status in (200, 206):
                await self._take(wire, answer, wanted)
            else:
                raise await self._refused(wire, answer, wanted)

        await self._wires.use(origin, talk)

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
        await self._receive(wire, answer, wanted, min(length, left))
        if wanted.done < wanted.nbytes:
            short = TransientError(f"{wanted.what}: the store sent {length} of {left} bytes")
            raise Refused(Fault(short, again=True))

    async def _receive(self, wire: Wire, answer: Answer, wanted: _Range, nbytes: int) -> None:
        if not isinstance(wanted.target, memoryview):
            first, to = wanted.missing(nbytes)
            try:
                await wire.body(to, nbytes, wanted.crc32cs[first : first + len(to)])
            finally:
                wanted.done += answer.received
                if answer.received:
                    wanted.crc32cs[first : first + len(to)] = answer.crc32cs
            return
        try:
            with wanted.target[wanted.done :] as rest:
                try:
                    await wire.body(rest, nbytes, wanted.crc32cs)
                except BaseException:
                    await self._out_of(wire)
                    raise
        finally:
            wanted.done += answer.received
            if answer.received:
                wanted.crc32cs = answer.crc32cs

    async def _out_of(self, wire: Wire) -> None:
        """The loop must not have the lease's memory any more when the lease is released."""
        wire.abort()
        await shielded(wire.closed())

    async def _refused(self, wire: Wire, answer: Answer, wanted: _Range) -> Exception:
        refused = await self._wires.refused(wire, answer, wanted.what)
        if answer.status == 416:
            total = answer.headers.get("content-range", "").rpartition("/")[2]
            return _truncated(wanted, number_of_bytes(total))
        if answer.status == 412 and wanted.etag:
            return StorageError(
                f"{wanted.what}: the object was replaced while it was read", cure="start again"
            )
        return refused

    async def _by_sdk(self, wanted: _Range) -> None:
        if not isinstance(wanted.target, memoryview):
            raise _NotThrough
        wanted.crc32cs = []
        stall = self._client.options.stall_timeout
        loop = asyncio.get_running_loop()
        match = {"IfMatch": wanted.etag} if wanted.etag else {}
        async with asyncio.timeout(stall) as deadline:
            answer = await (await self._client.api()).get_object(
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
