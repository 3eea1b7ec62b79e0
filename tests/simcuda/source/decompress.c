/* The decompression engine: cuMemBatchDecompressAsync (CUDA 12.8).
 *
 * What the call can see it answers, with the operation's index: an algorithm that the engine hasn't, memory that is not
 * decompress-capable. A buffer longer than the engine's longest, and what is wrong with the data, fail on the stream and
 * break the context. The batch is one unit of work; its operations are independent, and run in no promised order. */
#define _GNU_SOURCE
#include "sim.h"

#include "codecs.h"

#include <stdlib.h>
#include <string.h>

enum { ALGORITHM_DEFLATE = 1, ALGORITHM_SNAPPY = 2, ALGORITHM_LZ4 = 4 };
#define ADDRESS(pointer) (uint64_t)(uintptr_t)(pointer)

typedef struct {
    size_t count;
    uint64_t longest;
    CUmemDecompressParams operation[];
} Batch;

/* From an address to the end of its allocation: for operations that don't say how much comes out. */
static uint64_t room_at(uint64_t address, uint64_t most) {
    pthread_mutex_lock(&sim.mutex);
    const Segment *segment = segment_at(address);
    uint64_t skip = segment ? address - segment->address : 0;
    uint64_t room = segment && skip < segment->asked ? segment->asked - skip : 0;
    pthread_mutex_unlock(&sim.mutex);
    return room < most ? room : most;
}

static CUresult run_one(const Batch *batch, const CUmemDecompressParams *operation) {
    if (operation->srcNumBytes > batch->longest || operation->dstNumBytes > batch->longest) return CUDA_ERROR_LAUNCH_FAILED;
    uint64_t target = ADDRESS(operation->dst);
    uint64_t room = operation->dstNumBytes ? operation->dstNumBytes : room_at(target, batch->longest);
    if (device_write(target, NULL, room) != CUDA_SUCCESS || device_read(NULL, ADDRESS(operation->src), operation->srcNumBytes))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    unsigned char *in = malloc(operation->srcNumBytes + 1), *out = malloc(room + 1);
    CUresult result = in && out ? device_read(in, ADDRESS(operation->src), operation->srcNumBytes) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS) {
        size_t written = 0;
        Decoded (*decode)(const unsigned char *, size_t, unsigned char *, size_t, size_t *) =
            operation->algo == ALGORITHM_DEFLATE ? deflate_decode
            : operation->algo == ALGORITHM_LZ4   ? lz4_decode
                                                 : snappy_decode;
        Decoded decoded = decode(in, operation->srcNumBytes, out, room, &written);
        uint32_t actual = (uint32_t)written;
        result = device_write(target, out, written); /* what it made before it failed is there too */
        if (result == CUDA_SUCCESS && decoded != DECODED) result = CUDA_ERROR_LAUNCH_FAILED;
        if (result == CUDA_SUCCESS) result = device_write(ADDRESS(operation->dstActBytes), &actual, sizeof actual);
    }
    free(in);
    free(out);
    return result;
}

CUresult decompress_run(const void *memory) {
    const Batch *batch = memory;
    for (size_t i = batch->count; i-- > 0;) {
        CUresult result = run_one(batch, &batch->operation[i]);
        if (result != CUDA_SUCCESS) return result;
    }
    return CUDA_SUCCESS;
}

static CUresult check(const CUmemDecompressParams *operation, int mask) {
    int algorithm = operation->algo;
    if (algorithm != ALGORITHM_DEFLATE && algorithm != ALGORITHM_SNAPPY && algorithm != ALGORITHM_LZ4)
        return CUDA_ERROR_INVALID_VALUE;
    if (!(mask & algorithm) || !operation->srcNumBytes || ADDRESS(operation->dstActBytes) % 4) return CUDA_ERROR_INVALID_VALUE;
    if (!memory_capable(ADDRESS(operation->src)) || !memory_capable(ADDRESS(operation->dst)) ||
        !memory_capable(ADDRESS(operation->dstActBytes)))
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

API(cuMemBatchDecompressAsync, "cuMemBatchDecompressAsync",
    (CUmemDecompressParams * operations, size_t count, unsigned int flags, size_t *error_index, CUstream handle),
    (operations, count, flags, error_index, handle)) {
    Stream *stream;
    int mask, longest;
    if (error_index) *error_index = SIZE_MAX; /* of no operation in particular */
    CUresult result = stream_resolve(handle, &stream);
    if (result != CUDA_SUCCESS) return result;
    if (!operations || !count || flags) return CUDA_ERROR_INVALID_VALUE;
    device_engine(physical(stream->context->ordinal), &mask, &longest);
    if (!mask) return CUDA_ERROR_NOT_SUPPORTED;
    for (size_t i = 0; i < count; i++) {
        result = check(&operations[i], mask);
        if (result == CUDA_SUCCESS) continue;
        if (error_index) *error_index = i;
        return result;
    }
    Batch *batch = malloc(sizeof *batch + count * sizeof *operations);
    if (!batch) return CUDA_ERROR_OUT_OF_MEMORY;
    batch->count = count;
    batch->longest = (uint64_t)longest;
    memcpy(batch->operation, operations, count * sizeof *operations);
    return stream_submit(stream, (Work){.kind = WORK_DECOMPRESS, .memory = batch}, 0);
}
