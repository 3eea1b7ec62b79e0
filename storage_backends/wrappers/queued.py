"""A writer around a writer, whose appends pass one by one, in the order of the calls."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any

from ckptpipe.storage_backends.abc import Extent, LocalFile, ObjectInfo, ObjectWriter
from ckptpipe.storage_backends.errors import StorageError
from ckptpipe.storage_backends.shielded import shielded


class QueuedWriter(ObjectWriter):
    """Holds leases of its own while an append waits; `abort` wakes what waits."""

    def __init__(self, inner: ObjectWriter) -> None:
        self.inner = inner
        self.name = inner.name
        self._turn = asyncio.Lock()
        self._appends = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._size = 0
        self._error: BaseException | None = None
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @abstractmethod
    async def _pass(self, held: list[Extent], nbytes: int) -> None:
        """Give ``held`` to ``inner``; may put other extents in their place, which are then released."""

    async def append(self, extents: Sequence[Extent]) -> int:
        if self._error is not None:
            raise self._error
        nbytes = sum(extent.nbytes for extent in extents)
        offset = self._size
        self._size += nbytes
        held = [Extent(extent.lease.share(), extent.nbytes, extent.crc32c) for extent in extents]
        self._appends += 1
        self._idle.clear()
        try:
            async with self._turn:
                if self._error is not None:
                    raise self._error
                await self._pass(held, nbytes)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            for extent in held:
                extent.lease.release()
            self._appends -= 1
            if not self._appends:
                self._idle.set()
        return offset

    async def append_file(self, file: LocalFile, start: int, nbytes: int, crc32c: int) -> int:
        raise NotImplementedError  # not in the capabilities of what has such writers

    async def finish(self) -> ObjectInfo:
        await self._idle.wait()
        if self._error is not None:
            raise self._error
        return await self.inner.finish()

    async def abort(self) -> None:
        self._fail(StorageError(f"{self.name}: the object was aborted"))
        if not self._stopped.done():
            self._stopped.set_result(None)

        async def abort() -> None:
            await self.inner.abort()
            await self._idle.wait()

        await shielded(abort())

    async def _unless_stopped(self, work: Coroutine[Any, Any, object]) -> None:
        """Wait for ``work``; give it up, with the writer's error, where `abort` comes first."""
        task: asyncio.Future[Any] = asyncio.get_running_loop().create_task(work)
        try:
            await asyncio.wait({task, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
            await asyncio.wait({task})
        if self._error is not None:
            raise self._error
        task.result()

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            if isinstance(error, asyncio.CancelledError):
                error = StorageError(f"{self.name}: an append was cancelled, the object can only be aborted")
            self._error = error
