from libc.stdint cimport uint32_t, uint64_t

from ckptpipe.pyx.staging cimport Lease


cdef extern from "workers.h" nogil:
    int CK_JOB_CRC
    int CK_JOB_PASS
    int CK_JOB_READ
    int CK_JOB_FILE
    int CK_JOB_SCAN_FILE

    ctypedef struct ck_job:
        ck_job* next
        void* token
        int kind
        int pid
        int fd
        int huge
        size_t part
        uint32_t crc
        int zero
        int error
        uint64_t fault

    ctypedef struct ck_pool:
        pass

    int ck_pool_open(ck_pool** pool, int threads, const int* cpus, int ncpus)
    int ck_pool_open_idle(ck_pool** pool, int threads, const int* cpus, int ncpus)
    int ck_pool_eventfd(const ck_pool* pool)
    void ck_pool_submit(ck_pool* pool, ck_job* job, unsigned char* destination, const unsigned char* source,
                        size_t nbytes)
    ck_job* ck_pool_reap(ck_pool* pool)
    double ck_pool_cpu_seconds(ck_pool* pool)
    void ck_pool_join(ck_pool* pool)
    void ck_pool_free(ck_pool* pool)
    void ck_pool_abandon(ck_pool* pool)
    void ck_job_run(ck_job* job, unsigned char* destination, const unsigned char* source, size_t nbytes)


cdef class Job:
    cdef ck_job raw
    cdef Lease destination
    cdef Lease source
    cdef object file
    cdef object future

    cdef object result(self)
    cdef object failure(self)
    cdef void let_go(self) noexcept


cdef class WorkerPool:
    cdef ck_pool* pool
    cdef object loop
    cdef object drained
    cdef bint closing
    cdef int nthreads
    cdef int eventfd
    cdef Py_ssize_t running
    cdef Py_ssize_t finished
    cdef double spent
    cdef long owner_pid

    cdef int check_open(self) except -1
    cdef object submit(self, int kind, Lease destination, Lease source, Py_ssize_t nbytes, bint huge=*)
    cdef object post_file(self, Job job, object file, unsigned char* to, uint64_t offset, Py_ssize_t nbytes)
    cdef object post(self, Job job, unsigned char* to, uint64_t source, Py_ssize_t nbytes)
    cdef int reap(self) except -1
    cdef void stop(self) noexcept
