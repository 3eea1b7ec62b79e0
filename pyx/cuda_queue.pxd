from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t

from ckptpipe.pyx.cuda_driver cimport Driver, ck_cuda, cu_address, cu_context, cu_result, cu_stream
from ckptpipe.pyx.loop_work cimport LoopWork
from ckptpipe.pyx.staging cimport Lease


cdef extern from "workers.h" nogil:
    ctypedef struct ck_job:
        ck_job* next
        void* token
        int kind
        uint32_t crc
        int zero

    int CK_JOB_PASS


cdef extern from "cuda_queue.h" nogil:
    int CK_COPY_DOWN
    int CK_COPY_UP
    int CK_COPY_SCAN
    int CK_COPY_LOAD
    int CK_COPY_CLEAR
    int CK_CHECK_NONE
    int CK_CHECK_DEVICE
    int CK_CHECK_HOST

    ctypedef struct ck_transfer:
        ck_transfer* next
        ck_job job
        void* token
        int kind
        int check
        int elide
        cu_address device
        unsigned char* host
        size_t nbytes
        cu_result error
        const char* call
        uint32_t crc
        int zero
        int elided
        int descriptor
        uint64_t offset
        int os_error
        uint64_t ended

    int CK_FILE_ENDED

    ctypedef struct ck_copies:
        pass

    ctypedef struct ck_copies_options:
        const ck_cuda* cuda
        cu_context context
        cu_stream stream
        int depth
        const void* image
        int host_threads

    int ck_copies_open(ck_copies** queue, const ck_copies_options* options, const char** call)
    int ck_copies_eventfd(const ck_copies* queue)
    int ck_copies_host_eventfd(const ck_copies* queue)
    void ck_copies_submit(ck_copies* queue, ck_transfer* copy)
    void ck_copies_cancel(ck_transfer* copy)
    ck_transfer* ck_copies_reap(ck_copies* queue)
    ck_job* ck_copies_reap_host(ck_copies* queue)
    int ck_copies_running(ck_copies* queue)
    void ck_copies_stop(ck_copies* queue)
    int ck_copies_ended(ck_copies* queue)
    void ck_copies_join(ck_copies* queue)
    void ck_copies_free(ck_copies* queue)
    void ck_copies_abandon(ck_copies* queue)


cdef extern from "cuda_load.h" nogil:
    int CK_LOAD_THREADS_MAX
    int CK_LOAD_BUFFERS_MAX

    ctypedef struct ck_loads:
        pass

    ctypedef struct ck_loads_options:
        const ck_cuda* cuda
        cu_context context
        ck_copies* queue
        cu_stream stream
        int threads
        int buffers
        size_t copy_bytes
        size_t part_bytes
        unsigned char* memory
        const int* cpus
        int ncpus

    int ck_loads_open(ck_loads** loads, const ck_loads_options* options, const char** call)
    void ck_loads_submit(ck_loads* loads, ck_transfer* copy)
    void ck_loads_close(ck_loads* loads)


cdef class Copy:
    cdef ck_transfer raw
    cdef Lease lease
    cdef object file
    cdef object future
    cdef bint flying


cdef class CopyQueue(LoopWork):
    cdef ck_copies* raw
    cdef ck_loads* loads
    cdef size_t context
    cdef size_t stream
    cdef Driver driver
    cdef readonly int depth
    cdef readonly str requested  # "device" or "host"
    cdef readonly str checksum  # what runs
    cdef readonly str why  # why that is less than what was requested, "" when it is not
    cdef readonly bint elide_zeros
    cdef readonly Py_ssize_t copied  # bytes that crossed the link
    cdef readonly Py_ssize_t elided  # bytes that did not have to: all zero
    cdef int check

    cdef int open(self, size_t context, size_t stream, bytes image, int host_threads) except -1
    cdef Copy make(self, int kind, int check, size_t device_address, Py_ssize_t nbytes)
    cdef object fly(self, Copy copy)
    cdef object refused(self, int error, str call, str what)
    cdef object begin(self, int kind, int check, Lease lease, size_t device_address, Py_ssize_t nbytes)
    cdef int settle(self, Copy copy) except -1
