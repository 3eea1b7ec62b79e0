from libc.stdint cimport int64_t, uint64_t

from ckptpipe.pyx.engine cimport Operation
from ckptpipe.pyx.threads cimport ThreadsEngine

cdef extern from "aio.h" nogil:
    enum:
        AIO_READ
        AIO_WRITE

    struct aio_cb:
        uint64_t data

    struct aio_event:
        uint64_t data
        int64_t res

    int aio_open(unsigned depth, unsigned long* context)
    int aio_close(unsigned long context)
    void aio_prepare(
        aio_cb* cb, int opcode, int fd, void* buf, size_t nbytes, int64_t offset, uint64_t data, int eventfd
    )
    int aio_submit(unsigned long context, long count, aio_cb** cbs)
    int aio_reap(unsigned long context, aio_event* events, long room)


cdef class LibaioEngine(ThreadsEngine):
    cdef unsigned long context
    cdef bint opened
    cdef aio_cb* cbs  # one a slot
    cdef aio_cb** batch
    cdef int batched
    cdef bint told  # a note says that buffered files go to threads

    cdef bint asynchronous(self, Operation op) noexcept
