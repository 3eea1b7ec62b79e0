# kernels: cuda_queue cuda_queue_setup cuda_load workers copy crc32c crc32c_native process_read file_read
"""Copies between a GPU and leased host memory: events, not stream-wide synchronisation, and no busy waiting.

Everything between the call and the future runs in two threads of the queue, without the GIL
(kernels/cuda_queue.h): one issues, one sleeps on events. The loop hears of what has ended through an eventfd.
"""

import asyncio
import os

cimport cython
from cpython.ref cimport Py_DECREF, Py_INCREF

from ckptpipe.pyx import cuda_kernel
from ckptpipe.pyx.cuda_errors import CudaError
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.pyx.workers import Scan

from ckptpipe.pyx.cuda_driver cimport CU_OK, loaded
from ckptpipe.pyx.loop_work cimport LoopWork
from ckptpipe.pyx.staging cimport Lease

cdef extern from "crc32c.h" nogil:
    int ck_crc32c_select(const char* name)

cdef extern from "copy.h" nogil:
    int ck_copy_select(const char* name)

MAX_DEPTH = 1024
LIMITS = "raise the limits on processes and files (ulimit -u, ulimit -n, pids cgroup)"
cdef int HOST_THREADS = 8  # of a queue whose checksums are the CPU's, at most
cdef int live = 0


@cython.final
@cython.freelist(64)
@cython.no_gc_clear
cdef class Copy:
    """An operation in flight: holds its lease, and the queue's C side holds it, until it is reaped.

    It does not hold the queue: one that was thrown away ends its operations when it is collected.
    """

    def _abandon(self, future):
        if self.flying and future.cancelled():
            ck_copies_cancel(&self.raw)


