"""The part of a writer that every local backend shares: order, leases, the budget, errors and undoing.

A backend says how one extent is written (`_write`, a future) and how the object is begun, completed and
undone; what must never go wrong is here.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from ckptpipe.pyx.checksum import crc32c_combine
from ckptpipe.pyx.staging import Lease
from ckptpipe.storage_backends.abc import Extent, ObjectInfo, ObjectWriter
from ckptpipe.storage_backends.budget import ByteBudget
from ckptpipe.storage_backends.errors import StorageError
from ckptpipe.storage_backends.shielded import shielded


class ExtentWriter(ObjectWriter):
    """``max_pending``: operations in flight on this object, 0 for as many as the budget allows.

    ``on_close`` is called once, after `finish` or `abort`.
    """

    cancels: ClassVar[bool] = (
        True  # `abort` cancels operations; False where they are short and just waited for
    )

    def __init__(
        self,
        name: str,
        budget: ByteBudget,
        *,
        max_pending: int = 0,
        on_close: Callable[[ExtentWriter], object] | None = None,
    ) -> None:
        self.name = name
        self.size = 0
        self._crc32c = 0
        self._budget = budget
        self._max_pending = max_pending
        self._on_close = on_close
        self._turn = asyncio.Lock()
        self._pending: set[asyncio.Future[Any]] = set()
        self._appends = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._error: BaseException | None = None
        self._phase = "open"  # open | finishing | finished | aborted
        self._aborting: asyncio.Future[None] | None = None

    # What a backend fills in.

    @abstractmethod
    def _write(self, lease: Lease, nbytes: int, offset: int) -> asyncio.Future[Any]:
        """Begin to write ``lease[:nbytes]`` at ``offset``; the operation holds the range by itself."""

    @abstractmethod
    async def _prepare(self, extents: Sequence[Extent], offset: int, nbytes: int) -> None:
        """Before the writes of one append; appends come here one by one, in the order of their offsets."""

    @abstractmethod
    async def _complete(self) -> ObjectInfo:
        """All is written: make it durable."""

    @abstractmethod
    async def _undo(self) -> None:
        """Nothing is in flight any more: close and remove. Called once, also after a failed `_complete`."""

    @abstractmethod
    async def _drain(self) -> None:
        """Wait until the kernel has answered whatever it still holds of this object."""

    def _explain(self, error: BaseException) -> BaseException:
        """An engine's error as the backend's own."""
        return error

    # The contract.

    async def append(self, extents: Sequence[Extent]) -> int:
        self._check_open()
        offset = self.size
        nbytes = sum(extent.nbytes for extent in extents)
        self.size = offset + nbytes
        for extent in extents:
            if extent.nbytes > extent.lease.nbytes:
                raise self._fail(ValueError(f"extent of {extent.nbytes} bytes on {extent.lease.nbytes}"))
            self._crc32c = crc32c_combine(self._crc32c, extent.crc32c, extent.nbytes)
        held = [Extent(extent.lease.share(), extent.nbytes, extent.crc32c) for extent in extents]
        self._appends += 1
        self._idle.clear()
        begun = 0
        try:
            async with self._turn:
                self._check_open()
                await self._prepare(held, offset, nbytes)
                position = offset
                for extent in held:
                    if not extent.nbytes:
                        extent.lease.release()
                        begun += 1
                        continue
                    await self._room()
                    await self._budget.acquire(extent.lease.footprint, self)
                    begun += 1
                    self._begin(extent, position)
                    position += extent.nbytes
            if self._error is not None:
                raise self._error
        except BaseException as error:
            # What was not begun leaves a hole: the object can only be aborted now.
            for extent in held[begun:]:
                extent.lease.release()
            explained = self._explain(error)
            self._fail(explained)
            if explained is error:
                raise
            raise explained from error
        finally:
            self._appends -= 1
            if not self._appends:
                self._idle.set()
        return offset

    async def finish(self) -> ObjectInfo:
        self._check_open()
        self._phase = "finishing"
        try:
            await self._idle.wait()
            await self._settle()
            if self._error is not None:
                raise self._error
            info = await self._complete()
        except BaseException as error:
            explained = self._explain(error)
            self._fail(explained)
            if explained is error:
                raise
            raise explained from error
        self._phase = "finished"
        self._closed()
        return info

    async def abort(self) -> None:
        await shielded(self._abort())

    async def _abort(self) -> None:
        if self._aborting is not None:
            await asyncio.shield(self._aborting)
            return
        self._aborting = asyncio.get_running_loop().create_future()
        self._phase = "aborted"
        try:
            error = self._fail(StorageError(f"{self.name}: the object was aborted"))
            self._budget.evict(self, error)
            if self.cancels:
                for operation in list(self._pending):
                    operation.cancel()
            await self._idle.wait()
            await self._drain()
            await self._settle()
            await self._undo()
        except BaseException as error:
            self._aborting.set_exception(error)
            self._aborting.exception()  # seen: it is raised below
            raise
        else:
            self._aborting.set_result(None)
        finally:
            self._closed()

    # Parts.

    @property
    def crc32c(self) -> int:
        return self._crc32c

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._phase != "open":
            raise StorageError(f"{self.name}: the object is {self._phase}")

    def _fail(self, error: BaseException) -> BaseException:
        """Remember the first error: it is what later calls raise."""
        if self._error is None:
            if isinstance(error, asyncio.CancelledError):
                error = StorageError(f"{self.name}: a write was cancelled, the object can only be aborted")
            self._error = error
        return self._error

    def _begin(self, extent: Extent, offset: int) -> None:
        try:
            operation = self._write(extent.lease, extent.nbytes, offset)
        except BaseException:
            self._budget.release(extent.lease.footprint)
            extent.lease.release()
            raise
        footprint = extent.lease.footprint
        if operation.done():
            self._ended(extent.lease, footprint, operation)
            return
        self._pending.add(operation)
        operation.add_done_callback(partial(self._ended, extent.lease, footprint))

    def _ended(self, lease: Lease, footprint: int, operation: asyncio.Future[Any]) -> None:
        self._pending.discard(operation)
        lease.release()
        self._budget.release(footprint)
        if operation.cancelled():
            self._fail(asyncio.CancelledError())
        elif (error := operation.exception()) is not None:
            self._fail(self._explain(error))
            # Appends that wait for room fail now, not when the others have been written.
            assert self._error is not None
            self._budget.evict(self, self._error)

    async def _room(self) -> None:
        while self._max_pending and len(self._pending) >= self._max_pending:
            await asyncio.wait(self._pending, return_when=asyncio.FIRST_COMPLETED)
        if self._error is not None:
            raise self._error

    async def _settle(self) -> None:
        """Wait until nothing of this object is in flight."""
        while self._pending:
            await asyncio.wait(self._pending)

    def _closed(self) -> None:
        callback, self._on_close = self._on_close, None
        if callback is not None:
            callback(self)
