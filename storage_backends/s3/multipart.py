"""The writer of one S3 object: extents become parts, parts are sent side by side, straight from their slots."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ckptpipe.pyx.checksum import crc32c_combine
from ckptpipe.storage_backends.abc import Extent, LocalFile, ObjectInfo, ObjectWriter
from ckptpipe.storage_backends.errors import StorageError
from ckptpipe.storage_backends.s3.client import S3Client
from ckptpipe.storage_backends.s3.file_piece import Bytes, FilePiece
from ckptpipe.storage_backends.s3.operation import asking
from ckptpipe.storage_backends.s3.options import MAX_PARTS, MIN_PART, SPARE_PARTS
from ckptpipe.storage_backends.s3.part import Part
from ckptpipe.storage_backends.s3.put import Put, decode_crc32c
from ckptpipe.storage_backends.s3.puts import Puts
from ckptpipe.storage_backends.s3.see_through import see_through
from ckptpipe.storage_backends.s3.upload import Sent, Upload
from ckptpipe.storage_backends.shielded import shielded

_POOR_USE = (
    4  # an open part that keeps this many times the memory it fills is copied together, not sent early
)


def part_target(part_bytes: int, inflight_bytes: int) -> int:
    """Bytes at which a part is sent: two must fit into what writers may hold."""
    return max(MIN_PART, min(part_bytes, inflight_bytes // 2))


class S3Writer(ObjectWriter):
    def __init__(
        self,
        name: str,
        bucket: str,
        key: str,
        client: S3Client,
        puts: Puts,
        *,
        what: str,
        on_close: Callable[[S3Writer], object],
    ) -> None:
        self.name = name
        self.size = 0
        self._place = {"Bucket": bucket, "Key": key}
        self._what = what
        self._client = client
        self._workers = client.context.workers
        self._inflight = client.inflight
        self._target = part_target(client.options.part_bytes, client.inflight.limit)
        self._equal = client.equal_parts
        self._puts = puts
        self._upload = Upload(client, puts, bucket, key, what)
        self._open = Part(client.inflight)
        self._parts = 0
        self._early = 0
        self._sent: list[Sent] = []
        self._crc32c = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._relieving = asyncio.Lock()
        self._appends = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._error: BaseException | None = None
        self._state = "open"  # open | finishing | finished | aborted
        self._visible = False  # the object may be there
        self._aborting: asyncio.Future[None] | None = None
        self._on_close: Callable[[S3Writer], object] | None = on_close
        client.inflight.writers += 1

    async def append(self, extents: Sequence[Extent]) -> int:
        self._check_open()
        for extent in extents:
            if extent.nbytes > extent.lease.nbytes:
                raise self._fail(ValueError(f"extent of {extent.nbytes} bytes on {extent.lease.nbytes}"))
        offset = self.size
        for extent in extents:
            self._take(extent.lease, extent.nbytes, extent.crc32c)
        await self._taken()
        return offset

    async def append_file(self, file: LocalFile, start: int, nbytes: int, crc32c: int) -> int:
        self._check_open()
        offset = self.size
        piece = FilePiece(file.share(), start, nbytes)
        try:
            self._take(piece, nbytes, crc32c)
        finally:
            piece.release()
        await self._taken()
        return offset

    async def _taken(self) -> None:
        """Suspend while too much is held."""
        self._appends += 1
        self._idle.clear()
        try:
            await self._relieve()
            await self._inflight.room(lambda: self._error is not None)
            if self._error is not None:
                raise self._error
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._appends -= 1
            if not self._appends:
                self._idle.set()

    async def finish(self) -> ObjectInfo:
        self._check_open()
        self._state = "finishing"
        try:
            await self._idle.wait()
            self._raise_error()
            if self._parts == 0:
                await self._put_whole()
            else:
                await self._put_parts()
            info = await self._confirm()
        except BaseException as error:
            self._fail(error)
            raise
        self._state = "finished"
        self._closed()
        return info

    async def abort(self) -> None:
        await shielded(self._abort())

    # Taking bytes: nothing here suspends, so offsets follow the order of the calls.

    def _take(self, lease: Bytes, nbytes: int, crc32c: int) -> None:
        self.size += nbytes
        self._crc32c = crc32c_combine(self._crc32c, crc32c, nbytes)
        if self._equal:
            self._take_equal(lease, nbytes, crc32c)
            return
        self._open.add(lease.share(), nbytes, crc32c)
        if self._open.nbytes >= self._target:
            self._seal()

    def _take_equal(self, lease: Bytes, nbytes: int, crc32c: int) -> None:
        """Cut it where a part ends; pieces are hashed when their part is sent."""
        start = 0
        while start < nbytes:
            count = min(nbytes - start, self._target - self._open.nbytes)
            whole = count == nbytes
            piece = lease.share() if whole else lease.slice(start, count)
            self._open.add(piece, count, crc32c if whole else None)
            start += count
            if self._open.nbytes == self._target:
                self._seal()

    def _seal(self) -> None:
        """Send the open part, begin another."""
        part, self._open = self._open, Part(self._inflight)
        if self._parts == MAX_PARTS or self._error is not None:
            part.release()
            self._fail(
                StorageError(f"{self._what}: more than {MAX_PARTS} parts", cure="raise the option part_bytes")
            )
            return
        self._parts += 1
        part.number = self._parts
        self._inflight.begin()
        task = asyncio.get_running_loop().create_task(self._send(part))
        self._tasks.add(task)
        task.add_done_callback(self._part_ended(part))

    def _part_ended(self, part: Part) -> Callable[[asyncio.Task[None]], None]:
        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            part.release()
            self._inflight.end()
            if task.cancelled():
                self._fail(asyncio.CancelledError())
            elif (error := task.exception()) is not None:
                self._fail(error)

        return ended

    async def _relieve(self) -> None:
        """Keep the open part's memory within its share, whatever the ring's size and the extents' sizes."""
        if self._open.footprint <= self._inflight.open_limit():
            return
        async with self._relieving:
            part = self._open
            if part.footprint <= self._inflight.open_limit():
                return
            wasteful = part.footprint > _POOR_USE * part.nbytes
            if not self._equal and part.nbytes >= MIN_PART and not wasteful and self._early < SPARE_PARTS - 1:
                self._early += 1
                self._seal()
            else:
                self._client.facts.note(
                    "extents were copied together: the ring is small, or its slots are poorly filled, for parts of 5 MiB"
                )
                await part.compact(self._workers, self._what)

    # Sending.

    async def _send(self, part: Part) -> None:
        crc32c = await part.settle(self._workers)
        self._sent.append(await self._upload.put(part, crc32c))

    async def _put_whole(self) -> None:
        """A small object goes by one PUT."""
        part, self._open = self._open, Part(self._inflight)
        self._inflight.begin()
        try:
            crc32c = await part.settle(self._workers)
            self._visible = True
            put = Put(
                self._what, self._place["Key"], part.ranges(), crc32c, parameters=self._client.new_object()
            )
            with asking("PutObject"):
                await see_through(self._puts.send(put))
        finally:
            part.release()
            self._inflight.end()

    async def _put_parts(self) -> None:
        if self._open.nbytes:
            self._seal()
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._raise_error()
        parts = sorted(self._sent, key=lambda part: part.number)
        whole = 0
        for part in parts:
            whole = crc32c_combine(whole, part.crc32c, part.nbytes)
        if len(parts) != self._parts or whole != self._crc32c:
            raise StorageError(f"{self._what}: the parts sent are not the extents that were appended")
        self._visible = True
        await see_through(self._upload.complete(parts, self.size, self._crc32c))

    async def _confirm(self) -> ObjectInfo:
        """Look at the object once: its size, its checksum where the store has one, the store's clock."""
        asked = {"ChecksumMode": "ENABLED"} if self._client.facts.checksum else {}
        found = await self._client.call(
            "head_object", self._what, {**self._place, **self._client.owner(), **asked}
        )
        size = found.get("ContentLength")
        if size != self.size:
            raise StorageError(f"{self._what}: the store has {size} bytes, {self.size} were sent")
        value = decode_crc32c(found.get("ChecksumCRC32C", ""))
        if value is not None and found.get("ChecksumType") != "COMPOSITE" and value != self._crc32c:
            raise StorageError(
                f"{self._what}: the store has other bytes (CRC32C {value:08x}, sent {self._crc32c:08x})"
            )
        return ObjectInfo(self.name, self.size, found["LastModified"].timestamp(), self._crc32c)

    # Failing.

    def _check_open(self) -> None:
        self._raise_error()
        if self._state != "open":
            raise StorageError(f"{self._what}: the object is {self._state}")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _fail(self, error: BaseException) -> BaseException:
        """Remember the first error: it is what later calls raise. Parts under way are of no use any more."""
        if self._error is None:
            if isinstance(error, asyncio.CancelledError):
                error = StorageError(f"{self._what}: a write was cancelled, the object can only be aborted")
            self._error = error
            for task in list(self._tasks):
                task.cancel()
            self._inflight.wake()
        return self._error

    async def _abort(self) -> None:
        if self._aborting is not None:
            await asyncio.shield(self._aborting)
            return
        self._aborting = asyncio.get_running_loop().create_future()
        self._state = "aborted"
        self._fail(StorageError(f"{self._what}: the object was aborted"))
        try:
            await self._idle.wait()
            while self._tasks:
                await asyncio.wait(self._tasks)
            self._open.release()
            await self._upload.abort()
            if self._visible:
                await self._client.call(
                    "delete_object", self._what, {**self._place, **self._client.owner()}, attempts=3
                )
        except BaseException as error:
            self._aborting.set_exception(error)
            self._aborting.exception()  # seen: it is raised below
            raise
        else:
            self._aborting.set_result(None)
        finally:
            self._closed()

    def _closed(self) -> None:
        callback, self._on_close = self._on_close, None
        if callback is not None:
            self._inflight.writers -= 1
            callback(self)
