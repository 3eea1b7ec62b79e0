"""Leases for other Cython modules.

An operation in flight keeps its range alive so: it calls one of the ``hold`` methods before the address goes
to a thread or the kernel, keeps a reference to the Lease object, and calls `unhold` exactly once when the
completion has been reaped. All with the GIL. `unhold` may wake a waiting task or call an ``on_release``.
"""

from ckptpipe.pyx.memory cimport Mapping


cdef class Region:
    """One memory range and the number of leases, views and operations that hold it."""

    cdef unsigned char* base
    cdef Py_ssize_t size
    cdef Py_ssize_t holds
    cdef Py_ssize_t slot  # -1 for a foreign range
    cdef bint readonly
    cdef StagingRing ring  # None for a foreign range
    cdef object owner
    cdef object on_release
    cdef Py_buffer view
    cdef bint viewed

    cdef void drop(self) noexcept
    cdef void finish(self) noexcept
    cdef void hand_back(self) noexcept


cdef class Lease:
    cdef unsigned char* ptr
    cdef Py_ssize_t length
    cdef Region region
    cdef bint live  # not yet released

    cdef int hold(self) except -1  # RuntimeError when released
    cdef int hold_source(self, Py_ssize_t nbytes) except -1  # and ValueError unless 0 <= nbytes <= length
    cdef int hold_destination(self, Py_ssize_t nbytes) except -1  # and ValueError when read-only
    cdef void unhold(self) noexcept


cdef class StagingRing:
    cdef Mapping mapping
    cdef unsigned char* base
    cdef Py_ssize_t count
    cdef Py_ssize_t each
    cdef Py_ssize_t* stack  # the free slots; the last returned goes out first, it is the warmest
    cdef Py_ssize_t nfree
    cdef Py_ssize_t touched  # slots from here on have not been used: their pages are not there yet
    cdef object toucher
    cdef object waiters
    cdef object __weakref__

    cdef Lease take(self, Py_ssize_t slot)
    cdef bint first_use(self, Lease lease) noexcept
    cdef void give_back(self, Py_ssize_t slot) noexcept
    cdef int _check_open(self) except -1
