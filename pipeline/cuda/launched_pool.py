"""The pool of a process that `ckptpipe launch` started, as its saver has it: mapped, lent out, punched."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckptpipe.pipeline.cuda.errors import TargetError
from ckptpipe.pipeline.launch import Handover, HandoverFailed, NotLaunched
from ckptpipe.pyx.control_page import ControlPage, ControlPageError, ImageState, PoolState, sealed_bytes
from ckptpipe.pyx.pool_mapping import PoolMapping
from ckptpipe.pyx.staging import Lease, lease_range

PIECE = 2 << 20  # bytes; images begin at multiples of it, and whole pieces are punched
MADE_WITHIN = 10.0  # seconds for a pool that is being made
STILL, ORPHANED = 600.0, 5.0  # seconds that a driver waits at the gate of an image that is not there
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # fallocate(2)


@dataclass(frozen=True, slots=True)
class PooledImage:
    """One image of the driver in a pool. ``generation``: never the same for two images of a process."""

    slot: int
    generation: int
    offset: int
    nbytes: int


class LaunchedPool:
    """Made by `connect`, closed by `aclose`. Everything that blocks is called on a thread, one call at a time.

    The memory is lent as leases: `drained` waits until none of it is used any more, which is when the driver
    may restore from it and the process may use it again.
    """

    def __init__(self, pid: int, handover: Handover, descriptors: list[int], page: ControlPage) -> None:
        self.pid = pid
        self.handover = handover
        self.page = page
        self._descriptors = descriptors
        self._pool = descriptors[0]
        self.nbytes = sealed_bytes(self._pool)  # before it is mapped: it cannot shrink under us
        if self.nbytes < page.pool().nbytes:
            raise ControlPageError(f"process {pid} handed over a pool that is smaller than it says")
        self._mappings: dict[bool, PoolMapping] = {}
        self._ready: dict[PooledImage, int] = {}  # bytes that were released
        self._lent = 0
        self._idle: asyncio.Future[None] | None = None

    @classmethod
    def connect(cls, pid: int) -> LaunchedPool:
        """NotLaunched where the process has no pool, HandoverFailed or ControlPageError where it gives none."""
        handover = Handover.connect(pid)
        descriptors: list[int] = []
        page: ControlPage | None = None
        try:
            pool, control = handover.attach()
            descriptors = [fd for fd in (pool, control) if fd is not None]
            page = ControlPage(control)
            if pool is None:
                _wait_for_pool(page)
                pool, extra = handover.attach()
                os.close(extra)
                if pool is None:
                    raise NotLaunched(f"process {pid} has no pool: {page.pool().text or page.pool().state}")
                descriptors.insert(0, pool)
            return cls(pid, handover, descriptors, page)
        except BaseException:
            if page is not None:
                page.close()
            for descriptor in descriptors:
                os.close(descriptor)
            handover.close()
            raise

    def close(self) -> None:
        """Only where nothing is lent: see `aclose`."""
        for mapping in self._mappings.values():
            mapping.close()
        self._mappings.clear()
        self.page.close()
        self.handover.close()
        while self._descriptors:
            os.close(self._descriptors.pop())

    async def aclose(self) -> None:
        await self.drained()
        self.close()

    @property
    def state(self) -> PoolState:
        return self.page.pool()

    def describe(self) -> str:
        state = self.state
        hugetlb = ", hugetlb" if state.pages == "hugetlb" else ""
        return (
            f"pool of pid {self.pid}: {state.nbytes} bytes, {state.warm} of them ready, pages of {state.page_bytes} "
            f"bytes{hugetlb}, {state.workers} workers ({state.stores}), hook {state.hook}"
        )

    # -- images ------------------------------------------------------------------------------------------

    def images(self, after: int = 0) -> list[ImageState]:
        """Images that are mapped, of generations above ``after``, oldest first."""
        found = [image for image in self.page.images() if image.generation > after]
        return sorted(found, key=lambda image: image.generation)

    def watermark(self, image: PooledImage) -> int:
        """So many bytes of ``image`` are written without a gap; 0 where the driver has given it back."""
        try:
            return self.page.watermark(image.slot, image.generation)
        except LookupError:
            return 0

    def finished(self, first: int, count: int) -> bytes:
        """How many writes of each of ``count`` pieces of the pool are over: 32-bit numbers."""
        numbers = memoryview(self.page.pieces(first, count)).cast("I")
        return numbers[1::2].tobytes()

    def summed(self, image: PooledImage, start: int, nbytes: int) -> tuple[int, bool] | None:
        """(CRC32C, whether all is zero) of a range as the driver wrote it, where the capture library has taken that on
        the way. Note `finished` before."""
        return self.page.summed(image.slot, image.generation, start, nbytes)

    def require(self, images: Sequence[PooledImage]) -> None:
        """TargetError unless exactly these images are where they were."""
        there = {
            PooledImage(each.slot, each.generation, each.offset, each.nbytes) for each in self.page.images()
        }
        if not there.issuperset(images):
            raise TargetError(
                f"the pool of pid {self.pid} does not hold the image of this checkpoint any more",
                pid=self.pid,
                cure=f"end it (kill {self.pid}) and start it again from an earlier checkpoint",
            )

    # -- memory ------------------------------------------------------------------------------------------

    def map(self, *, writable: bool = False) -> None:
        """Before anything is lent. Blocks."""
        if writable not in self._mappings:
            self._mappings[writable] = PoolMapping(self._pool, self.nbytes, writable=writable)

    @property
    def collapses(self) -> bool:
        """Whether holes are filled with huge pages best made by MADV_COLLAPSE: the pool is of such pages."""
        return self.state.page_bytes >= PIECE and self.state.pages != "hugetlb"

    def lend(self, offset: int, nbytes: int, *, writable: bool = False) -> Lease:
        """A lease on a range of the pool itself. On the loop's thread."""
        mapping = self._mappings[writable]
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"[{offset}, +{nbytes}) lies outside of a pool of {self.nbytes} bytes")
        self._lent += 1
        try:
            return lease_range(
                mapping.address + offset, nbytes, mapping, on_release=self._back, readonly=not writable
            )
        except BaseException:
            self._lent -= 1
            raise

    def _back(self) -> None:
        self._lent -= 1
        if not self._lent and self._idle is not None:  # a view of it may go in another thread
            self._idle.get_loop().call_soon_threadsafe(_wake, self._idle)

    async def drained(self) -> None:
        """Wait until every range that was lent is back: no lease, view, job or I/O operation has it."""
        while self._lent:
            self._idle = asyncio.get_running_loop().create_future()
            if self._lent:
                await self._idle

    # -- eviction ----------------------------------------------------------------------------------------

    def evict(self, images: Sequence[PooledImage]) -> int:
        """Give the pages of ``images`` back to the system; the driver waits for them at a closed gate. Blocks.

        Returns how many bytes of memory the pool has less.
        """
        if self._lent:
            raise RuntimeError("the pool is still being read")
        self.require(images)
        before = os.fstat(self._pool).st_blocks
        self.page.deadlines(still=STILL, orphaned=ORPHANED)
        for image in images:
            self.page.close_gate(image.slot, image.generation)
        self.punch(images)
        return max(0, before - os.fstat(self._pool).st_blocks) * 512

    def punch(self, images: Sequence[PooledImage]) -> None:
        """Only behind a closed gate. What is punched reads as zeros."""
        self.page.punched()
        for image in images:
            self._fallocate(_PUNCH_HOLE | _KEEP_SIZE, image)

    def allocate(self, images: Sequence[PooledImage], most: int = 0) -> None:
        """Huge pages of a pool that has them are got here or not at all: later, a lack of them would kill us.

        ``most``: so many bytes of each image will do."""
        if self.state.pages == "hugetlb":
            for image in images:
                nbytes = min(image.nbytes, most or image.nbytes)
                self._fallocate(_KEEP_SIZE, replace(image, nbytes=nbytes))

    def admit(self, images: Sequence[PooledImage]) -> None:
        """The images are whole and verified: the driver may read them. It may have done so, where it began early."""
        for image in images:
            with contextlib.suppress(LookupError):
                self.page.open_gate(image.slot, image.generation)

    def release(self, image: PooledImage, ready: int) -> None:
        """So many bytes of ``image`` are there, verified. A driver that wanted no more has given it back."""
        self._ready[image] = ready
        with contextlib.suppress(LookupError):
            self.page.release(image.slot, image.generation, ready)

    # -- windows -----------------------------------------------------------------------------------------

    def open_window(self, image: PooledImage, nbytes: int) -> None:
        """Behind a closed gate: ``image`` will be fed through its first ``nbytes`` of the pool, over and over."""
        self._ready[image] = 0
        self.page.close_gate(image.slot, image.generation, window=nbytes)

    def advance(self, image: PooledImage, base: int) -> bool:
        """What is below ``base`` may be overwritten: it has come, and the driver has read it. A driver that has given
        the image back needs nothing."""
        if self._ready.get(image, 0) < base:
            return False
        try:
            return self.page.consumed(image.slot, image.generation) >= base and self.page.advance(
                image.slot, image.generation, base
            )
        except LookupError:
            return True

    def hungry(self, image: PooledImage) -> bool:
        """Whether the driver waits for ``image``, or has not begun to read it."""
        try:
            return self.page.hungry(image.slot, image.generation)
        except LookupError:
            return True

    def behind(self, image: PooledImage) -> int | None:
        """Where the driver waits for bytes that were overwritten; None where it does not."""
        try:
            return self.page.behind(image.slot, image.generation)
        except LookupError:
            return None

    def rewind(self, image: PooledImage, start: int) -> None:
        self._ready[image] = start
        self.page.rewind(image.slot, image.generation, start)

    def fail(self, images: Sequence[PooledImage], why: str) -> None:
        """What of ``images`` is not released never comes: a driver that waits for it ends its process."""
        for image in images:
            with contextlib.suppress(LookupError):
                self.page.fail_gate(image.slot, image.generation, why)

    def _fallocate(self, mode: int, image: PooledImage) -> None:
        length = min(-(-image.nbytes // PIECE) * PIECE, self.nbytes - image.offset)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        while libc.fallocate(self._pool, mode, image.offset, length):
            number = ctypes.get_errno()
            if number == 4:  # EINTR
                continue
            raise OSError(number, f"fallocate: {os.strerror(number)}", f"pool of pid {self.pid}")


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _wait_for_pool(page: ControlPage) -> None:
    until = time.monotonic() + MADE_WITHIN
    while (left := until - time.monotonic()) > 0:
        seen = page.events
        if page.pool().state != "absent":
            return
        page.wait(seen, min(left, 1.0))


UNREACHABLE = (NotLaunched, HandoverFailed, ControlPageError, OSError)
"""What `LaunchedPool.connect` raises where there is no pool to be had."""
