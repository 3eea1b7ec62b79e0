# kernels: aio iothreads
"""Engine over Linux native AIO (io_submit): direct reads and writes; the rest runs in threads.

io_submit is asynchronous only for O_DIRECT: on any other descriptor it would block the loop until the bytes
are copied, and most file systems have no asynchronous fsync.
"""

from libc.errno cimport EAGAIN, ENOMEM, ENOSYS, EPERM
from libc.stdlib cimport calloc, free
from posix.stat cimport S_ISBLK, S_ISREG, fstat, struct_stat
from posix.unistd cimport getpid

from ckptpipe.pyx.engine cimport READ, WRITE, Operation
from ckptpipe.pyx.threads cimport ThreadsEngine

from ckptpipe.pyx.engine import set_up_error

cdef enum:
    EVENTS = 64  # taken from the kernel at once

cdef dict _REASONS = {
    EAGAIN: "fs.aio-max-nr is used up",
    ENOSYS: "the kernel was built without AIO",
    EPERM: "a seccomp filter, as containers have",
    ENOMEM: "no memory for the ring",
}


cdef class LibaioEngine(ThreadsEngine):
    """Native AIO for files opened with O_DIRECT, threads for everything else."""

    def __init__(self, int depth, str requested="libaio", str why="", *, int threads=0, bint denied=False):
        cdef int rc
        ThreadsEngine.__init__(self, depth, requested, why, threads=threads)
        rc = -EPERM if denied else aio_open(depth, &self.context)
        if rc < 0:
            raise set_up_error(-rc, "io_setup", _REASONS.get(-rc, ""), "use the I/O engine auto or threads")
        self.opened = True
        self.name = "libaio"
        self.cbs = <aio_cb*>calloc(depth, sizeof(aio_cb))
        self.batch = <aio_cb**>calloc(depth, sizeof(aio_cb*))
        if self.cbs == NULL or self.batch == NULL:
            raise MemoryError()
        self.notes.append("libaio: fsync and fallocate run in threads")
        self.attach()

    def __dealloc__(self):
        if self.opened and self.pid == getpid():
            aio_close(self.context)
        free(self.cbs)
        free(self.batch)

    cdef bint asynchronous(self, Operation op) noexcept:
        cdef struct_stat status
        if not op.direct or op.rerouted or op.offset < 0 or (op.kind != READ and op.kind != WRITE):
            return False
        return fstat(op.fd, &status) == 0 and (S_ISREG(status.st_mode) or S_ISBLK(status.st_mode))

    cdef int start(self, Operation op) except -1:
        cdef aio_cb* cb
        if not self.asynchronous(op):
            if not op.direct and not self.told and (op.kind == READ or op.kind == WRITE):
                self.told = True
                self.notes.append("libaio: files without direct I/O are read and written in threads")
            return self.start_in_thread(op)
        cb = &self.cbs[op.slot]
        aio_prepare(
            cb,
            AIO_READ if op.kind == READ else AIO_WRITE,
            op.fd,
            op.base + op.position,
            op.size(),
            op.file_offset(),
            op.slot,
            self.eventfd,
        )
        self.batch[self.batched] = cb
        self.batched += 1
        return 0

    cdef int submit(self) except -1:
        cdef int rc, taken
        while self.batched:
            with nogil:
                rc = aio_submit(self.context, self.batched, self.batch)
            taken = rc if rc > 0 else 0
            if rc <= 0:
                # The first one was refused, and only that one: its answer is rc.
                taken = 1
            refused = <Operation>self.slots[self.batch[0].data] if rc <= 0 else None
            self.batched -= taken
            for i in range(self.batched):
                self.batch[i] = self.batch[i + taken]
            if refused is not None:
                self.finished(<Operation>refused, rc if rc < 0 else -EAGAIN)
        return self.submit_to_threads()

    cdef int reap(self) except -1:
        cdef aio_event[EVENTS] events
        cdef int i, n
        self.clear_eventfd()
        while True:
            n = aio_reap(self.context, events, EVENTS)
            for i in range(n):
                self.finished(<Operation>self.slots[events[i].data], events[i].res)
            if n < EVENTS:
                break
        return self.reap_threads()

    cdef int again(self, Operation op) except -1:
        op.rerouted = True  # the kernel's queue is full, or the file would block: a thread can wait for it
        return self.start_in_thread(op)

    cdef int shut(self) except -1:
        if self.opened:
            self.opened = False
            with nogil:
                aio_close(self.context)
        return ThreadsEngine.shut(self)
