/* The simulated libnvcomp.so: the exported calls of the low-level API, the same eleven for each format. */
#define _GNU_SOURCE
#include "nvcomp.h"

/* Only the simulation exports it: that is how a program can tell. */
EXPORT int simnvcomp_version(void) { return 1; }

typedef struct { uint32_t version, cudart_version; } Properties;

EXPORT NvStatus nvcompGetProperties(Properties *properties) {
    if (!properties) return NV_INVALID_VALUE;
    *properties = (Properties){6000, 13040};
    return NV_SUCCESS;
}

EXPORT const char *nvcompGetStatusString(NvStatus status) {
    switch (status) {
    case NV_SUCCESS: return "success (simulated nvCOMP)";
    case NV_INVALID_VALUE: return "invalid value (simulated nvCOMP)";
    case NV_NOT_SUPPORTED: return "not supported (simulated nvCOMP)";
    case NV_CANNOT_DECOMPRESS: return "the data cannot be decompressed (simulated nvCOMP)";
    case NV_OUTPUT_TOO_SMALL: return "the output buffer is too small (simulated nvCOMP)";
    case NV_ALIGNMENT: return "a buffer is not aligned (simulated nvCOMP)";
    case NV_CHUNK_TOO_LARGE: return "a chunk is too large (simulated nvCOMP)";
    case NV_CANNOT_COMPRESS: return "the data cannot be compressed (simulated nvCOMP)";
    case NV_WRONG_INPUT_LENGTH: return "wrong input length (simulated nvCOMP)";
    case NV_CUDA_ERROR: return "CUDA error (simulated nvCOMP)";
    case NV_INTERNAL: return "internal error (simulated nvCOMP)";
    }
    return "unknown status (simulated nvCOMP)";
}

static NvStatus alignments(const NvCodec *codec, int compress, const NvOptions *options, NvAlignments *out) {
    if (!out) return NV_INVALID_VALUE;
    NvStatus status = compress ? codec->compress_options(options) : codec->decompress_options(options);
    if (status != NV_SUCCESS) *out = (NvAlignments){0, 0, 0};
    else *out = compress ? codec->compress : codec->decompress;
    return status;
}

static NvStatus bound(const NvCodec *codec, size_t n, const NvOptions *options, size_t *out) {
    NvStatus status = codec->compress_options(options);
    if (!out) return NV_INVALID_VALUE;
    if (status == NV_SUCCESS && n > codec->longest) status = NV_CHUNK_TOO_LARGE;
    if (status == NV_SUCCESS) *out = codec->bound(n, options);
    return status;
}

static NvStatus temp(const NvCodec *codec, int compress, size_t chunks, size_t n, const NvOptions *options,
                     size_t *out) {
    NvStatus status = compress ? codec->compress_options(options) : codec->decompress_options(options);
    if (!out) return NV_INVALID_VALUE;
    if (status == NV_SUCCESS) *out = (compress ? codec->compress_temp : codec->decompress_temp)(chunks, n, options);
    return status;
}

static NvStatus compress(NvBatch *batch, CUstream stream) {
    NvStatus status = batch->codec->compress_options(&batch->options);
    if (status != NV_SUCCESS) return status;
    if (batch->longest > batch->codec->longest) return NV_CHUNK_TOO_LARGE;
    if (!batch->codec->compress_chunk) return NV_NOT_SUPPORTED;
    batch->temp_needed = batch->codec->compress_temp(batch->chunks, batch->longest, &batch->options);
    return batch_enqueue(batch, stream);
}

static NvStatus decompress(NvBatch *batch, CUstream stream) {
    NvStatus status = batch->codec->decompress_options(&batch->options);
    if (status != NV_SUCCESS) return status;
    if (!batch->codec->decompress_chunk) return NV_NOT_SUPPORTED;
    if (batch->options.word[0] == BACKEND_HARDWARE) {
        int mask, longest, wanted = batch->codec == &nv_deflate ? 1 : batch->codec == &nv_snappy ? 2 : 4;
        status = engine_of(stream, &mask, &longest);
        if (status != NV_SUCCESS) return status;
        if (!(mask & wanted)) return NV_CANNOT_DECOMPRESS; /* as on a GPU without an engine */
        batch->oversized = longest;
    }
    return batch_enqueue(batch, stream);
}

