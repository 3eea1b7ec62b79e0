/* Copies and fills: which side is a device's, what is checked at once, what runs on a stream. */
#define _GNU_SOURCE
#include "sim.h"

static CUresult check_device(uint64_t address, uint64_t bytes) {
    return memory_covers(address, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static int pinned(uint64_t address, uint64_t bytes) {
    pthread_mutex_lock(&sim.mutex);
    int known = host_find(address, bytes) != NULL;
    pthread_mutex_unlock(&sim.mutex);
    return known;
}

static CUresult start(uint64_t destination, uint64_t source, uint64_t bytes, CUstream handle, int wait) {
    Context *context;
    CUresult result = context_needed(&context);
    if (result != CUDA_SUCCESS) return result;
    Stream *stream = context->legacy;
    if (!wait) result = stream_resolve(handle, &stream);
    if (result != CUDA_SUCCESS || !bytes) return result;
    if (!destination || !source) return CUDA_ERROR_INVALID_VALUE;
    uint64_t sides[2] = {destination, source};
    for (int i = 0; i < 2; i++) {
        if (memory_is_device(sides[i])) {
            result = check_device(sides[i], bytes);
            if (result != CUDA_SUCCESS) return result;
        } else if (!pinned(sides[i], bytes)) {
            wait = 1; /* pageable memory: the call returns when the copy is done */
        }
    }
    return stream_submit(stream, (Work){.kind = WORK_COPY, .destination = destination, .source = source, .bytes = bytes},
                         wait);
}

static CUresult typed(uint64_t destination, int to_device, uint64_t source, int from_device, uint64_t bytes,
                      CUstream stream, int wait) {
    /* Registered host memory has a device address, its own. */
    if (bytes && to_device && !memory_is_device(destination) && !pinned(destination, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes && from_device && !memory_is_device(source) && !pinned(source, bytes)) return CUDA_ERROR_INVALID_VALUE;
    return start(destination, source, bytes, stream, wait);
}

#define HOST(pointer) (uint64_t)(uintptr_t)(pointer)

API(cuMemcpy, "cuMemcpy", (CUdeviceptr to, CUdeviceptr from, size_t bytes), (to, from, bytes)) {
    return start(to, from, bytes, NULL, 1);
}
API(cuMemcpyAsync, "cuMemcpyAsync", (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream),
    (to, from, bytes, stream)) {
    return start(to, from, bytes, stream, 0);
}
API(cuMemcpyHtoD_v2, "cuMemcpyHtoD", (CUdeviceptr to, const void *from, size_t bytes), (to, from, bytes)) {
    return typed(to, 1, HOST(from), 0, bytes, NULL, 1);
}
API(cuMemcpyDtoH_v2, "cuMemcpyDtoH", (void *to, CUdeviceptr from, size_t bytes), (to, from, bytes)) {
    return typed(HOST(to), 0, from, 1, bytes, NULL, 1);
}
API(cuMemcpyDtoD_v2, "cuMemcpyDtoD", (CUdeviceptr to, CUdeviceptr from, size_t bytes), (to, from, bytes)) {
    return typed(to, 1, from, 1, bytes, NULL, 1);
}
API(cuMemcpyHtoDAsync_v2, "cuMemcpyHtoDAsync", (CUdeviceptr to, const void *from, size_t bytes, CUstream stream),
    (to, from, bytes, stream)) {
    return typed(to, 1, HOST(from), 0, bytes, stream, 0);
}
API(cuMemcpyDtoHAsync_v2, "cuMemcpyDtoHAsync", (void *to, CUdeviceptr from, size_t bytes, CUstream stream),
    (to, from, bytes, stream)) {
    return typed(HOST(to), 0, from, 1, bytes, stream, 0);
}
API(cuMemcpyDtoDAsync_v2, "cuMemcpyDtoDAsync", (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream),
    (to, from, bytes, stream)) {
    return typed(to, 1, from, 1, bytes, stream, 0);
}
API(cuMemcpyPeer, "cuMemcpyPeer",
    (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes),
    (to, to_context, from, from_context, bytes)) {
    (void)to_context;
    (void)from_context;
    return typed(to, 1, from, 1, bytes, NULL, 1);
}
API(cuMemcpyPeerAsync, "cuMemcpyPeerAsync",
    (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes, CUstream stream),
    (to, to_context, from, from_context, bytes, stream)) {
    (void)to_context;
    (void)from_context;
    return typed(to, 1, from, 1, bytes, stream, 0);
}

static CUresult fill(CUdeviceptr to, uint32_t value, int width, size_t count, CUstream handle, int wait) {
    Context *context;
    Stream *stream;
    CUresult result = context_needed(&context);
    if (result == CUDA_SUCCESS) result = stream_resolve(handle, &stream);
    if (result != CUDA_SUCCESS || !count) return result;
    if (to % (uint64_t)width || count > UINT64_MAX / 8) return CUDA_ERROR_INVALID_VALUE;
    result = check_device(to, count * (uint64_t)width);
    if (result != CUDA_SUCCESS) return result;
    return stream_submit(
        stream, (Work){.kind = WORK_SET, .destination = to, .value = value, .width = width, .bytes = count}, wait);
}

API(cuMemsetD8_v2, "cuMemsetD8", (CUdeviceptr to, unsigned char value, size_t count), (to, value, count)) {
    return fill(to, value, 1, count, NULL, 1);
}
API(cuMemsetD16_v2, "cuMemsetD16", (CUdeviceptr to, unsigned short value, size_t count), (to, value, count)) {
    return fill(to, value, 2, count, NULL, 1);
}
API(cuMemsetD32_v2, "cuMemsetD32", (CUdeviceptr to, unsigned int value, size_t count), (to, value, count)) {
    return fill(to, value, 4, count, NULL, 1);
}
API(cuMemsetD8Async, "cuMemsetD8Async", (CUdeviceptr to, unsigned char value, size_t count, CUstream stream),
    (to, value, count, stream)) {
    return fill(to, value, 1, count, stream, 0);
}
API(cuMemsetD16Async, "cuMemsetD16Async", (CUdeviceptr to, unsigned short value, size_t count, CUstream stream),
    (to, value, count, stream)) {
    return fill(to, value, 2, count, stream, 0);
}
API(cuMemsetD32Async, "cuMemsetD32Async", (CUdeviceptr to, unsigned int value, size_t count, CUstream stream),
    (to, value, count, stream)) {
    return fill(to, value, 4, count, stream, 0);
}
