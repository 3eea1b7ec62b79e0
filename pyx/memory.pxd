from libc.stdint cimport int64_t


cdef extern from "mapping.h":
    ctypedef struct ck_mapping:
        void* reserved
        size_t reserved_bytes
        unsigned char* address
        size_t nbytes

    int ck_mapping_open(ck_mapping* mapping, size_t nbytes, size_t align, int hugetlb) nogil
    int ck_mapping_close(ck_mapping* mapping) nogil
    int ck_prefault(unsigned char* address, size_t nbytes, size_t step, int threads) nogil
    int ck_bind_memory(unsigned char* address, size_t nbytes, int node, int strict) nogil
    int ck_current_node() nogil
    int64_t ck_huge_bytes(const unsigned char* address, size_t nbytes) nogil


cdef class Mapping:
    cdef ck_mapping raw
    cdef readonly Py_ssize_t nbytes
    cdef readonly str requested
    cdef readonly str huge_pages
    cdef readonly str why
    cdef readonly Py_ssize_t page_size
    cdef readonly Py_ssize_t huge_bytes
    cdef readonly object numa_node
    cdef readonly str numa_why
    cdef readonly bint locked
    cdef readonly Py_ssize_t exports
    cdef long owner_pid
    cdef bint counted
    cdef bint prefaulted
    cdef bint thp

    cdef unsigned char* pointer(self) noexcept
    cdef void _advise(self) noexcept
    cdef int _prefault(self, Py_ssize_t step, int threads) except -1
    cdef void _unmap(self) noexcept
