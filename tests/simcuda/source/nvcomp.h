/* nvCOMP's low-level batched C API (6.0, from the declarations in its headers) as the simulation serves it. */
#ifndef SIMCUDA_NVCOMP_H
#define SIMCUDA_NVCOMP_H

#include "abi.h"

typedef int NvStatus;
enum {
    NV_SUCCESS = 0,
    NV_INVALID_VALUE = 10,
    NV_NOT_SUPPORTED = 11,
    NV_CANNOT_DECOMPRESS = 12,
    NV_OUTPUT_TOO_SMALL = 15,
    NV_ALIGNMENT = 17,
    NV_CHUNK_TOO_LARGE = 18,
    NV_CANNOT_COMPRESS = 19,
    NV_WRONG_INPUT_LENGTH = 20,
    NV_CUDA_ERROR = 1000,
    NV_INTERNAL = 10000,
};
enum { NV_CHAR = 0, NV_UCHAR = 1, NV_FLOAT8 = 9, NV_FLOAT16 = 10, NV_FLOAT32 = 11, NV_BITS = 0xff };
enum { BACKEND_DEFAULT = 0, BACKEND_HARDWARE = 1, BACKEND_CUDA = 2 };

/* Every format's options are 64 bytes, passed by value; what the first words mean is the format's. */
typedef union {
    int32_t word[16];
    uint64_t aligned[8];
} NvOptions;
_Static_assert(sizeof(NvOptions) == 64, "ABI");

typedef struct { size_t input, output, temp; } NvAlignments;

typedef struct NvCodec {
    const char *name;
    NvAlignments compress, decompress; /* all 0: compression that the simulation doesn't run */
    size_t longest;                    /* uncompressed chunk, in bytes */
    /* NV_SUCCESS, or what the library answers to these options. */
    NvStatus (*compress_options)(const NvOptions *options);
    NvStatus (*decompress_options)(const NvOptions *options);
    /* Bytes: the longest that a chunk of n can become, temporary memory of a batch. */
    size_t (*bound)(size_t n, const NvOptions *options);
    size_t (*compress_temp)(size_t chunks, size_t n, const NvOptions *options);
    size_t (*decompress_temp)(size_t chunks, size_t n, const NvOptions *options);
    /* One chunk, on the host. NULL: not simulated. The number of bytes written is right on success alone. */
    NvStatus (*compress_chunk)(const NvOptions *options, const unsigned char *in, size_t n, unsigned char *out,
                               size_t room, size_t *written);
    NvStatus (*decompress_chunk)(const NvOptions *options, const unsigned char *in, size_t n, unsigned char *out,
                                 size_t room, size_t *written);
    NvStatus (*size_of)(const unsigned char *in, size_t n, size_t *size); /* of the decompressed chunk */
} NvCodec;

extern const NvCodec nv_deflate, nv_ans, nv_gdeflate, nv_lz4, nv_snappy, nv_bitcomp, nv_zstd, nv_gzip, nv_cascaded;

/* nvcomp_batch.c: one call's arrays, all on the device. */
enum { BATCH_COMPRESS = 0, BATCH_DECOMPRESS, BATCH_SIZES };
typedef struct {
    const NvCodec *codec;
    const char *call;
    int kind;
    NvOptions options;
    size_t chunks, longest; /* longest: COMPRESS, as the caller says */
    uint64_t inputs, input_bytes, outputs, output_room, output_bytes, statuses, temp, temp_bytes, temp_needed;
    int oversized; /* bytes of the engine's longest buffer; 0: no engine is used */
} NvBatch;
NvStatus batch_enqueue(const NvBatch *batch, CUstream stream);
NvStatus engine_of(CUstream stream, int *mask, int *longest);

#endif
