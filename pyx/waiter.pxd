"""For the staging ring: tasks that wait for a slot."""


cdef class Waiter:
    cdef object future
    cdef object loop
    cdef Py_ssize_t slot

    cdef bint give(self, Py_ssize_t slot) noexcept
    cdef Py_ssize_t take(self) noexcept
