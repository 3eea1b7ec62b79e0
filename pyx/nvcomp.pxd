"""nvCOMP's functions for other Cython modules."""

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, uint32_t


cdef extern from "nvcomp_api.h" nogil:
    ctypedef struct nv_properties:
        uint32_t version
        uint32_t cudart

    ctypedef struct nv_options:
        int32_t word[16]

    ctypedef struct nv_format:
        void* compress
        void* decompress

    ctypedef struct ck_format:
        const char* name
        const char* symbol
        size_t block
        size_t largest
        int levels
        int entropy_only
        nv_options compress

    ctypedef struct ck_nvcomp:
        nv_properties properties
        int simulated
        const char* (*status_string)(int) noexcept nogil
        nv_format format[8]

    const ck_format ck_formats[8]
    int CK_FORMATS
    int CK_NVCOMP_LOADED
    int CK_NVCOMP_NO_LIBRARY
    int CK_NVCOMP_OTHER_VERSION
    int CK_NVCOMP_NO_ENTRY
    int ck_nvcomp_load(ck_nvcomp* nvcomp, const char* path, char* detail, size_t room)


cdef class Nvcomp:
    cdef ck_nvcomp raw
    cdef readonly str path

    cdef str status_text(self, int status)
