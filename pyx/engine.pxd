"""Operations and the part of an engine that does not depend on how the kernel is asked."""

from libc.stdint cimport int64_t

from ckptpipe.pyx.staging cimport Lease


cdef enum Kind:
    READ
    WRITE
    FSYNC
    FALLOCATE


cdef enum State:
    QUEUED  # waits in the engine for a slot
    RUNNING  # has a slot; the kernel or a thread may touch its memory
    SETTLED


cdef class Operation:
    cdef Engine engine
    cdef Lease lease  # None for fsync and fallocate
    cdef object future
    cdef object path
    cdef int kind, state, fd, mode, slot
    cdef bint direct  # the descriptor was opened with O_DIRECT
    cdef bint polling  # io_uring: waits for readiness after EAGAIN
    cdef bint rerouted  # the usual way was not ready for it: libaio uses a thread, io_uring a kernel worker
    cdef unsigned char* base
    cdef int64_t offset, total
    cdef int64_t done  # bytes known to be transferred
    cdef int64_t position  # where the transfer starts; under `done` when a direct read re-reads a block

    cdef int64_t file_offset(self) noexcept
    cdef int64_t size(self) noexcept


cdef class Engine:
    cdef readonly str name
    cdef readonly str requested
    cdef readonly str why
    cdef readonly list notes
    cdef readonly int depth
    cdef public int64_t _limit_transfer
    cdef int eventfd
    cdef int pid
    cdef unsigned long thread
    cdef object loop
    cdef object queue
    cdef list slots
    cdef list unused
    cdef dict busy
    cdef list waiters
    cdef int64_t accepted
    cdef public double patience  # seconds without any answer after which waiting ends
    cdef double moved  # loop's time of the last call or answer
    cdef bint flush_scheduled, retry_scheduled, closing, closed

    # What an engine is: four calls.
    cdef int start(self, Operation op) except -1  # prepare the transfer at op.position
    cdef int submit(self) except -1  # hand over what was prepared
    cdef int reap(self) except -1  # call `finished` for all that is done
    cdef int shut(self) except -1  # free what the engine made; nothing is in flight

    cdef int attach(self) except -1
    cdef int finished(self, Operation op, int64_t result) except -1
    cdef int again(self, Operation op) except -1  # a descriptor was not ready (EAGAIN)
    cdef int flush(self) except -1
    cdef int clear_eventfd(self) except -1
    cdef int retry_later(self) except -1
    cdef int transferred(self, Operation op, int64_t count) except -1
    cdef int fail(self, Operation op, int number, str cure) except -1
    cdef int settle(self, Operation op, object error) except -1
    cdef int check_owner(self) except -1
    cdef Operation prepare(self, int kind, int fd, object path)
    cdef object enqueue(self, Operation op)
    cdef object transfer(self, int kind, int fd, Lease lease, int64_t nbytes, int64_t offset, object path)
    cdef int release(self) except -1
