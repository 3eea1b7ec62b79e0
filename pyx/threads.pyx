# kernels: iothreads
"""Engine that runs preadv, pwritev, fsync and fallocate in a few threads, without the GIL."""

from libc.stdlib cimport calloc, free
from posix.unistd cimport getpid

from ckptpipe.pyx.engine cimport FALLOCATE, FSYNC, READ, Engine, Operation

from ckptpipe.pyx.engine import set_up_error

MAX_THREADS = 16


cdef class ThreadsEngine(Engine):
    """Works on every kernel and file. A thread an operation, up to ``threads``, started as needed."""

    def __init__(self, int depth, str requested="threads", str why="", *, int threads=0):
        cdef int error = 0
        Engine.__init__(self, depth, requested, why)
        self.name = "threads"
        if threads < 0:
            raise ValueError(f"threads {threads} is negative")
        self.jobs = <io_job*>calloc(depth, sizeof(io_job))
        if self.jobs == NULL:
            raise MemoryError()
        self.pool = io_threads_open(threads or min(depth, MAX_THREADS), self.eventfd, &error)
        if self.pool == NULL:
            cure = "raise the limit of processes (ulimit -u, pids.max)"
            raise set_up_error(-error, "pthread_create", "", cure)
        if type(self) is ThreadsEngine:
            self.attach()

    def __dealloc__(self):
        if self.pool != NULL:
            if self.pid == getpid():
                io_threads_close(self.pool)
            else:
                io_threads_forget(self.pool)
        free(self.jobs)

    @property
    def threads(self):
        """Threads that run now."""
        return io_threads_count(self.pool) if self.pool != NULL else 0

    cdef int start_in_thread(self, Operation op) except -1:
        cdef io_job* job = &self.jobs[op.slot]
        job.slot = op.slot
        job.fd = op.fd
        if op.kind == FSYNC:
            job.kind = IO_FSYNC
            job.mode = op.mode
        elif op.kind == FALLOCATE:
            job.kind = IO_FALLOCATE
            job.mode = op.mode
            job.offset = op.offset
            job.nbytes = op.total
        else:
            job.kind = IO_READ if op.kind == READ else IO_WRITE
            job.buf = op.base + op.position
            job.offset = op.file_offset()
            job.nbytes = op.size()
        io_threads_prepare(self.pool, job)
        self.prepared = True
        return 0

    cdef int submit_to_threads(self) except -1:
        if self.prepared:
            self.prepared = False
            with nogil:
                io_threads_submit(self.pool)
        return 0

    cdef int reap_threads(self) except -1:
        cdef io_job* job = io_threads_reap(self.pool)
        cdef io_job* following
        while job != NULL:
            following = job.next  # `finished` may start the slot's next transfer
            self.finished(<Operation>self.slots[job.slot], job.result)
            job = following
        return 0

    cdef int start(self, Operation op) except -1:
        return self.start_in_thread(op)

    cdef int submit(self) except -1:
        return self.submit_to_threads()

    cdef int reap(self) except -1:
        self.clear_eventfd()
        return self.reap_threads()

    cdef int again(self, Operation op) except -1:
        return self.start(op)

    cdef int shut(self) except -1:
        cdef io_threads* pool = self.pool
        self.pool = NULL
        with nogil:
            io_threads_close(pool)
        return 0
