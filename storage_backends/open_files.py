"""Objects open for reading: descriptors are kept between reads, and each file decides about direct I/O."""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ckptpipe.pyx.io_engine import IoEngine
from ckptpipe.pyx.staging import Lease
from ckptpipe.storage_backends.directory import Directory, explained, storage_error
from ckptpipe.storage_backends.errors import ObjectNotFound, ObjectTruncated
from ckptpipe.storage_backends.held_file import HeldFile
from ckptpipe.storage_backends.shielded import in_thread, shielded

MAX_OPEN = 64
PAGE = 4096


@dataclass(eq=False, slots=True)
class OpenFile:
    """``direct`` is a second descriptor with O_DIRECT, -1 where the page cache is used."""

    path: str
    descriptor: int
    size: int
    direct: int = -1
    memory_alignment: int = 1
    offset_alignment: int = 1
    users: int = 0
    holds: int = 0  # of those who read the descriptor by themselves
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    def close(self) -> None:
        os.close(self.descriptor)
        if self.direct >= 0:
            os.close(self.direct)

    def let_go(self) -> None:
        self.holds -= 1
        if self.holds == 0:
            waiters, self.waiters = self.waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def not_held(self) -> None:
        """Until the last hold is released."""
        while self.holds:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiters.append(waiter)
            await waiter


class OpenFiles:
    """Reads objects of ``directories``, in whichever of them each lies.

    ``arrange(file, open_direct)`` is called on a thread for each file opened: it may set ``file.direct``.
    """

    def __init__(self, io: IoEngine, arrange: Callable[[OpenFile, Callable[[], int]], None]) -> None:
        self._io = io
        self._arrange = arrange
        self._files: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = asyncio.Lock()

    async def read_into(
        self, directories: Sequence[Directory], name: str, offset: int, nbytes: int, lease: Lease
    ) -> None:
        if offset < 0 or nbytes < 0 or nbytes > lease.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} into a lease of {lease.nbytes}")
        file = await self._take(directories, name)
        try:
            if offset + nbytes > file.size:
                raise ObjectTruncated(
                    f"{file.path}: ends at byte {file.size}, {offset + nbytes} were to be read"
                )
            if nbytes:
                await self._read(file, offset, nbytes, lease)
        finally:
            file.users -= 1

    async def hold(self, directories: Sequence[Directory], name: str) -> HeldFile | None:
        """The object's descriptor, for one who reads through the page cache; None where direct I/O is better."""
        file = await self._take(directories, name)
        try:
            return HeldFile(file) if file.direct < 0 else None
        finally:
            file.users -= 1

    async def _read(self, file: OpenFile, offset: int, nbytes: int, lease: Lease) -> None:
        descriptor, wanted = file.descriptor, nbytes
        if file.direct >= 0:
            rounded = -(-nbytes // PAGE) * PAGE
            if (
                rounded <= lease.nbytes
                and offset + rounded <= file.size
                and offset % file.offset_alignment == 0
                and rounded % file.offset_alignment == 0
                and lease.address % file.memory_alignment == 0
            ):
                descriptor, wanted = file.direct, rounded
        try:
            count = await self._io.read(descriptor, lease, wanted, offset, file.path)
        except OSError as error:
            raise storage_error(error, "read", file.path) from error
        if count < nbytes:
            raise ObjectTruncated(
                f"{file.path}: ends at byte {offset + count}, {offset + nbytes} were to be read"
            )

    async def _take(self, directories: Sequence[Directory], name: str) -> OpenFile:
        """The open file, counted as used; the caller takes ``users`` down."""
        key = f"{directories[0].path}\0{name}"
        found = self._files.get(key)
        if found is None:
            async with self._lock:
                found = self._files.get(key)
                if found is None:
                    found = await in_thread(self._open, directories, name, undo=OpenFile.close)
                    self._files[key] = found
                    found.users += 1
                    try:
                        await self._evict()
                    except BaseException:
                        found.users -= 1
                        raise
                    return found
        self._files.move_to_end(key)
        found.users += 1
        return found

    def _open(self, directories: Sequence[Directory], name: str) -> OpenFile:
        for directory in directories:
            path = directory.where(name)
            try:
                descriptor = directory.open(name)
            except ObjectNotFound:
                continue
            file = OpenFile(path, descriptor, 0)
            try:
                with explained("open", path):
                    file.size = os.fstat(descriptor).st_size
                    self._arrange(file, lambda: directory.open(name, os.O_RDONLY | os.O_DIRECT))  # noqa: B023
            except BaseException:
                file.close()
                raise
            return file
        looked = ", ".join(directory.path for directory in directories)
        raise ObjectNotFound(f"{name}: no such object in {looked}")

    async def _evict(self) -> None:
        idle = [key for key, file in self._files.items() if not file.users and not file.holds]
        for key in idle[: max(0, len(self._files) - MAX_OPEN)]:
            await self._close(self._files.pop(key))

    async def forget(self, directories: Sequence[Directory], name: str) -> None:
        """The object was removed or replaced: the next read opens it anew."""
        file = self._files.pop(f"{directories[0].path}\0{name}", None)
        if file is not None:
            await self._close(file)

    async def _close(self, file: OpenFile) -> None:
        async def close() -> None:
            # A cancelled read may still be in the kernel, and its descriptor's number must not be reused.
            await file.not_held()
            await self._io.drain(file.descriptor)
            if file.direct >= 0:
                await self._io.drain(file.direct)
            await asyncio.to_thread(file.close)

        await shielded(close())

    async def aclose(self) -> None:
        while self._files:
            _, file = self._files.popitem()
            await self._close(file)