cdef class CopyQueue(LoopWork):
    """The copies of one GPU; made inside the running loop that it reports to, or with `open`.

    ``context``: the CUcontext of ``device``, which the caller holds until `aclose`. ``stream``: a CUstream of
    that context for all copies (what it was given before comes first), 0 for one of its own a direction.
    ``checksum``: "device" computes CRC32C and zero test by a kernel beside the copies, "host" on threads
    after them; where the kernel cannot be had, "host" is taken and ``why`` says the reason. ``depth``:
    operations that the driver has at a time; further ones wait, first come first served. ``elide_zeros``:
    scan first, and do not copy what is all zero: **the lease then keeps what it held**, and only
    ``Scan.zero`` tells.

    The device range of an operation must not change until its future is done. An operation holds its lease
    until its events have passed, also when its future was cancelled; a cancelled one that had not begun never
    does.
    """

    def __cinit__(self):
        self.raw = NULL
        self.loads = NULL

    def __init__(self, int device, size_t context, *, size_t stream=0, str checksum="device", int depth=32,
                 bint elide_zeros=False, int host_threads=0):
        if self.raw != NULL or self.closing:
            raise RuntimeError("CopyQueue is initialised already")
        if checksum not in ("device", "host"):
            raise ValueError(f"checksum is device or host, not {checksum!r}")
        if not 1 <= depth <= MAX_DEPTH:
            raise ValueError(f"depth is 1 to {MAX_DEPTH}, not {depth}")
        if context == 0:
            raise ValueError("a copy queue needs a CUDA context")
        if host_threads < 0 or host_threads > 256:
            raise ValueError(f"host_threads is 0 (chosen here) to 256, not {host_threads}")
        self.belong()
        self.driver = loaded()
        self.device = device
        self.context = context
        self.stream = stream
        self.depth = depth
        self.requested = checksum
        self.why = ""
        image = None
        if checksum == "device":
            try:
                image = cuda_kernel.image_for(device)
            except CkptpipeError as error:
                self.why = str(error)
        if host_threads == 0:
            host_threads = min(len(os.sched_getaffinity(0)), HOST_THREADS)
        try:
            self.open(context, stream, image, host_threads)
        except CudaError as error:
            if image is None or "Module" not in error.call:
                raise
            self.why = str(error)  # this driver does not take the compiled kernel
            image = None
            self.open(context, stream, image, host_threads)
        self.checksum = "host" if image is None else "device"
        self.elide_zeros = elide_zeros and image is not None

    @classmethod
    async def create(cls, device, context, **options):
        """A queue, with the kernel compiled off the loop first (seconds, once a kind of GPU)."""
        if options.get("checksum", "device") == "device":
            await asyncio.to_thread(cuda_kernel.prepare, device)
        return cls(device, context, **options)

    cdef int open(self, size_t context, size_t stream, bytes image, int host_threads) except -1:
        global live
        cdef ck_copies_options options
        cdef const char* call = NULL
        cdef ck_copies* queue = NULL
        cdef int error, host_eventfd
        options.cuda = &self.driver.raw
        options.context = <cu_context>context
        options.stream = <cu_stream>stream
        options.depth = self.depth
        options.image = NULL
        if image is not None:
            options.image = <const char*>image
        options.host_threads = host_threads
        with nogil:
            error = ck_copies_open(&queue, &options, &call)
        if error:
            raise self.refused(error, call.decode(), f"copy queue of GPU {self.device}")
        self.raw = queue
        host_eventfd = ck_copies_host_eventfd(queue)
        self.check = CK_CHECK_HOST if host_eventfd >= 0 else CK_CHECK_DEVICE
        live += 1
        try:
            self.watch(ck_copies_eventfd(queue))
            if host_eventfd >= 0:
                self.watch(host_eventfd)
        except BaseException:
            self.stop_now()
            raise
        return 0

    @property
    def running(self):
        """Operations that the driver has now: at most ``depth``."""
        return ck_copies_running(self.raw) if self.raw != NULL else 0

    # -- what callers ask for ----------------------------------------------------------------------------

    def fetch(self, Lease lease not None, Py_ssize_t nbytes, size_t device_address):
        """Copy ``nbytes`` of device memory into the lease; a future of Scan, their CRC32C and zero test."""
        return self.begin(CK_COPY_DOWN, self.check, lease, device_address, nbytes)

    def store(self, size_t device_address, Lease lease not None, Py_ssize_t nbytes):
        """Copy the lease's first ``nbytes`` to device memory; a future of None."""
        return self.begin(CK_COPY_UP, CK_CHECK_NONE, lease, device_address, nbytes)

    def store_and_scan(self, size_t device_address, Lease lease not None, Py_ssize_t nbytes):
        """`store` and `scan` in one: of what has arrived (of the lease, where the CPU checksums)."""
        return self.begin(CK_COPY_UP, self.check, lease, device_address, nbytes)

    def clear(self, size_t device_address, Py_ssize_t nbytes):
        """Fill device memory with zeros; nothing crosses the link. A future of None."""
        return self.begin(CK_COPY_CLEAR, CK_CHECK_NONE, None, device_address, nbytes)

    def load(self, file, uint64_t offset, Py_ssize_t nbytes, size_t device_address, *, bint scan=True):
        """Read ``nbytes`` of a file into device memory; a future of Scan, of what has arrived there.

        ``scan`` False: nobody looks at it here, and the future is one of None.

        ``file``: its ``share()`` gives one more hold on the descriptor ``fileno()``, which ``release()`` ends
        when no thread reads any more. OSError of pread, EOFError where the file ends before, CudaError. Needs
        a cuda_load.FileLoader.
        """
        self.check_usable()
        if self.loads == NULL:
            raise RuntimeError("the copy queue was not told to load files: open a FileLoader on it")
        if offset > (<uint64_t>1 << 62):
            raise ValueError(f"no file offset: {offset}")
        cdef int check = self.check if scan else CK_CHECK_NONE
        cdef Copy copy = self.make(CK_COPY_LOAD, check, device_address, nbytes)
        if nbytes == 0:
            copy.future.set_result(Scan(0, True) if scan else None)
            return copy.future
        copy.raw.descriptor = file.fileno()
        copy.raw.offset = offset
        copy.file = file.share()
        future = self.fly(copy)
        ck_loads_submit(self.loads, &copy.raw)
        return future

    def scan(self, size_t device_address, Py_ssize_t nbytes):
        """CRC32C and zero test of device memory, not copied where the kernel runs; a future of Scan."""
        return self.begin(CK_COPY_SCAN, self.check, None, device_address, nbytes)

    # -- from the call to the future ---------------------------------------------------------------------

    cdef Copy make(self, int kind, int check, size_t device_address, Py_ssize_t nbytes):
        """An operation that has not begun, with its future."""
        self.check_usable()
        if nbytes < 0:
            raise ValueError(f"{nbytes} bytes cannot be copied")
        if nbytes > 0 and (device_address == 0 or device_address > (<size_t>-1) - <size_t>nbytes):
            raise ValueError(f"no device memory range: {nbytes} bytes at {device_address:#x}")
        cdef Copy copy = Copy.__new__(Copy)
        copy.future = self.loop.create_future()
        copy.raw.kind = kind
        copy.raw.check = check
        copy.raw.elide = self.elide_zeros and kind == CK_COPY_DOWN and check == CK_CHECK_DEVICE
        copy.raw.device = device_address
        copy.raw.nbytes = nbytes
        copy.raw.job.kind = CK_JOB_PASS
        copy.raw.token = copy.raw.job.token = <void*>copy
        return copy

    cdef object fly(self, Copy copy):
        """The C side holds it from here on; its future."""
        copy.future.add_done_callback(copy._abandon)
        Py_INCREF(copy)
        copy.flying = True
        self.accepted += 1
        return copy.future

    cdef object begin(self, int kind, int check, Lease lease, size_t device_address, Py_ssize_t nbytes):
        cdef Copy copy = self.make(kind, check, device_address, nbytes)
        if lease is not None:
            if kind == CK_COPY_DOWN:
                lease.hold_destination(nbytes)
            else:
                lease.hold_source(nbytes)
        if nbytes == 0:
            if lease is not None:
                lease.unhold()
            copy.future.set_result(None if check == CK_CHECK_NONE else Scan(0, True))
            return copy.future
        copy.lease = lease
        copy.raw.host = lease.ptr if lease is not None else NULL
        future = self.fly(copy)
        ck_copies_submit(self.raw, &copy.raw)
        return future

    cdef int reap(self) except -1:
        cdef ck_transfer* done
        cdef ck_job* job
        cdef Copy copy
        if self.raw == NULL:
            return 0
        done = ck_copies_reap(self.raw)
        while done != NULL:
            copy = <Copy>done.token
            done = done.next
            self.settle(copy)
        job = ck_copies_reap_host(self.raw)
        while job != NULL:
            copy = <Copy>job.token
            copy.raw.crc = job.crc
            copy.raw.zero = job.zero
            job = job.next
            self.settle(copy)
        return 0

    cdef int settle(self, Copy copy) except -1:
        cdef bint heard = not self.loop.is_closed()  # else nobody can be told, but the memory goes back
        future = copy.future
        Py_DECREF(copy)
        copy.flying = False
        copy.future = None  # the callback and the future hold each other
        self.accepted -= 1
        cdef bint crossed = copy.raw.kind != CK_COPY_SCAN and copy.raw.kind != CK_COPY_CLEAR
        if crossed and copy.raw.error == CU_OK and copy.raw.os_error == 0:
            if copy.raw.elided:
                self.elided += copy.raw.nbytes
            else:
                self.copied += copy.raw.nbytes
        if copy.lease is not None:
            copy.lease.unhold()
        if copy.file is not None:
            file, copy.file = copy.file, None
            file.release()
        if heard and not future.done():
            if copy.raw.error != CU_OK:
                future.set_exception(self.driver.failure(
                    copy.raw.error, copy.raw.call.decode(),
                    f"{copy.raw.nbytes} bytes of GPU {self.device} at {copy.raw.device:#x}"))
            elif copy.raw.os_error == CK_FILE_ENDED:
                future.set_exception(EOFError(
                    f"ends at byte {copy.raw.ended}, {copy.raw.offset + copy.raw.nbytes} were to be read"))
            elif copy.raw.os_error:
                future.set_exception(OSError(copy.raw.os_error, os.strerror(copy.raw.os_error)))
            elif copy.raw.check == CK_CHECK_NONE:
                future.set_result(None)
            else:
                future.set_result(Scan(copy.raw.crc, copy.raw.zero != 0))
        if heard and self.accepted == 0 and self.waiters:
            self.tell_idle()
        return 0

    # -- files -------------------------------------------------------------------------------------------

    def start_loads(self, size_t memory, *, int threads, int buffers, size_t copy_bytes, size_t part_bytes,
                    const int[::1] cpus):
        """Start the threads of `load`; blocking, from any thread.

        ``memory``: of pinned memory, buffers * copy_bytes, that stays until `stop_loads`.
        """
        cdef ck_loads_options options
        cdef ck_loads* loads = NULL
        cdef const char* call = NULL
        cdef int error
        if self.raw == NULL or self.loads != NULL:
            raise RuntimeError("the copy queue is closed, or loads files already")
        if not 1 <= threads <= CK_LOAD_THREADS_MAX or not 1 <= buffers <= CK_LOAD_BUFFERS_MAX:
            raise ValueError(f"{threads} threads, {buffers} buffers: out of range")
        options.cuda = &self.driver.raw
        options.context = <cu_context>self.context
        options.queue = self.raw
        options.stream = <cu_stream>self.stream
        options.threads = threads
        options.buffers = buffers
        options.copy_bytes = copy_bytes
        options.part_bytes = part_bytes
        options.memory = <unsigned char*>memory
        options.ncpus = <int>cpus.shape[0]
        options.cpus = &cpus[0] if options.ncpus else NULL
        with nogil:
            error = ck_loads_open(&loads, &options, &call)
        if error:
            raise self.refused(error, call.decode(), f"file loader of GPU {self.device}")
        self.loads = loads

    def stop_loads(self):
        """Finish what is under way, end the threads. Blocking; idempotent."""
        cdef ck_loads* loads = self.loads
        self.loads = NULL
        if loads != NULL:
            with nogil:
                ck_loads_close(loads)

    cdef object refused(self, int error, str call, str what):
        if error > 0:
            return self.driver.failure(error, call, what)
        return CkptpipeError(f"cannot start a {what}: {call}: {os.strerror(-error)}", cure=LIMITS)

    # -- the end -----------------------------------------------------------------------------------------

    cdef str noun(self):
        return "copy queue"

    cdef bint is_gone(self) noexcept:
        return self.raw == NULL

    cdef object last_work(self):
        return asyncio.to_thread(self.stop_loads) if self.loads != NULL else None  # it calls the driver

    cdef int stop(self) except -1:
        self.stop_loads()
        ck_copies_stop(self.raw)
        return 0

    cdef bint has_ended(self) noexcept:
        return ck_copies_ended(self.raw) != 0

    cdef int join(self) except -1:
        with nogil:
            ck_copies_join(self.raw)
        return 0

    cdef int free(self, bint forked) except -1:
        global live
        cdef ck_copies* queue = self.raw
        self.raw = NULL
        live -= 1
        if forked:
            ck_copies_abandon(queue)
        else:
            ck_copies_free(queue)
        return 0

    def __repr__(self):
        if self.raw == NULL:
            return "<CopyQueue closed>"
        return f"<CopyQueue GPU {self.device}, checksums by {self.checksum}, {self.accepted} in flight>"


def live_queues():
    """Queues that hold threads, streams and an eventfd in this process now."""
    return live


ck_crc32c_select(b"")
ck_copy_select(b"")
