"""The driver's entry points for other Cython modules: `table()` gives them, once loaded."""

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t


cdef extern from "cuda_driver.h" nogil:
    ctypedef int cu_result
    ctypedef uint64_t cu_address

    cdef struct cu_context_s:
        pass
    ctypedef cu_context_s* cu_context

    cdef struct cu_stream_s:
        pass
    ctypedef cu_stream_s* cu_stream

    ctypedef struct cu_custom_device:
        cu_address address
        uint64_t nbytes
        cu_stream stream

    ctypedef struct cu_custom_info:
        void* handle
        cu_custom_device* devices
        uint32_t count

    ctypedef struct cu_checkpoint_args:
        cu_custom_info** custom_out

    ctypedef struct cu_gpu_pair:
        unsigned char* src "from"
        unsigned char* dst "to"

    ctypedef struct cu_restore_args:
        cu_gpu_pair* pairs
        uint32_t pair_count
        cu_custom_info** custom_out

    int CU_OK
    int CU_HOST_PORTABLE
    int CU_COMPUTE_MAJOR
    int CU_COMPUTE_MINOR

    ctypedef struct ck_cuda:
        int version
        int simulated
        cu_result (*error_name)(cu_result, const char**) noexcept nogil
        cu_result (*error_string)(cu_result, const char**) noexcept nogil
        cu_result (*driver_version)(int*) noexcept nogil
        cu_result (*device_count)(int*) noexcept nogil
        cu_result (*device_attribute)(int*, int, int) noexcept nogil
        cu_result (*primary_state)(int, unsigned*, int*) noexcept nogil
        cu_result (*primary_retain)(cu_context*, int) noexcept nogil
        cu_result (*primary_release)(int) noexcept nogil
        cu_result (*context_push)(cu_context) noexcept nogil
        cu_result (*context_pop)(cu_context*) noexcept nogil
        cu_result (*context_current)(cu_context*) noexcept nogil
        cu_result (*host_register)(void*, size_t, unsigned) noexcept nogil
        cu_result (*host_unregister)(void*) noexcept nogil
        cu_result (*checkpoint)(int, cu_checkpoint_args*) noexcept nogil
        cu_result (*restore)(int, cu_restore_args*) noexcept nogil
        cu_result (*operation_complete)(void*) noexcept nogil

    int CK_CUDA_LOADED
    int CK_CUDA_NO_LIBRARY
    int CK_CUDA_TOO_OLD
    int CK_CUDA_NO_ENTRY
    int ck_cuda_load(ck_cuda* cuda, char* detail, size_t room)
    void* ck_cuda_find(const ck_cuda* cuda, const char* entry)


cdef class Driver:
    cdef ck_cuda raw

    cdef object failure(self, cu_result code, str call, str detail=*, str cure=*)


cdef Driver loaded()  # the driver, loaded when it was not; NoDriverError where there is none
