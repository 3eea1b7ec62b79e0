from libc.stdint cimport int64_t, uint64_t

from ckptpipe.pyx.engine cimport Engine, Operation

cdef extern from "iothreads.h" nogil:
    enum:
        IO_READ
        IO_WRITE
        IO_FSYNC
        IO_FALLOCATE

    struct io_job:
        io_job* next
        int kind
        int fd
        int mode
        void* buf
        int64_t offset
        int64_t nbytes
        int64_t result
        uint64_t slot

    struct io_threads:
        pass

    io_threads* io_threads_open(unsigned limit, int eventfd, int* error)
    void io_threads_prepare(io_threads* pool, io_job* job)
    void io_threads_submit(io_threads* pool)
    io_job* io_threads_reap(io_threads* pool)
    unsigned io_threads_count(io_threads* pool)
    void io_threads_close(io_threads* pool)
    void io_threads_forget(io_threads* pool)


cdef class ThreadsEngine(Engine):
    cdef io_threads* pool
    cdef io_job* jobs  # one a slot
    cdef bint prepared

    cdef int start_in_thread(self, Operation op) except -1
    cdef int submit_to_threads(self) except -1
    cdef int reap_threads(self) except -1
