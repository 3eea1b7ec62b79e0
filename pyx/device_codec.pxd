from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t

from ckptpipe.pyx.codec_job cimport Job, Plan, ck_codec_job, ck_plan
from ckptpipe.pyx.cuda_driver cimport Driver, ck_cuda, cu_context, cu_stream
from ckptpipe.pyx.loop_work cimport LoopWork
from ckptpipe.pyx.nvcomp cimport Nvcomp, ck_nvcomp


cdef extern from "device_codec.h" nogil:
    int CK_LINKS

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
        int links
        int engine_mask
        uint32_t engine_longest
        int engine_forced

    int ck_codec_open(ck_codec** codec, const ck_codec_options* options, const char** call)
    int ck_codec_eventfd(const ck_codec* codec)
    int ck_codec_engine_memory(const ck_codec* codec)
    int ck_plan_measure(const ck_codec* codec, ck_plan* plan, int* error, const char** call)
    void ck_codec_submit(ck_codec* codec, ck_codec_job* job)
    ck_codec_job* ck_codec_reap(ck_codec* codec)
    int ck_codec_running(ck_codec* codec)
    uint64_t ck_codec_batches(ck_codec* codec)
    void ck_codec_stop(ck_codec* codec)
    int ck_codec_ended(ck_codec* codec)
    void ck_codec_join(ck_codec* codec)
    void ck_codec_free(ck_codec* codec)
    void ck_codec_abandon(ck_codec* codec)


cdef class DeviceCodec(LoopWork):
    cdef ck_codec* raw
    cdef Driver driver
    cdef Nvcomp nvcomp
    cdef readonly str backend  # of encode: "nvcomp-cuda", "" where there is no nvCOMP
    cdef readonly str decoder  # of deflate: "decompression-engine", "nvcomp-cuda" or ""
    cdef readonly str why  # why that is not the decompression engine, "" where it is
    cdef readonly tuple encodes  # ids of the codecs that it writes
    cdef readonly tuple decodes  # and that it reads
    cdef readonly Py_ssize_t scratch_bytes
    cdef readonly Py_ssize_t chunk_bytes
    cdef readonly int lanes
    cdef readonly int links
    cdef readonly Py_ssize_t encoded  # raw bytes that were encoded
    cdef readonly Py_ssize_t fetched  # bytes that crossed the link for them
    cdef size_t context
    cdef Py_ssize_t by_engine
    cdef Py_ssize_t by_nvcomp
    cdef dict plans

    cdef Plan plan_of(self, object plan, bint odd)
    cdef Plan measured(self, object plan, bint odd)
    cdef object submit(self, Job job)
    cdef int settle(self, Job job) except -1
