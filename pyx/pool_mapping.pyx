"""A shared mapping of a launched process's pool, aligned so that its huge pages are mapped as such."""

from libc.errno cimport errno
from libc.stdint cimport uint64_t, uintptr_t

from ckptpipe.pyx.errors import io_error

cdef extern from "sys/mman.h" nogil:
    int PROT_NONE
    int PROT_READ
    int PROT_WRITE
    int MAP_SHARED
    int MAP_PRIVATE
    int MAP_ANONYMOUS
    int MAP_NORESERVE
    int MAP_FIXED
    void* MAP_FAILED
    void* mmap(void* address, size_t nbytes, int protection, int flags, int fd, long offset)
    int munmap(void* address, size_t nbytes)

cdef size_t HUGE = 2 << 20


cdef class PoolMapping:
    """Maps the first ``nbytes`` of ``fd``, which stays the caller's. Closed by its owner, once unused."""

    cdef char* base
    cdef size_t nbytes

    def __cinit__(self, int fd, size_t nbytes, *, bint writable=False):
        self.base = NULL
        cdef size_t room = nbytes + HUGE
        cdef int protection = PROT_READ | (PROT_WRITE if writable else 0)
        cdef char* space
        cdef char* aligned
        cdef void* mapped
        if nbytes == 0:
            raise ValueError("nothing to map")
        with nogil:
            space = <char*>mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        if space == <char*>MAP_FAILED:
            raise io_error(errno, "mmap", "pool")
        aligned = <char*>((<uintptr_t>space + HUGE - 1) & ~<uintptr_t>(HUGE - 1))
        with nogil:
            mapped = mmap(aligned, nbytes, protection, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, 0)
        if mapped == MAP_FAILED:
            number = errno
            munmap(space, room)
            raise io_error(number, "mmap", "pool")
        # The ends of the reservation. The mapping's own end is rounded up to a page by the kernel.
        cdef char* end = <char*>((<uintptr_t>aligned + nbytes + 4095) & ~<uintptr_t>4095)
        if aligned > space:
            munmap(space, aligned - space)
        if space + room > end:
            munmap(end, space + room - end)
        self.base = aligned
        self.nbytes = nbytes

    def __dealloc__(self):
        self.close()

    @property
    def address(self):
        return <uint64_t><uintptr_t>self.base

    cpdef void close(self):
        """Idempotent. Not while anything of it is lent."""
        if self.base != NULL:
            with nogil:
                munmap(self.base, self.nbytes)
            self.base = NULL
