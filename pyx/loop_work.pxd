"""For queues whose threads report to one event loop: the copy queue and the device codec."""


cdef class LoopWork:
    cdef object loop
    cdef list waiters
    cdef object ended  # a future of the end of the threads, once that was asked for
    cdef bint closing
    cdef int eventfd
    cdef Py_ssize_t accepted  # operations that have not been answered
    cdef long owner_pid
    cdef unsigned long thread

    cdef int belong(self) except -1
    cdef int check_usable(self) except -1
    cdef int tell_idle(self) except -1
    cdef int tell_ended(self) except -1
    # of the subclass
    cdef str noun(self)
    cdef bint is_gone(self) noexcept
    cdef object last_work(self)
    cdef int stop(self) except -1
