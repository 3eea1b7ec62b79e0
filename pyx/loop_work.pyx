"""Operations of threads that belong to one event loop: who may ask for them, and how their end is awaited."""

import asyncio
import warnings

from posix.unistd cimport getpid

from ckptpipe.pyx.errors import CkptpipeError

cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident()


cdef class LoopWork:
    """A subclass counts what it has ``accepted``, and calls `tell_idle` when it has answered the last."""

    def __cinit__(self):
        self.watched = []
        self.owner_pid = getpid()

    cdef int belong(self) except -1:
        """To the loop that runs in this thread."""
        self.loop = asyncio.get_running_loop()
        self.thread = PyThread_get_thread_ident()
        self.waiters = []
        return 0

    cdef int watch(self, int eventfd) except -1:
        """Reap whenever it can be read, until `finish`."""
        self.loop.add_reader(eventfd, self._reap)
        self.watched.append(eventfd)
        return 0

    @property
    def inflight(self):
        """Operations accepted and not yet answered."""
        return self.accepted

    @property
    def closed(self):
        return self.is_gone()

    async def drain(self):
        """Wait until nothing is in flight. Finishes when cancelled, and is cancelled then."""
        cancelled = None
        while self.accepted:
            waiter = self.loop.create_future()
            self.waiters.append(waiter)
            try:
                await asyncio.shield(waiter)
            except asyncio.CancelledError as error:
                cancelled = error  # the GPU still writes into leased memory: go on, then say so
        if cancelled is not None:
            try:
                raise cancelled
            finally:
                cancelled = None

    async def aclose(self):
        """Refuse new operations, wait for those under way, give threads and device memory back. Idempotent;
        finishes when cancelled."""
        if self.is_gone() or getpid() != self.owner_pid:
            return
        self.closing = True
        cancelled = None
        try:
            await self.drain()
        except asyncio.CancelledError as error:
            cancelled = error
        work = self.last_work()
        if work is not None:
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError as error:
                cancelled = error
        while not self.is_gone():
            if self.ended is None:
                self.ended = self.loop.create_future()
                self.stop()
            try:
                await asyncio.shield(self.ended)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            try:
                raise cancelled
            finally:
                cancelled = None

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        await self.aclose()

    cdef int check_usable(self) except -1:
        if getpid() != self.owner_pid:
            raise CkptpipeError(
                f"this {self.noun()} belongs to process {self.owner_pid}, and this is process {getpid()}",
                cure="start processes with spawn: CUDA does not work in a forked child",
            )
        if self.is_gone() or self.closing:
            raise RuntimeError(f"the {self.noun()} is closed")
        if self.thread != PyThread_get_thread_ident():
            raise CkptpipeError(
                f"this {self.noun()} belongs to another thread",
                cure="use it in the thread of its event loop (asyncio.run_coroutine_threadsafe)",
            )
        return 0

    cdef int tell_idle(self) except -1:
        """Nothing is in flight any more: those who drain go on."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        return 0

    # -- the end -----------------------------------------------------------------------------------------

    def _reap(self):
        self.reap()
        if not self.is_gone() and self.ended is not None and self.has_ended():
            self.finish()

    cdef int finish(self) except -1:
        """The threads have ended, or are about to: join them, free all, say so."""
        cdef bint heard = not self.loop.is_closed()
        watched, self.watched = self.watched, []
        if heard:
            for eventfd in watched:
                self.loop.remove_reader(eventfd)
        self.join()
        self.reap()
        self.free(False)
        if heard and self.ended is not None and not self.ended.done():
            self.ended.set_result(None)
        return 0

    cdef int stop_now(self) except -1:
        """Blocking: what is under way is finished first."""
        self.closing = True
        self.stop()
        return self.finish()

    def __del__(self):
        if self.is_gone():
            return
        if getpid() != self.owner_pid:  # the threads are the parent's
            self.free(True)
            return
        name = type(self).__name__
        warnings.warn(f"a {name} of GPU {self.device} was not closed", ResourceWarning, source=self)
        self.stop_now()

    # -- of the subclass ---------------------------------------------------------------------------------

    cdef str noun(self):
        raise NotImplementedError

    cdef bint is_gone(self) noexcept:
        return True

    cdef object last_work(self):
        """Something to be awaited before the threads are stopped, or None."""
        return None

    cdef int stop(self) except -1:
        """Tell the threads to end when they have done what is under way."""
        raise NotImplementedError

    cdef bint has_ended(self) noexcept:
        """The threads are about to end, and have nothing more to report."""
        return True

    cdef int join(self) except -1:
        """Wait for the threads, without the GIL."""
        raise NotImplementedError

    cdef int reap(self) except -1:
        """Answer what has ended; nothing where `is_gone`."""
        raise NotImplementedError

    cdef int free(self, bint forked) except -1:
        """Give everything back: `is_gone` from then on. ``forked``: it belongs to this process's parent."""
        raise NotImplementedError
