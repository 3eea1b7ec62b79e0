"""Plans and chunks in flight, as the lanes of a device codec read them."""

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t

from ckptpipe.pyx.cuda_driver cimport Driver, cu_address, cu_result
from ckptpipe.pyx.nvcomp cimport Nvcomp, nv_options
from ckptpipe.pyx.staging cimport Lease


cdef extern from "device_codec.h" nogil:
    int CK_JOB_ENCODE
    int CK_JOB_DECODE
    int CK_DECODER_ENGINE
    int CK_DECODER_NVCOMP
    int CK_FAIL_NONE
    int CK_FAIL_DRIVER
    int CK_FAIL_NVCOMP
    int CK_FAIL_STORED
    int CK_FAIL_BLOCK
    int CK_FAIL_SCRATCH
    int CK_FAIL_DECODER

    ctypedef struct ck_plan:
        int format
        int level
        int transform
        int planes
        uint32_t block_bytes
        nv_options options
        double tried_below
        uint32_t wave
        size_t slot
        size_t need

    ctypedef struct ck_plane:
        int format
        int level
        uint32_t block_bytes
        uint32_t raw
        uint32_t stored
        uint32_t first
        uint32_t blocks

    ctypedef struct ck_codec_job:
        ck_codec_job* next
        void* token
        int kind
        const ck_plan* plan
        cu_address device
        unsigned char* host
        cu_address loaded
        uint32_t raw
        uint32_t stored
        uint32_t raw_crc
        uint32_t stored_crc
        uint32_t expected_crc
        int zero
        int transform
        int planes
        ck_plane plane[4]
        uint32_t* lengths
        int decoder
        int failure
        int format
        cu_result error
        const char* call
        uint32_t at_plane
        uint32_t at_block
        uint32_t found
        uint32_t wanted
        uint64_t need

    uint32_t ck_plan_blocks(const ck_plan* plan, uint32_t raw)
    void ck_codec_cancel(ck_codec_job* job)


cdef class Plan:
    cdef ck_plan raw


cdef class Job:
    cdef ck_codec_job raw
    cdef Lease lease
    cdef Plan plan  # keeps raw.plan alive
    cdef object future
    cdef bint flying


cdef Plan new_plan(object plan, bint odd)
cdef Job encoding(Plan plan, Lease lease, Py_ssize_t nbytes, size_t device_address)
cdef Job decoding(Lease lease, size_t loaded, Py_ssize_t stored_bytes, uint32_t stored_crc32c,
                  Py_ssize_t raw_bytes, int transform, tuple planes, size_t device_address)
cdef object encoded_of(const ck_codec_job* job)
cdef object failure_of(Job job, Driver driver, Nvcomp nvcomp, int device, object scratch_bytes, int lanes)
cdef object nvcomp_failure(Nvcomp nvcomp, int number, str call, int status, str detail=*)
