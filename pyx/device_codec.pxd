from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t

from ckptpipe.pyx.cuda_driver cimport Driver, ck_cuda, cu_address, cu_context, cu_result, cu_stream
from ckptpipe.pyx.nvcomp cimport Nvcomp, ck_nvcomp, nv_options
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
        cu_result error
        const char* call
        uint32_t at_plane
        uint32_t at_block
        uint32_t found
        uint32_t wanted
        uint64_t need

    ctypedef struct ck_codec:
        pass

    ctypedef struct ck_codec_options:
        const ck_cuda* cuda
        const ck_nvcomp* nvcomp
        cu_context context
        cu_stream stream
        const void* image
        uint64_t scratch_bytes
        uint32_t chunk_bytes
        int lanes
        int engine_mask
        uint32_t engine_longest
        int engine_forced

    int ck_codec_open(ck_codec** codec, const ck_codec_options* options, const char** call)
    int ck_codec_eventfd(const ck_codec* codec)
    int ck_codec_engine_memory(const ck_codec* codec)
    int ck_plan_measure(const ck_codec* codec, ck_plan* plan, int* error, const char** call)
    uint32_t ck_plan_blocks(const ck_plan* plan, uint32_t raw)
    void ck_codec_submit(ck_codec* codec, ck_codec_job* job)
    void ck_codec_cancel(ck_codec_job* job)
    ck_codec_job* ck_codec_reap(ck_codec* codec)
    int ck_codec_running(ck_codec* codec)
    void ck_codec_stop(ck_codec* codec)
    int ck_codec_ended(ck_codec* codec)
    void ck_codec_join(ck_codec* codec)
    void ck_codec_free(ck_codec* codec)
    void ck_codec_abandon(ck_codec* codec)


cdef class Plan:
    cdef ck_plan raw


cdef class Job:
    cdef ck_codec_job raw
    cdef Lease lease
    cdef Plan plan  # keeps raw.plan alive
    cdef object future
    cdef bint flying


cdef class DeviceCodec:
    cdef ck_codec* raw
    cdef Driver driver
    cdef Nvcomp nvcomp
    cdef readonly int device
    cdef readonly str backend  # of encode: "nvcomp-cuda", "" where there is no nvCOMP
    cdef readonly str decoder  # of deflate: "decompression-engine", "nvcomp-cuda" or ""
    cdef readonly str why  # why that is not the decompression engine, "" where it is
    cdef readonly tuple encodes  # ids of the codecs that it writes
    cdef readonly tuple decodes  # and that it reads
    cdef readonly Py_ssize_t scratch_bytes
    cdef readonly Py_ssize_t chunk_bytes
    cdef readonly int lanes
    cdef readonly Py_ssize_t encoded  # raw bytes that were encoded
    cdef readonly Py_ssize_t fetched  # bytes that crossed the link for them
    cdef size_t context
    cdef Py_ssize_t by_engine
    cdef Py_ssize_t by_nvcomp
    cdef dict plans
    cdef object loop
    cdef list waiters
    cdef object ended
    cdef bint closing
    cdef int eventfd
    cdef Py_ssize_t accepted
    cdef long owner_pid
    cdef unsigned long thread

    cdef int check_usable(self) except -1
    cdef Plan plan_of(self, object plan, bint odd)
    cdef Plan measured(self, object plan, bint odd)
    cdef int submit(self, Job job) except -1
    cdef int reap(self) except -1
    cdef int settle(self, Job job) except -1
    cdef object failure_of(self, Job job)
    cdef int finish(self) except -1
