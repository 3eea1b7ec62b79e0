# kernels: workers copy crc32c crc32c_native process_read file_read
"""Worker pool: copies, zero tests, checksums, reads of processes and files, off the loop, without the GIL.

Threads sleep on a condition. What they finish is put on a list; an eventfd tells the loop when that list
stops being empty, so that a burst of completions costs one wake-up.
"""

import asyncio
import errno
import os
import warnings
from collections import namedtuple

cimport cython
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint64_t
from libc.stdlib cimport free, malloc
from posix.unistd cimport getpid

from ckptpipe.pyx.errors import CkptpipeError, io_error

from ckptpipe.pyx.staging cimport Lease

cdef extern from "crc32c.h" nogil:
    int ck_crc32c_select(const char* name)
    const char* ck_crc32c_name()

cdef extern from "copy.h" nogil:
    int ck_copy_select(const char* name)
    const char* ck_copy_name()

cdef Py_ssize_t INLINE_BYTES = 128 << 10  # at and below this a thread's wake-up costs more than the work
cdef int MAX_THREADS = 256
cdef int live = 0

Scan = namedtuple("Scan", ("crc32c", "zero"))
_READ_CURES = {
    errno.ESRCH: "the process has ended, or never was: look with ps",
    errno.EPERM: "run as the process's user and allow tracing (sysctl kernel.yama.ptrace_scope=0), or with "
                 "CAP_SYS_PTRACE, which a process that changed its user id needs",
    errno.EFAULT: "nothing readable is mapped there (any more): look into /proc/PID/maps",
    errno.ENOSYS: "a seccomp filter forbids process_vm_readv: allow it in the container's profile",
}
Scan.__doc__ = "CRC32C of a range, and whether all its bytes are zero."


@cython.final
@cython.freelist(64)
@cython.no_gc_clear
cdef class Job:
    """A job in flight: holds its leases, and the pool's C side holds it, until it is reaped."""

    cdef object result(self):
        if self.raw.kind == CK_JOB_CRC or self.raw.kind == CK_JOB_FILE:
            return self.raw.crc
        return Scan(self.raw.crc, self.raw.zero != 0)

    cdef object failure(self):
        """The error of a read that failed, or None."""
        if self.raw.error == 0:
            return None
        if self.raw.kind in (CK_JOB_FILE, CK_JOB_SCAN_FILE):
            return io_error(self.raw.error, "read", f"{self.file.path} at byte {self.raw.fault}")
        return io_error(self.raw.error, "process_vm_readv", f"process {self.raw.pid} at {self.raw.fault:#x}",
                        cure=_READ_CURES.get(self.raw.error, ""))

    cdef void let_go(self) noexcept:
        if self.destination is not None:
            self.destination.unhold()
        if self.source is not None:
            self.source.unhold()
        if self.file is not None:
            self.file.release()


