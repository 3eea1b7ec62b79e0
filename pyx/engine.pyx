"""Asynchronous file I/O: what all engines share.

An `Operation` waits in a FIFO queue until one of ``depth`` slots is free, keeps its slot while it is
continued after short transfers, and holds its lease until the kernel has answered for the last time. A
subclass only starts, submits and reaps transfers; `Engine.finished` decides what an answer means.
"""

import asyncio
import os
from collections import deque

from cpython.unicode cimport PyUnicode_Check
from libc.errno cimport (
    EAGAIN, EBADF, EDQUOT, EINTR, EINVAL, EIO, EISDIR, ENOSPC, EOPNOTSUPP, errno,
)
from libc.stdint cimport INT64_MAX, uint64_t
from posix.fcntl cimport F_GETFL, fcntl
from posix.unistd cimport close as c_close
from posix.unistd cimport getpid
from posix.unistd cimport read as c_read

from ckptpipe.pyx.errors import CkptpipeError, StuckIo, io_error

cdef extern from "<fcntl.h>" nogil:
    const int O_DIRECT

cdef extern from "<sys/eventfd.h>" nogil:
    const int EFD_CLOEXEC
    const int EFD_NONBLOCK
    int c_eventfd "eventfd" (unsigned int value, int flags)

cdef extern from "pythread.h":
    unsigned long PyThread_get_thread_ident() nogil

MAX_DEPTH = 4096
cdef int64_t TRANSFER_MAX = 0x7FFFF000  # the kernel cuts longer transfers here (read(2))
cdef int64_t BLOCK = 4096  # direct transfers are continued at multiples of this

cdef double RETRY_SECONDS = 0.001
cdef double PATIENCE_SECONDS = 60.0  # a healthy device answers in far less, whatever its queue

cdef object _NAMES = ("read", "write", "fsync", "fallocate")

# Strong references: the kernel may still write into memory that an engine's operations hold.
cdef set _OPEN = set()


def _expire(waiter):
    if not waiter.done():
        waiter.set_result(None)


def live_engines():
    """Engines that were opened in this process and not yet closed."""
    cdef int pid = getpid()
    return sum(1 for engine in _OPEN if (<Engine>engine).pid == pid)


def _cure(number, Operation op):
    if number == EINVAL and op.direct and (op.kind == READ or op.kind == WRITE):
        address = <uint64_t>op.base + <uint64_t>op.position
        return (
            f"direct I/O wants address, offset and length in multiples of the file's alignment "
            f"(address {address:#x}, offset {op.file_offset()}, length {op.size()}); "
            "align them to dio_alignment(), or switch direct I/O off here"
        )
    if number == ENOSPC:
        return "make room on this file system, or write elsewhere"
    if number == EDQUOT:
        return "a disk quota is used up: raise it, or write elsewhere"
    if number == EOPNOTSUPP and op.kind == FALLOCATE:
        return "this file system cannot do that: switch preallocation off"
    if number == EISDIR:
        return "it is a directory: name a file"
    if number == EBADF:
        return f"descriptor {op.fd} is closed, or not open for this"
    if number == EIO:
        return "the device or the server behind the mount failed: see the kernel's log"
    return ""


def set_up_error(number, str call, str reason, str cure):
    """The error of a system call that makes an engine: no file is at fault."""
    error = io_error(number, call, "", cure=cure)
    error.message = f"{call}: {os.strerror(number)}" + (f" ({reason})" if reason else "")
    return error


cdef class Operation:
    """One read, write, fsync or fallocate on its way."""

    cdef int64_t file_offset(self) noexcept:
        return self.offset if self.offset < 0 else self.offset + self.position

    cdef int64_t size(self) noexcept:
        return min(self.total - self.position, self.engine._limit_transfer)

    def abandon(self, future):
        """Done-callback of operations that wait for a slot: a cancelled one gives its memory up at once."""
        if self.state == QUEUED and future.cancelled():
            self.engine.settle(self, None)  # its husk stays in the queue, and `flush` passes over it


