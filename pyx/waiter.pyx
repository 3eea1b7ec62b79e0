"""A task that waits for a slot of a staging ring, on whichever loop it runs."""

from asyncio import _get_running_loop

cimport cython


@cython.final
cdef class Waiter:
    """``slot`` is set, and the waiter owns it, from the hand-over until it is taken; -1 otherwise."""

    def __cinit__(self):
        self.loop = _get_running_loop()
        self.future = self.loop.create_future()
        self.slot = -1

    def __call__(self):
        if not self.future.done():
            self.future.set_result(None)

    cdef bint give(self, Py_ssize_t slot) noexcept:
        """Hand the slot over and wake the task. False where nobody waits any more."""
        if self.future.done():  # cancelled, and not yet run again to say so
            return False
        self.slot = slot
        if self.loop is _get_running_loop():
            self()
            return True
        try:
            self.loop.call_soon_threadsafe(self)
        except RuntimeError:  # its loop is closed: nobody will run that task again
            self.slot = -1
            return False
        return True

    cdef Py_ssize_t take(self) noexcept:
        """The slot that was handed over, which is the caller's now; -1 where none was."""
        slot, self.slot = self.slot, -1
        return slot