cdef class WorkerPool:
    """Threads that copy, test for zeros and checksum; made inside the running loop that it reports to.

    Each method queues one job and returns a future of that loop; the job holds its ranges until it has run,
    also when the future is cancelled. Ranges of at most 128 KiB are done at once, on the loop's thread. A
    large range is cut over the threads that are idle.

    ``threads``: 0 for one a usable CPU. ``cpus``: pin the threads to these in turn. ``idle``: they only run
    where a CPU has nothing else to do, and take none from anybody (SCHED_IDLE, sched(7)).
    """

    def __cinit__(self):
        self.pool = NULL
        self.eventfd = -1
        self.owner_pid = getpid()

    def __init__(self, int threads=0, *, cpus=None, bint idle=False):
        global live
        if self.pool != NULL or self.closing:
            raise RuntimeError("WorkerPool is initialised already")
        if threads < 0 or threads > MAX_THREADS:
            raise ValueError(f"threads is 0 (one a CPU) to {MAX_THREADS}, not {threads}")
        usable = os.sched_getaffinity(0)
        pinned = [] if cpus is None else list(cpus)
        strangers = [cpu for cpu in pinned if cpu not in usable]
        if strangers:
            raise ValueError(f"cannot pin to CPUs {strangers}: this process may use {sorted(usable)}")
        if threads == 0:
            threads = min(len(pinned) or len(usable), MAX_THREADS)
        loop = asyncio.get_running_loop()
        cdef int error
        cdef int count = len(pinned)
        cdef int* numbers = <int*>malloc((count + 1) * sizeof(int))
        if numbers == NULL:
            raise MemoryError()
        try:
            for i in range(count):
                numbers[i] = pinned[i]
            error = (ck_pool_open_idle if idle else ck_pool_open)(&self.pool, threads, numbers, count)
        finally:
            free(numbers)
        if error:
            self.pool = NULL
            raise CkptpipeError(
                f"cannot start {threads} worker threads: {os.strerror(error)}",
                cure="raise the limits on processes and files (ulimit -u, ulimit -n, pids cgroup)",
            )
        self.loop = loop
        self.nthreads = threads
        self.eventfd = ck_pool_eventfd(self.pool)
        live += 1
        try:
            loop.add_reader(self.eventfd, self._reap)
        except BaseException:
            self.stop()
            raise

    @property
    def threads(self):
        """Threads that run: 0 after `aclose`."""
        return self.nthreads

    @property
    def inflight(self):
        """Jobs queued or running."""
        return self.running

    @property
    def jobs(self):
        """Jobs done since the start."""
        return self.finished

    @property
    def cpu_seconds(self):
        """CPU time that the threads have used."""
        return self.spent if self.pool == NULL else ck_pool_cpu_seconds(self.pool)

    def scan(self, Lease lease not None, Py_ssize_t nbytes):
        """CRC32C and zero test of the first ``nbytes``, in one pass; a future of Scan."""
        return self.submit(CK_JOB_PASS, None, lease, nbytes)

    def crc32c(self, Lease lease not None, Py_ssize_t nbytes):
        """CRC32C of the first ``nbytes``; a future of int."""
        return self.submit(CK_JOB_CRC, None, lease, nbytes)

    def copy(self, Lease destination not None, Lease source not None, Py_ssize_t nbytes, *, bint huge=False):
        """Copy, CRC32C and zero test of the first ``nbytes``, in one pass; a future of Scan.

        ``huge``: the destination is shared memory with holes, which get huge pages first.
        """
        return self.submit(CK_JOB_PASS, destination, source, nbytes, huge)

    def read_process(self, int pid, uint64_t address, Lease lease not None, Py_ssize_t nbytes):
        """Read ``nbytes`` at ``address`` of process ``pid`` into the lease, with CRC32C and zero test in the
        same pass; a future of Scan.

        OSError (`io_error`) naming the process and the address that could not be read: ESRCH, EPERM, EFAULT.
        The lease's bytes are undefined then.
        """
        self.check_open()
        if pid <= 0:
            raise ValueError(f"{pid} is no process")
        if nbytes > 0 and address > <uint64_t>-1 - <uint64_t>nbytes:
            raise ValueError(f"no memory range: {nbytes} bytes at {address:#x}")
        lease.hold_destination(nbytes)
        cdef Job job = Job.__new__(Job)
        job.destination = lease
        job.source = None
        job.raw.kind = CK_JOB_READ
        job.raw.pid = pid
        return self.post(job, lease.ptr, address, nbytes)

    def read_file(self, file not None, uint64_t offset, Lease lease not None, Py_ssize_t nbytes, *,
                  bint huge=False, Py_ssize_t part=0):
        """Read ``nbytes`` at ``offset`` of ``file`` through the page cache into the lease, with CRC32C in the
        same pass; a future of int.

        ``file``: has `fileno`, `path`, `share` and `release` (storage_backends.abc.LocalFile); the job has
        a hold of its own. ``huge``: as for `copy`. OSError (`io_error`) naming file and offset; ENODATA where
        the file ends before.

        ``part``: bytes. All threads read the range together, each so much at a time, in order, before they go
        on to what was queued later: it is complete sooner, and less of memory is in use at a time. 0: a
        thread reads as much as there is for each idle one, at once; the same with ``huge``.
        """
        self.check_open()
        if part < 0:
            raise ValueError(f"parts of {part} bytes")
        lease.hold_destination(nbytes)
        cdef Job job = Job.__new__(Job)
        job.destination = lease
        job.raw.kind = CK_JOB_FILE
        job.raw.huge = huge
        job.raw.part = 0 if huge else part
        return self.post_file(job, file, lease.ptr, offset, nbytes)

    def scan_file(self, file not None, uint64_t offset, Py_ssize_t nbytes):
        """CRC32C and zero test of ``nbytes`` at ``offset`` of ``file``, read through the page cache and kept
        nowhere; a future of Scan. ``file`` and errors: as for `read_file`.
        """
        self.check_open()
        if nbytes < 0:
            raise ValueError(f"{nbytes} bytes of a file")
        cdef Job job = Job.__new__(Job)
        job.raw.kind = CK_JOB_SCAN_FILE
        return self.post_file(job, file, NULL, offset, nbytes)

    cdef int check_open(self) except -1:
        if self.pool == NULL or self.closing:
            raise RuntimeError("the worker pool is closed")
        return 0

    cdef object post_file(self, Job job, object file, unsigned char* to, uint64_t offset, Py_ssize_t nbytes):
        """Queue a job that has its holds, but that on the file."""
        try:
            if offset > <uint64_t>(1 << 62):
                raise ValueError(f"no file has a byte {offset}")
            job.file = file.share()
            job.raw.fd = job.file.fileno()
        except BaseException:
            job.let_go()
            raise
        return self.post(job, to, offset, nbytes)

    cdef object post(self, Job job, unsigned char* to, uint64_t source, Py_ssize_t nbytes):
        """Queue a job that has its holds. Never on the loop's thread: what it reads may come from a disk."""
        try:
            job.future = self.loop.create_future()
        except BaseException:
            job.let_go()
            raise
        job.raw.token = <void*>job
        Py_INCREF(job)
        self.running += 1
        ck_pool_submit(self.pool, &job.raw, to, <const unsigned char*><size_t>source, nbytes)
        return job.future

    cdef object submit(self, int kind, Lease destination, Lease source, Py_ssize_t nbytes, bint huge=False):
        self.check_open()
        cdef Job job = Job.__new__(Job)
        cdef unsigned char* to = NULL
        source.hold_source(nbytes)
        if destination is not None:
            try:
                destination.hold_destination(nbytes)
                to = destination.ptr
                if to < source.ptr + nbytes and source.ptr < to + nbytes:
                    destination.unhold()
                    raise ValueError("the source and the destination of a copy overlap")
            except BaseException:
                source.unhold()
                raise
        job.source = source
        job.destination = destination
        job.raw.kind = kind
        job.raw.huge = huge
        try:
            job.future = self.loop.create_future()
        except BaseException:
            job.let_go()
            raise
        if nbytes <= INLINE_BYTES:
            ck_job_run(&job.raw, to, source.ptr, nbytes)
            job.let_go()
            self.finished += 1
            job.future.set_result(job.result())
            return job.future
        job.raw.token = <void*>job
        Py_INCREF(job)
        self.running += 1
        ck_pool_submit(self.pool, &job.raw, to, source.ptr, nbytes)
        return job.future

    def _reap(self):
        self.reap()

    cdef int reap(self) except -1:
        if self.pool == NULL:
            return 0
        cdef ck_job* raw = ck_pool_reap(self.pool)
        cdef Job job
        cdef bint heard = not self.loop.is_closed()  # else nobody can be told, but the memory goes back
        while raw != NULL:
            job = <Job>raw.token
            raw = raw.next
            Py_DECREF(job)
            self.running -= 1
            self.finished += 1
            job.let_go()
            if heard and not job.future.done():
                error = job.failure()
                if error is None:
                    job.future.set_result(job.result())
                else:
                    job.future.set_exception(error)
        if heard and self.running == 0 and self.drained is not None and not self.drained.done():
            self.drained.set_result(None)
        return 0

    async def aclose(self):
        """Wait for queued jobs, join the threads, close the eventfd. Idempotent; finishes when cancelled."""
        self.closing = True
        cancelled = None
        while self.running:
            if self.drained is None or self.drained.done():
                self.drained = self.loop.create_future()
            try:
                await asyncio.shield(self.drained)
            except asyncio.CancelledError as error:
                cancelled = error  # jobs are short, and their memory is in use: go on, then say so
        self.stop()
        if cancelled is not None:
            raise cancelled

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        await self.aclose()

    cdef void stop(self) noexcept:
        """Join the threads and free all; what is still queued is done first and its leases are let go."""
        global live
        if self.pool == NULL:
            return
        self.closing = True
        cdef ck_pool* pool = self.pool
        cdef bint parent = getpid() == self.owner_pid
        if parent:
            if not self.loop.is_closed():
                self.loop.remove_reader(self.eventfd)
            with nogil:
                ck_pool_join(pool)
            self.spent = ck_pool_cpu_seconds(pool)
            self.reap()
        self.pool = NULL
        self.nthreads = 0
        self.eventfd = -1
        live -= 1
        if parent:
            ck_pool_free(pool)
        else:
            ck_pool_abandon(pool)

    def __del__(self):
        if self.pool != NULL:
            if getpid() == self.owner_pid:
                warnings.warn(f"a WorkerPool of {self.nthreads} threads was not closed", ResourceWarning,
                              source=self)
            self.stop()

    def __repr__(self):
        if self.pool == NULL:
            return "<WorkerPool closed>"
        return f"<WorkerPool {self.nthreads} threads, {self.running} jobs in flight>"


def live_pools():
    """Pools that hold threads and an eventfd in this process now."""
    return live


def implementations():
    """What the threads run: (CRC32C, copy)."""
    return ck_crc32c_name().decode(), ck_copy_name().decode()


for _name, _chosen in (
    ("CKPTPIPE_CRC32C", ck_crc32c_select(os.environ.get("CKPTPIPE_CRC32C", "").encode())),
    ("CKPTPIPE_COPY", ck_copy_select(os.environ.get("CKPTPIPE_COPY", "").encode())),
):
    if _chosen != 0:
        raise ValueError(f"{_name}={os.environ[_name]}: no such implementation on this CPU")
