/* One batch of chunks: checked when it is called where the library can see it, run on the stream's thread.
 *
 * What nvCOMP's documentation calls undefined behaviour is an error here that can't be missed: an address that is not
 * aligned or not the GPU's, a buffer shorter than the library was told or asked for, temporary memory that is too
 * small. It is said on stderr and left in the context, as a fault of the real kernels would be. The temporary memory
 * and what lies behind a compressed chunk, up to the longest that it could be, are overwritten. */
#define _GNU_SOURCE
#include "nvcomp.h"

#include "library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SCRIBBLE 0xa5
#define SCRIBBLE_EVERY 65536u
#define SCRIBBLE_BYTES 256u

static SimcudaEnqueue enqueue;
static SimcudaRead read_device;
static SimcudaWrite write_device;
static SimcudaEngine engine;
static SimcudaCapable capable;

static void find(void) {
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (library) {
        *(void **)&enqueue = dlsym(library, "simcuda_enqueue");
        *(void **)&read_device = dlsym(library, "simcuda_read");
        *(void **)&write_device = dlsym(library, "simcuda_write");
        *(void **)&engine = dlsym(library, "simcuda_engine");
        *(void **)&capable = dlsym(library, "simcuda_capable");
    }
    if (!enqueue) fprintf(stderr, "simulated nvCOMP: libcuda.so.1 is not the simulated driver\n");
}

static int found(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find);
    return enqueue && read_device && write_device && engine && capable;
}

NvStatus engine_of(CUstream stream, int *mask, int *longest) {
    return found() && engine(stream, mask, longest) == CUDA_SUCCESS ? NV_SUCCESS : NV_CUDA_ERROR;
}

static CUresult complain(const NvBatch *batch, size_t chunk, const char *what, CUresult error) {
    if (chunk == (size_t)-1) fprintf(stderr, "simulated nvCOMP: %s: %s\n", batch->call, what);
    else fprintf(stderr, "simulated nvCOMP: %s: chunk %zu of %zu: %s\n", batch->call, chunk, batch->chunks, what);
    return error;
}

#define ALL ((size_t)-1)

typedef struct { uint64_t in, in_bytes, out, room; } Chunk;

static CUresult load_array(const NvBatch *batch, uint64_t address, uint64_t *values, const char *what) {
    char text[96];
    snprintf(text, sizeof text, "the array of %s is not aligned to 8 bytes", what);
    if (address % 8) return complain(batch, ALL, text, CUDA_ERROR_MISALIGNED_ADDRESS);
    snprintf(text, sizeof text, "the array of %s is not where the GPU reaches it", what);
    CUresult result = read_device(values, address, 8 * batch->chunks);
    return result == CUDA_SUCCESS ? result : complain(batch, ALL, text, result);
}

static CUresult scribble(uint64_t address, uint64_t bytes) {
    unsigned char pattern[SCRIBBLE_BYTES];
    memset(pattern, SCRIBBLE, sizeof pattern);
    CUresult result = write_device(address, NULL, bytes);
    for (uint64_t at = 0; result == CUDA_SUCCESS && at < bytes; at += SCRIBBLE_EVERY)
        result = write_device(address + at, pattern, bytes - at < sizeof pattern ? bytes - at : sizeof pattern);
    return result;
}

static CUresult check_chunk(const NvBatch *batch, size_t i, const Chunk *chunk) {
    const NvAlignments *wanted = batch->kind == BATCH_COMPRESS ? &batch->codec->compress : &batch->codec->decompress;
    if (chunk->in % wanted->input)
        return complain(batch, i, "the input is not aligned as required", CUDA_ERROR_MISALIGNED_ADDRESS);
    if (batch->kind != BATCH_SIZES && chunk->out % wanted->output)
        return complain(batch, i, "the output is not aligned as required", CUDA_ERROR_MISALIGNED_ADDRESS);
    if (batch->kind == BATCH_COMPRESS && chunk->in_bytes > batch->longest)
        return complain(batch, i, "it is longer than the longest chunk named in the call", CUDA_ERROR_ILLEGAL_ADDRESS);
    if (read_device(NULL, chunk->in, chunk->in_bytes) != CUDA_SUCCESS)
        return complain(batch, i, "the input is not all where the GPU reaches it", CUDA_ERROR_ILLEGAL_ADDRESS);
    if (batch->kind != BATCH_SIZES && write_device(chunk->out, NULL, chunk->room) != CUDA_SUCCESS)
        return complain(batch, i, "the output buffer is shorter than it has to be", CUDA_ERROR_ILLEGAL_ADDRESS);
    if (batch->oversized && (chunk->in_bytes > (uint64_t)batch->oversized || chunk->room > (uint64_t)batch->oversized))
        return complain(batch, i, "a buffer is longer than the decompression engine's longest", CUDA_ERROR_LAUNCH_FAILED);
    return CUDA_SUCCESS;
}