#define U(pointer) (uint64_t)(uintptr_t)(pointer)
#define P const void *const *
#define S const size_t *
#define FORMAT(Name, FMT)                                                                                             \
    EXPORT NvStatus nvcompBatched##Name##CompressGetRequiredAlignments(NvOptions o, NvAlignments *out) {              \
        return alignments(&FMT, 1, &o, out);                                                                          \
    }                                                                                                                 \
    EXPORT NvStatus nvcompBatched##Name##CompressGetTempSize(size_t chunks, size_t n, NvOptions o, size_t *out,       \
                                                             size_t total, CUstream s) {                              \
        (void)total, (void)s;                                                                                         \
        return temp(&FMT, 1, chunks, n, &o, out);                                                                     \
    }                                                                                                                 \
    EXPORT NvStatus nvcompBatched##Name##CompressGetTempSizeSync(P in, S bytes, size_t chunks, size_t n, NvOptions o, \
                                                                 size_t *out, size_t total, CUstream s) {             \
        (void)in, (void)bytes, (void)total, (void)s;                                                                  \
        return temp(&FMT, 1, chunks, n, &o, out);                                                                     \
    }                                                                                                                 \
    EXPORT NvStatus nvcompBatched##Name##CompressGetMaxOutputChunkSize(size_t n, NvOptions o, size_t *out) {          \
        return bound(&FMT, n, &o, out);                                                                               \
    }                                                                                                                 \
    EXPORT NvStatus nvcompBatched##Name##CompressAsync(P in, S bytes, size_t n, size_t chunks, void *t, size_t tn,    \
                                                       void *const *out, size_t *sizes, NvOptions o,                  \
                                                       NvStatus *statuses, CUstream s) {                              \
        NvBatch batch = {.codec = &FMT, .call = __func__, .kind = BATCH_COMPRESS, .options = o, .chunks = chunks,     \
                         .longest = n, .inputs = U(in), .input_bytes = U(bytes), .outputs = U(out),                   \
                         .output_bytes = U(sizes), .statuses = U(statuses), .temp = U(t), .temp_bytes = tn};          \
        return compress(&batch, s);                                                                                   \
    }                                                                                                                 \
    EXPORT NvStatus nvcompBatched##Name##DecompressGetRequiredAlignments(NvOptions o, NvAlignments *out) {            \
        return alignments(&FMT, 0, &o, out);                                                                          \
    }                                                                                                                 \
    EXPORT NvStatus nvcompBatched##Name##DecompressGetTempSize(size_t chunks, size_t n, NvOptions o, size_t *out,     \
                                                               size_t total, CUstream s) {                            \
        (void)total, (void)s;                                                                                         \
        return temp(&FMT, 0, chunks, n, &o, out);                                                                     \
    }                                                                                                                 \
    EXPORT NvStatus nvcompBatched##Name##DecompressGetTempSizeSync(P in, S bytes, size_t chunks, size_t n,            \
                                                                   size_t *out, size_t total, NvOptions o,            \
                                                                   NvStatus *statuses, CUstream s) {                  \
        (void)in, (void)bytes, (void)total, (void)s, (void)statuses;                                                  \
        return temp(&FMT, 0, chunks, n, &o, out);                                                                     \
    }                                                                                                                 \
    EXPORT NvStatus nvcompBatched##Name##GetDecompressSizeAsync(P in, S bytes, size_t *sizes, size_t chunks,          \
                                                                CUstream s) {                                         \
        if (!FMT.size_of) return NV_NOT_SUPPORTED;                                                                    \
        NvBatch batch = {.codec = &FMT, .call = __func__, .kind = BATCH_SIZES, .chunks = chunks, .inputs = U(in),     \
                         .input_bytes = U(bytes), .output_bytes = U(sizes)};                                          \
        return batch_enqueue(&batch, s);                                                                              \
    }                                                                                                                 \
    EXPORT NvStatus nvcompBatched##Name##DecompressAsync(P in, S bytes, S room, size_t *sizes, size_t chunks,         \
                                                         void *const t, size_t tn, void *const *out, NvOptions o,     \
                                                         NvStatus *statuses, CUstream s) {                            \
        NvBatch batch = {.codec = &FMT, .call = __func__, .kind = BATCH_DECOMPRESS, .options = o,                     \
                         .chunks = chunks, .inputs = U(in), .input_bytes = U(bytes), .outputs = U(out),               \
                         .output_room = U(room), .output_bytes = U(sizes), .statuses = U(statuses), .temp = U(t),     \
                         .temp_bytes = tn};                                                                           \
        return decompress(&batch, s);                                                                                 \
    }

FORMAT(Deflate, nv_deflate)
FORMAT(ANS, nv_ans)
FORMAT(Gdeflate, nv_gdeflate)
FORMAT(LZ4, nv_lz4)
FORMAT(Snappy, nv_snappy)
FORMAT(Bitcomp, nv_bitcomp)
FORMAT(Zstd, nv_zstd)
FORMAT(Gzip, nv_gzip)
FORMAT(Cascaded, nv_cascaded)
