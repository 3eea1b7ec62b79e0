"""Writes one object into one file: several direct or buffered writes in flight, space reserved ahead."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from collections.abc import Sequence
from typing import Any

from ckptpipe.pyx.staging import Lease
from ckptpipe.storage_backends.abc import Extent, ObjectInfo
from ckptpipe.storage_backends.directory import Directory, explained, storage_error
from ckptpipe.storage_backends.errors import StorageError
from ckptpipe.storage_backends.extent_writer import ExtentWriter
from ckptpipe.storage_backends.local import LocalState
from ckptpipe.storage_backends.shielded import in_thread

FIRST_STEP = 64 << 20  # reserved ahead at first; each later step doubles the file, up to the option's bound
BUFFERED_PENDING = 1  # file systems serialise the buffered writers of one inode: more would only spin
_NO_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class OpenedFile:
    """A new, empty file. ``why`` says why it is not direct; alignments are the kernel's for direct I/O."""

    __slots__ = ("descriptor", "direct", "memory_alignment", "offset_alignment", "why")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.direct = False
        self.why = ""
        self.memory_alignment = 1
        self.offset_alignment = 1


class FileWriter(ExtentWriter):
    """``reserve``: bytes of the largest preallocation step, 0 for none. ``size_hint``: 0 where not known.
    ``forced``: an extent that cannot be written directly is an error."""

    def __init__(
        self,
        name: str,
        directory: Directory,
        file: OpenedFile,
        state: LocalState,
        *,
        reserve: int,
        size_hint: int = 0,
        forced: bool = False,
    ) -> None:
        super().__init__(name, state.budget, on_close=state.writers.discard)
        self._directory = directory
        self._path = directory.where(name)
        self._file = file
        self._descriptor = file.descriptor
        self._state = state
        self._io = state.context.io
        self._reserve = reserve
        self._size_hint = size_hint
        self._forced = forced
        self._reserved = 0
        if not file.direct:
            self._max_pending = BUFFERED_PENDING

    def _write(self, lease: Lease, nbytes: int, offset: int) -> asyncio.Future[Any]:
        return self._io.write(self._descriptor, lease, nbytes, offset, self._path)

    def _explain(self, error: BaseException) -> BaseException:
        return storage_error(error, "write", self._path) if isinstance(error, OSError) else error

    async def _prepare(self, extents: Sequence[Extent], offset: int, nbytes: int) -> None:
        if self._file.direct and (why := self._misaligned(extents, offset)):
            await self._leave_direct(why)
        if self._reserve and offset + nbytes > self._reserved:
            await self._reserve_for(offset + nbytes)

    def _misaligned(self, extents: Sequence[Extent], offset: int) -> str:
        file = self._file
        for extent in extents:
            if extent.lease.address % file.memory_alignment:
                return f"memory at a multiple of {file.memory_alignment} bytes is needed"
            if offset % file.offset_alignment or extent.nbytes % file.offset_alignment:
                return f"extents of multiples of {file.offset_alignment} bytes are needed"
            offset += extent.nbytes
        return ""

    async def _leave_direct(self, why: str) -> None:
        """Go on through the page cache. Nothing direct may be in flight: both could touch one page."""
        if self._forced:
            raise StorageError(f"{self._path}: direct I/O is on, but {why}", cure="set direct: auto or off")
        await self._settle()
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._file.direct = False
        self._max_pending = BUFFERED_PENDING
        self._file.why = why
        self._state.note(f"direct I/O was left in the middle of an object: {why}")

    async def _reserve_for(self, end: int) -> None:
        """Extending direct writes go one by one on ext4, so the file is made larger ahead of them.

        The nearer the disk is to full, the smaller the step: lanes must not starve each other by reserving.
        """
        free = await in_thread(lambda: self._directory.free_bytes()[1])
        known = self._size_hint if self._size_hint > end else 0
        step = self._reserve if known else min(self._reserve, max(FIRST_STEP, self._reserved))
        target = self._reserved + min(step, free // 8)
        target = max(end, min(target, known) if known else target)
        start = self._reserved
        try:
            await self._io.fallocate(self._descriptor, 0, start, target - start, self._path)
        except OSError as error:
            number = error.errno or 0
            if number not in _NO_RESERVE and number not in _FULL:
                raise
            self._reserve = 0
            self._state.note(
                f"{self._directory.path}: no space is reserved ahead (fallocate: {os.strerror(number)})"
            )
            if number in _FULL:
                # What was had of it is given back; the writes themselves say whether the disk is full.
                await self._cut(start)
        else:
            self._reserved = target

    async def _complete(self) -> ObjectInfo:
        if self._reserved > self.size:
            await self._cut(self.size)
        await self._io.fsync(self._descriptor, self._path)
        facts = await in_thread(self._close)
        self._state.direct.count(self._file.direct, self._file.why)
        return ObjectInfo(self.name, facts.st_size, facts.st_mtime, self.crc32c)

    async def _cut(self, size: int) -> None:
        def cut() -> None:
            with explained("truncate", self._path):
                os.ftruncate(self._descriptor, size)

        await in_thread(cut)

    def _close(self) -> os.stat_result:
        with explained("close", self._path):
            facts = os.fstat(self._descriptor)
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)  # some file systems report what failed only here
        self._directory.sync_of(self.name)
        return facts

    async def _undo(self) -> None:
        def undo() -> None:
            try:
                if self._descriptor >= 0:
                    descriptor, self._descriptor = self._descriptor, -1
                    os.close(descriptor)
            finally:
                self._directory.unlink(self.name)

        await in_thread(undo)

    async def _drain(self) -> None:
        if self._descriptor >= 0:
            await self._io.drain(self._descriptor)