cdef class Engine:
    """Queues operations of one event loop, in one thread. Made by `open_engine`, ended by `aclose`."""

    def __cinit__(self):
        self.eventfd = -1
        self.pid = getpid()
        self.thread = PyThread_get_thread_ident()

    def __init__(self, int depth, str requested, str why):
        if not 1 <= depth <= MAX_DEPTH:
            raise ValueError(f"depth {depth} is not in 1..{MAX_DEPTH}")
        if self.loop is not None:
            raise RuntimeError("an engine is opened once")
        self.loop = asyncio.get_running_loop()
        self.depth = depth
        self.requested = requested
        self.why = why
        self.notes = []
        self._limit_transfer = TRANSFER_MAX
        self.patience = PATIENCE_SECONDS
        self.moved = self.loop.time()
        self.queue = deque()
        self.slots = [None] * depth
        self.unused = list(range(depth - 1, -1, -1))
        self.busy = {}
        self.waiters = []
        self.eventfd = c_eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        if self.eventfd < 0:
            raise set_up_error(errno, "eventfd", "", "raise the limit of open files (ulimit -n)")

    def __dealloc__(self):
        if self.eventfd >= 0:
            c_close(self.eventfd)

    def __repr__(self):
        state = "closed" if self.closed else f"{self.inflight} in flight"
        return f"<{type(self).__name__} {self.name} depth={self.depth} {state}>"

    @property
    def inflight(self):
        """Operations that were accepted and have not been answered, those that wait for a slot included."""
        return self.accepted

    @property
    def running(self):
        """Slots in use: operations that the kernel or a thread has."""
        return self.depth - len(self.unused)

    # -- what callers ask for ----------------------------------------------------------------------------

    def read(self, int fd, Lease lease not None, nbytes, offset, path):
        """Fill ``lease[:nbytes]`` from ``offset`` (-1: a pipe); the count is short only at end of file."""
        return self.transfer(READ, fd, lease, nbytes, offset, path)

    def write(self, int fd, Lease lease not None, nbytes, offset, path):
        """Write all of ``lease[:nbytes]`` at ``offset`` (-1: a pipe)."""
        return self.transfer(WRITE, fd, lease, nbytes, offset, path)

    def fsync(self, int fd, path, *, bint data_only=False):
        """Make durable what was written and answered before this call."""
        cdef Operation op = self.prepare(FSYNC, fd, path)
        op.mode = data_only
        return self.enqueue(op)

    def fallocate(self, int fd, int mode, offset, nbytes, path):
        """Reserve, punch or zero ``nbytes`` at ``offset``: ``mode`` is a sum of FALLOC_* (`pyx.files`)."""
        cdef Operation op = self.prepare(FALLOCATE, fd, path)
        op.mode = mode
        op.offset = offset
        op.total = nbytes
        return self.enqueue(op)

    async def drain(self, fd=None):
        """Wait until no operation on ``fd`` (on any file) is accepted or in the kernel.

        Shielded: when the waiting task is cancelled, it still waits, and is cancelled then. StuckIo where no
        operation at all has been answered for `patience` seconds: the kernel still has their memory, which
        they keep, and descriptors that they read and write must stay open.
        """
        cancelled = None
        while (fd in self.busy) if fd is not None else self.accepted:
            waiter = self.loop.create_future()
            entry = (fd, waiter)
            self.waiters.append(entry)
            timer = self.loop.call_at(self.moved + self.patience, _expire, waiter)
            try:
                await waiter
            except asyncio.CancelledError as error:
                cancelled = error
            finally:
                timer.cancel()
                if entry in self.waiters:
                    self.waiters.remove(entry)
            if cancelled is None and self.accepted and self.loop.time() >= self.moved + self.patience:
                raise self._stuck()
        if cancelled is not None:
            try:
                raise cancelled
            finally:
                cancelled = None

    def _stuck(self):
        cdef Operation op
        held = [(_NAMES[op.kind], op.path) for op in self.slots if op is not None]
        first = f" ({held[0][0]} {held[0][1]})" if held else ""
        return StuckIo(
            f"{self.accepted} I/O operations{first} have not been answered for {self.patience:.0f} s: "
            "their memory stays with the kernel until this process ends",
            cure="the device or the server behind that file hangs: see the kernel's log, and end the process",
        )

    async def aclose(self):
        """Refuse new operations, wait for those under way, free everything. Idempotent. StuckIo as `drain`:
        nothing is freed then, and a later call tries again."""
        if self.closed or self.pid != getpid():
            return
        self.closing = True
        try:
            await self.drain()
        finally:
            if not self.accepted:  # else this coroutine was thrown away, and the kernel still has memory
                self.release()

    # -- from the call to the slot -----------------------------------------------------------------------

    cdef Operation prepare(self, int kind, int fd, object path):
        cdef Operation op = Operation.__new__(Operation)
        self.check_owner()
        op.engine = self
        op.kind = kind
        op.fd = fd
        op.path = path if PyUnicode_Check(path) else os.fspath(path)
        op.slot = -1
        op.state = QUEUED
        return op

    cdef object transfer(self, int kind, int fd, Lease lease, int64_t nbytes, int64_t offset, object path):
        cdef Operation op = self.prepare(kind, fd, path)
        cdef int flags
        if offset < -1 or offset > INT64_MAX - max(nbytes, 0):
            raise ValueError(f"offset {offset} of {op.path} is not in 0..2**63")
        if kind == READ:
            lease.hold_destination(nbytes)
        else:
            lease.hold_source(nbytes)
        if nbytes == 0:
            lease.unhold()
            future = self.loop.create_future()
            future.set_result(0)
            return future
        op.lease = lease
        op.base = lease.ptr
        op.total = nbytes
        op.offset = offset
        flags = fcntl(fd, F_GETFL)
        op.direct = flags >= 0 and (flags & O_DIRECT) != 0
        return self.enqueue(op)

    cdef object enqueue(self, Operation op):
        op.future = future = self.loop.create_future()
        self.accepted += 1
        self.moved = self.loop.time()
        self.busy[op.fd] = self.busy.get(op.fd, 0) + 1
        cdef Py_ssize_t room = len(self.unused)
        self.queue.append(op)
        cdef Py_ssize_t waiting = len(self.queue)
        if waiting > room:
            future.add_done_callback(op.abandon)
        elif waiting == room:
            self.flush()
        elif not self.flush_scheduled:
            # All that is asked for in this turn of the loop goes to the kernel in one call.
            self.flush_scheduled = True
            self.loop.call_soon(self._flush)
        return future

    cdef int check_owner(self) except -1:
        if self.pid != getpid():
            raise CkptpipeError(
                f"this I/O engine belongs to process {self.pid}, and this is process {getpid()}",
                cure="open an engine after the fork, or start the process with spawn",
            )
        if self.thread != PyThread_get_thread_ident():
            raise CkptpipeError(
                "this I/O engine belongs to another thread",
                cure="use it in the thread of its event loop (asyncio.run_coroutine_threadsafe)",
            )
        if self.closing or self.closed:
            raise CkptpipeError("the I/O engine is closed", cure="open another one")
        return 0

    def _flush(self):
        self.flush_scheduled = False
        self.flush()

    cdef int flush(self) except -1:
        cdef Operation op
        while not self.closed:
            while self.queue and self.unused:
                op = <Operation>self.queue.popleft()
                if op.state != QUEUED:
                    continue
                if op.future.done():  # cancelled before it began
                    self.settle(op, None)
                    continue
                op.slot = <int>self.unused.pop()
                op.state = RUNNING
                self.slots[op.slot] = op
                self.start(op)
            self.submit()
            if not (self.queue and self.unused):  # else the kernel refused some at once, which freed slots
                break
        return 0

    cdef int retry_later(self) except -1:
        """The kernel is out of something for now, and no completion may come to remind us."""
        if not self.retry_scheduled:
            self.retry_scheduled = True
            self.loop.call_later(RETRY_SECONDS, self._retry)
        return 0

    def _retry(self):
        self.retry_scheduled = False
        self._ready()

    # -- from the answer to the future -------------------------------------------------------------------

    def _ready(self):
        """Reader callback of the eventfd."""
        if self.closed:
            return
        self.reap()
        self.flush()

    cdef int clear_eventfd(self) except -1:
        cdef uint64_t value
        while c_read(self.eventfd, &value, sizeof(value)) < 0 and errno == EINTR:
            pass
        return 0

    cdef int finished(self, Operation op, int64_t result) except -1:
        """An answer: bytes, 0, or -errno."""
        cdef int number
        if result < 0:
            number = <int>-result
            if op.future.cancelled():
                return self.settle(op, None)
            if number == EINTR:
                return self.start(op)
            if number == EAGAIN:
                return self.again(op)
            return self.fail(op, number, _cure(number, op))
        if op.kind == READ or op.kind == WRITE:
            return self.transferred(op, result)
        return self.settle(op, None)

    cdef int transferred(self, Operation op, int64_t count) except -1:
        cdef int64_t reached = op.position + count
        if count == 0 and op.kind == WRITE:
            return self.fail(op, EIO, "the file takes no more bytes")
        # A direct read that was continued at the start of a block got nothing new: the end of the file.
        if count == 0 or reached <= op.done:
            return self.settle(op, None)
        op.done = reached
        if reached >= op.total or op.future.cancelled():
            return self.settle(op, None)
        op.position = reached
        if op.direct and op.kind == READ and op.offset >= 0:
            # A direct read stops short in a block at the end of the file. Going on there would be unaligned,
            # and EINVAL: read that block again.
            op.position -= (op.offset + reached) % BLOCK
            if op.position < 0:
                op.position = reached
        return self.start(op)

    cdef int fail(self, Operation op, int number, str cure) except -1:
        return self.settle(op, io_error(number, _NAMES[op.kind], op.path, cure=cure))

    cdef int settle(self, Operation op, object error) except -1:
        cdef object future = op.future
        cdef Lease lease = op.lease
        cdef int left
        op.state = SETTLED
        if op.slot >= 0:
            self.slots[op.slot] = None
            self.unused.append(op.slot)
            op.slot = -1
        op.lease = None
        self.accepted -= 1
        self.moved = self.loop.time()
        left = <int>self.busy[op.fd] - 1
        if left:
            self.busy[op.fd] = left
        else:
            del self.busy[op.fd]
        if lease is not None:
            lease.unhold()  # may run an ``on_release``, which may ask for more I/O
        if not future.done():
            if error is not None:
                future.set_exception(error)
            elif op.kind == READ or op.kind == WRITE:
                future.set_result(op.done)
            else:
                future.set_result(None)
        if self.waiters and not left:
            waiters = self.waiters
            self.waiters = []
            for entry in waiters:
                if entry[0] == op.fd or not self.accepted:
                    if not entry[1].done():
                        entry[1].set_result(None)
                else:
                    self.waiters.append(entry)
        return 0

    # -- set-up and end ----------------------------------------------------------------------------------

    cdef int attach(self) except -1:
        """Last step of a subclass's set-up."""
        self.loop.add_reader(self.eventfd, self._ready)
        _OPEN.add(self)
        return 0

    cdef int release(self) except -1:
        if self.closed:
            return 0
        self.closed = True
        _OPEN.discard(self)
        if not self.loop.is_closed():
            self.loop.remove_reader(self.eventfd)
        self.shut()
        c_close(self.eventfd)
        self.eventfd = -1
        self.queue.clear()
        return 0

    cdef int start(self, Operation op) except -1:
        raise NotImplementedError

    cdef int submit(self) except -1:
        raise NotImplementedError

    cdef int reap(self) except -1:
        raise NotImplementedError

    cdef int shut(self) except -1:
        raise NotImplementedError

    cdef int again(self, Operation op) except -1:
        raise NotImplementedError