/* One chunk: its status, and the bytes that came out of it. */
static CUresult code(const NvBatch *batch, const Chunk *chunk, NvStatus *status, size_t *written) {
    const NvCodec *codec = batch->codec;
    unsigned char *in = malloc(chunk->in_bytes + 1), *out = malloc(chunk->room + 1);
    CUresult result = in && out ? read_device(in, chunk->in, chunk->in_bytes) : CUDA_ERROR_OUT_OF_MEMORY;
    *written = 0;
    if (result == CUDA_SUCCESS && batch->oversized && !(capable(chunk->in) && capable(chunk->out))) {
        *status = NV_CANNOT_DECOMPRESS; /* not memory that the engine can use */
    } else if (result == CUDA_SUCCESS) {
        switch (batch->kind) {
        case BATCH_COMPRESS:
            *status = codec->compress_chunk(&batch->options, in, chunk->in_bytes, out, chunk->room, written);
            break;
        case BATCH_DECOMPRESS:
            *status = codec->decompress_chunk(&batch->options, in, chunk->in_bytes, out, chunk->room, written);
            break;
        default: *status = codec->size_of(in, chunk->in_bytes, written);
        }
        if (*status != NV_SUCCESS) *written = 0;
        if (batch->kind != BATCH_SIZES) {
            result = write_device(chunk->out, out, *written);
            if (result == CUDA_SUCCESS && batch->kind == BATCH_COMPRESS)
                result = scribble(chunk->out + *written, chunk->room - *written);
        }
    }
    free(in);
    free(out);
    return result;
}

static CUresult run_chunks(const NvBatch *batch, int ordered, uint64_t *arrays) {
    size_t n = batch->chunks;
    uint64_t *in = arrays, *in_bytes = in + n, *out = in + 2 * n, *room = in + 3 * n, *written = in + 4 * n;
    NvStatus *statuses = (NvStatus *)(in + 5 * n);
    CUresult result = load_array(batch, batch->inputs, in, "inputs");
    if (result == CUDA_SUCCESS) result = load_array(batch, batch->input_bytes, in_bytes, "input sizes");
    if (result == CUDA_SUCCESS && batch->kind != BATCH_SIZES) result = load_array(batch, batch->outputs, out, "outputs");
    if (result == CUDA_SUCCESS && batch->kind == BATCH_DECOMPRESS)
        result = load_array(batch, batch->output_room, room, "output sizes");
    if (result != CUDA_SUCCESS) return result;
    if (batch->temp_needed && scribble(batch->temp, batch->temp_needed) != CUDA_SUCCESS)
        return complain(batch, ALL, "the temporary memory is shorter than it was said to be", CUDA_ERROR_ILLEGAL_ADDRESS);
    for (size_t i = 0; i < n; i++) {
        Chunk chunk = {in[i], in_bytes[i], out[i], room[i]};
        if (batch->kind == BATCH_COMPRESS) chunk.room = batch->codec->bound(batch->longest, &batch->options);
        size_t bytes = 0;
        statuses[i] = NV_SUCCESS;
        result = check_chunk(batch, i, &chunk);
        if (result == CUDA_SUCCESS && !(i == 0 && ordered)) result = code(batch, &chunk, &statuses[i], &bytes);
        if (i == 0 && ordered) statuses[0] = ordered;
        if (result != CUDA_SUCCESS) return result;
        written[i] = bytes;
    }
    if (batch->output_bytes % 8 || batch->statuses % 4)
        return complain(batch, ALL, "an array of results is not aligned", CUDA_ERROR_MISALIGNED_ADDRESS);
    result = write_device(batch->output_bytes, written, 8 * n);
    if (result == CUDA_SUCCESS && batch->statuses) result = write_device(batch->statuses, statuses, 4 * n);
    return result == CUDA_SUCCESS
               ? result
               : complain(batch, ALL, "an array of results is not where the GPU reaches it", result);
}

static CUresult run(void *memory, int ordered) {
    const NvBatch *batch = memory;
    uint64_t *arrays = calloc(batch->chunks, 6 * sizeof *arrays);
    CUresult result = arrays ? run_chunks(batch, ordered, arrays) : CUDA_ERROR_OUT_OF_MEMORY;
    free(arrays);
    return result;
}

NvStatus batch_enqueue(const NvBatch *batch, CUstream stream) {
    if (!batch->chunks) return NV_SUCCESS;
    if (!batch->inputs || !batch->input_bytes || !batch->output_bytes) return NV_INVALID_VALUE;
    if (batch->kind != BATCH_SIZES && !batch->outputs) return NV_INVALID_VALUE;
    if (batch->kind == BATCH_DECOMPRESS && !batch->output_room) return NV_INVALID_VALUE;
    if (batch->temp_needed && (!batch->temp || batch->temp_bytes < batch->temp_needed)) {
        complain(batch, ALL, "the temporary memory is too small", CUDA_SUCCESS);
        return NV_INVALID_VALUE;
    }
    const NvAlignments *wanted = batch->kind == BATCH_COMPRESS ? &batch->codec->compress : &batch->codec->decompress;
    if (batch->temp && batch->temp % wanted->temp) {
        complain(batch, ALL, "the temporary memory is not aligned", CUDA_SUCCESS);
        return NV_ALIGNMENT;
    }
    if (!found()) return NV_CUDA_ERROR;
    NvBatch *copy = malloc(sizeof *copy);
    if (!copy) return NV_INTERNAL;
    *copy = *batch;
    CUresult result = enqueue(batch->call, stream, run, copy);
    if (result == CUDA_SUCCESS) return NV_SUCCESS;
    return result >= NV_INVALID_VALUE && result <= 24 ? result : NV_CUDA_ERROR; /* a test can order a status */
}
