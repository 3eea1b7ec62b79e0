# kernels: ring
"""Engine over io_uring, by raw system calls."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.errno cimport EAGAIN, EBUSY, EINVAL, EMFILE, ENOMEM, ENOSYS, EOPNOTSUPP, EPERM
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc

from ckptpipe.pyx.engine cimport FALLOCATE, FSYNC, READ, Engine, Operation

import os

from ckptpipe.pyx.engine import set_up_error

cdef extern from "<poll.h>" nogil:
    const int POLLIN
    const int POLLOUT

cdef extern from "ring.h" nogil:
    enum:
        RING_OP_NOP
        RING_OP_FSYNC
        RING_OP_READ_FIXED
        RING_OP_WRITE_FIXED
        RING_OP_POLL_ADD
        RING_OP_FALLOCATE
        RING_OP_READ
        RING_OP_WRITE
        RING_SQE_ASYNC
        RING_FSYNC_DATASYNC
        RING_SETUP_COOP_TASKRUN
        RING_SETUP_SINGLE_ISSUER
        RING_SETUP_DEFER_TASKRUN

    struct ring_sqe:
        uint8_t opcode
        uint8_t flags
        int32_t fd
        uint64_t off
        uint64_t addr
        uint32_t len
        uint32_t op_flags
        uint64_t user_data
        uint16_t buf_index

    struct ring_cqe:
        uint64_t user_data
        int32_t res

    struct ring:
        int fd
        uint32_t setup_flags

    int ring_open(ring* r, unsigned entries, int deferred)
    void ring_close(ring* r)
    int ring_register_eventfd(ring* r, int eventfd)
    int ring_register_buffers(ring* r, const uintptr_t* bases, const size_t* lengths, unsigned count)
    int ring_probe(ring* r)
    ring_sqe* ring_next(ring* r)
    int ring_submit(ring* r)
    int ring_take_back(ring* r, uint64_t* user_data)
    int ring_run_deferred(ring* r)
    int ring_has_deferred(const ring* r)
    unsigned ring_reap(ring* r, ring_cqe* out, unsigned room)

cdef enum:
    EVENTS = 64  # taken out of the completion queue at once
    PIECES_MAX = 1024  # registered buffers of one ring; the limit of kernels before 5.13

cdef size_t PIECE_BYTES = 1 << 30  # the kernel's limit of one registered buffer
# A buffered transfer of cached data is a memcpy inside io_uring_enter. From this size on it is left to a
# kernel worker, so that the loop does not do it.
cdef int64_t INLINE_BYTES = 64 << 10


def _refused(number, call):
    reason, cure = "", "use the I/O engine auto, libaio or threads"
    if number == EPERM:
        reason = "a seccomp filter, as containers have, or kernel.io_uring_disabled"
        try:
            with open("/proc/sys/kernel/io_uring_disabled", "rb") as file:
                setting = file.read().strip().decode()
            if setting != "0":
                reason = f"seccomp or kernel.io_uring_disabled={setting}"
        except OSError:
            pass
        cure += ", or let this process use io_uring (seccomp profile, sysctl kernel.io_uring_disabled=0)"
    elif number == ENOSYS:
        reason = "the kernel has no io_uring"
    elif number == EOPNOTSUPP:
        reason = "io_uring of this kernel lacks read, write or fallocate: older than 5.6"
    elif number == ENOMEM:
        reason = "the memlock limit is too small"
        cure += ", or raise it (ulimit -l)"
    elif number == EMFILE:
        cure = "raise the limit of open files (ulimit -n)"
    return set_up_error(number, call, reason, cure)


cdef class UringEngine(Engine):
    """io_uring with READ, WRITE, FSYNC and FALLOCATE; fixed buffers for memory in ``buffers``.

    The ring has a submission entry and two completion entries for every slot, and a slot has one entry at
    a time, so neither queue can overflow.
    """

    cdef ring ring
    cdef bint opened, deferred
    cdef list exports  # memoryviews and rings whose memory is registered
    cdef unsigned pieces
    cdef uintptr_t* bases
    cdef size_t* lengths

    def __cinit__(self):
        self.ring.fd = -1
        self.exports = []

    def __init__(
        self,
        int depth,
        str requested="io_uring",
        str why="",
        *,
        buffers=(),
        bint denied=False,
        bint deferred=True,
    ):
        cdef int rc
        Engine.__init__(self, depth, requested, why)
        self.name = "io_uring"
        rc = -EPERM if denied else ring_open(&self.ring, depth, deferred)
        if rc < 0:
            raise _refused(-rc, "io_uring_setup")
        self.opened = True
        self.deferred = (self.ring.setup_flags & RING_SETUP_DEFER_TASKRUN) != 0
        rc = ring_probe(&self.ring)
        if rc == 0:
            rc = ring_register_eventfd(&self.ring, self.eventfd)
        if rc < 0:
            raise _refused(-rc, "io_uring_register")
        rc = self.try_out()
        if rc < 0:
            raise _refused(-rc, "io_uring_enter")
        self.register(buffers)
        self.attach()

    def __dealloc__(self):
        if self.opened:
            ring_close(&self.ring)
        free(self.bases)
        free(self.lengths)

    @property
    def registered_bytes(self):
        """Bytes of memory that the kernel keeps pinned for this engine."""
        cdef size_t total = 0
        for i in range(self.pieces):
            total += self.lengths[i]
        return total

    @property
    def mode(self):
        """How completions are run: "defer", "cooperative" or "interrupt"."""
        if self.deferred:
            return "defer"
        return "cooperative" if self.ring.setup_flags & RING_SETUP_COOP_TASKRUN else "interrupt"

    cdef int try_out(self) noexcept:
        """One NOP there and back: some sandboxes let a ring be made and then refuse to enter it."""
        cdef ring_cqe answer
        cdef ring_sqe* sqe = ring_next(&self.ring)
        cdef int rc
        if sqe == NULL:
            return -EINVAL
        sqe.opcode = RING_OP_NOP
        rc = ring_submit(&self.ring)
        if rc == 0:
            rc = ring_run_deferred(&self.ring)
        if rc < 0:
            return rc
        return answer.res if ring_reap(&self.ring, &answer, 1) == 1 else -EINVAL

    # -- registered buffers ------------------------------------------------------------------------------

    cdef int register(self, buffers) except -1:
        cdef size_t base, nbytes
        cdef Py_buffer view
        cdef list ranges = []
        cdef int rc
        for item in buffers:
            if hasattr(item, "address") and hasattr(item, "nbytes") and not isinstance(item, memoryview):
                ranges.append((item.address, item.nbytes))
                self.exports.append(item)
                continue
            try:
                export = memoryview(item)
            except TypeError:
                kind = type(item).__name__
                raise TypeError(f"buffers: {kind} is neither a staging ring nor a buffer") from None
            if export.readonly:
                export.release()
                self.notes.append("io_uring: a read-only buffer was not registered")
                continue
            PyObject_GetBuffer(export, &view, PyBUF_SIMPLE | PyBUF_WRITABLE)
            ranges.append((<size_t>view.buf, <size_t>view.len))
            PyBuffer_Release(&view)
            self.exports.append(export)
        cut = []
        for base, nbytes in ranges:
            while nbytes > 0:
                cut.append((base, min(nbytes, PIECE_BYTES)))
                base += min(nbytes, PIECE_BYTES)
                nbytes -= min(nbytes, PIECE_BYTES)
        if not cut:
            return 0
        if len(cut) > PIECES_MAX:
            self.notes.append(f"io_uring: only the first {PIECES_MAX} GiB of the buffers are registered")
            del cut[PIECES_MAX:]
        self.bases = <uintptr_t*>malloc(len(cut) * sizeof(uintptr_t))
        self.lengths = <size_t*>malloc(len(cut) * sizeof(size_t))
        if self.bases == NULL or self.lengths == NULL:
            raise MemoryError()
        for i, (base, nbytes) in enumerate(cut):
            self.bases[i] = base
            self.lengths[i] = nbytes
        cdef unsigned count = <unsigned>len(cut)
        with nogil:
            rc = ring_register_buffers(&self.ring, self.bases, self.lengths, count)
        if rc < 0:
            cause = "the memlock limit is too small" if rc == -ENOMEM else os.strerror(-rc)
            self.notes.append(f"io_uring: buffers not registered: {cause}")
            self.let_go()
            return 0
        self.pieces = count
        return 0

    cdef int let_go(self) except -1:
        for item in self.exports:
            if isinstance(item, memoryview):
                item.release()
        self.exports.clear()
        return 0

    cdef int piece_of(self, unsigned char* start, int64_t nbytes) noexcept:
        cdef uintptr_t first = <uintptr_t>start
        cdef unsigned i
        for i in range(self.pieces):
            if first >= self.bases[i] and first + <size_t>nbytes <= self.bases[i] + self.lengths[i]:
                return <int>i
        return -1

    # -- transfers ---------------------------------------------------------------------------------------

    cdef int start(self, Operation op) except -1:
        cdef ring_sqe* sqe = ring_next(&self.ring)
        if sqe == NULL:
            raise RuntimeError("io_uring: the submission queue is full")  # cannot be: see the class
        sqe.user_data = op.slot
        sqe.fd = op.fd
        if op.polling:
            sqe.opcode = RING_OP_POLL_ADD
            sqe.op_flags = POLLIN if op.kind == READ else POLLOUT
        elif op.kind == FSYNC:
            sqe.opcode = RING_OP_FSYNC
            sqe.op_flags = RING_FSYNC_DATASYNC if op.mode else 0
        elif op.kind == FALLOCATE:
            sqe.opcode = RING_OP_FALLOCATE
            sqe.off = <uint64_t>op.offset
            sqe.addr = <uint64_t>op.total
            sqe.len = <uint32_t>op.mode
        else:
            self.fill_transfer(op, sqe)
        return 0

    cdef void fill_transfer(self, Operation op, ring_sqe* sqe) noexcept:
        cdef int64_t nbytes = op.size()
        cdef int piece = self.piece_of(op.base + op.position, nbytes)
        if piece >= 0:
            sqe.opcode = RING_OP_READ_FIXED if op.kind == READ else RING_OP_WRITE_FIXED
            sqe.buf_index = <uint16_t>piece
        else:
            sqe.opcode = RING_OP_READ if op.kind == READ else RING_OP_WRITE
        if op.rerouted or (not op.direct and nbytes >= INLINE_BYTES):
            sqe.flags = RING_SQE_ASYNC
        sqe.off = <uint64_t>op.file_offset()
        sqe.addr = <uintptr_t>(op.base + op.position)
        sqe.len = <uint32_t>nbytes

    cdef int submit(self) except -1:
        cdef int rc
        cdef uint64_t slot
        cdef list lost
        with nogil:
            rc = ring_submit(&self.ring)
        if rc == 0:
            return 0
        if rc > 0 or rc == -EAGAIN or rc == -EBUSY or rc == -ENOMEM:
            return self.retry_later()
        # The kernel refuses the ring itself. Nobody else will answer these operations.
        lost = []
        while ring_take_back(&self.ring, &slot) == 1:
            lost.append(self.slots[slot])
        cure = "the kernel refuses io_uring_enter: use the I/O engine libaio or threads"
        for op in lost:
            self.fail(<Operation>op, -rc, cure)
        return 0

    cdef int reap(self) except -1:
        cdef ring_cqe[EVENTS] answers
        cdef unsigned i, n
        # DEFER_TASKRUN: the eventfd tells that completions wait; they are posted here, which signals it
        # again. So it is read afterwards, and a completion that came in between shows in the ring's flags.
        if self.deferred:
            ring_run_deferred(&self.ring)
        self.clear_eventfd()
        while True:
            n = ring_reap(&self.ring, answers, EVENTS)
            for i in range(n):
                self.answered(<Operation>self.slots[answers[i].user_data], answers[i].res)
            if n == 0:
                if not ring_has_deferred(&self.ring):
                    return 0
                if ring_run_deferred(&self.ring) < 0:
                    return self.retry_later()

    cdef int answered(self, Operation op, int32_t result) except -1:
        if op.polling:
            op.polling = False
            if result >= 0 and not op.future.cancelled():
                return self.start(op)
            result = min(result, -EAGAIN)
        return self.finished(op, result)

    cdef int again(self, Operation op) except -1:
        if op.offset >= 0 and not op.rerouted:
            op.rerouted = True  # a file that cannot be tried without blocking
        else:
            op.polling = True  # a non-blocking pipe or socket: wait until it is ready
        return self.start(op)

    cdef int shut(self) except -1:
        if self.opened:
            self.opened = False
            with nogil:
                ring_close(&self.ring)
        self.pieces = 0
        self.let_go()
        return 0
