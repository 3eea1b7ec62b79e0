"""For queues of a GPU whose threads report to one event loop: the copy queue and the device codec."""


cdef class LoopWork:
    cdef object loop
    cdef list waiters
    cdef object ended  # a future of the end of the threads, once that was asked for
    cdef bint closing
    cdef list watched  # eventfds that the loop listens to
    cdef readonly int device
    cdef Py_ssize_t accepted  # operations that have not been answered
    cdef long owner_pid
    cdef unsigned long thread

    cdef int belong(self) except -1
    cdef int watch(self, int eventfd) except -1
    cdef int check_usable(self) except -1
    cdef int tell_idle(self) except -1
    cdef int finish(self) except -1
    cdef int stop_now(self) except -1
    # of the subclass
    cdef str noun(self)
    cdef bint is_gone(self) noexcept
    cdef object last_work(self)
    cdef int stop(self) except -1
    cdef bint has_ended(self) noexcept
    cdef int join(self) except -1
    cdef int reap(self) except -1
    cdef int free(self, bint forked) except -1
