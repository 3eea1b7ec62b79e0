/* Memory pools: allocations in a stream's order. Nothing is kept: memory goes back when the stream comes to its free. */
#define _GNU_SOURCE
#include "sim.h"

#include <stdlib.h>
#include <string.h>

typedef struct Pool {
    struct Pool *next;
    int ordinal;
    unsigned int usage;
    int standing; /* a device's default pool: not destroyed */
    uint64_t threshold;
} Pool;

/* Under sim.mutex. */
static Pool *live(const Pool *pool) {
    Pool *other = sim.pools;
    while (other && other != pool) other = other->next;
    return other;
}

static Pool *add(int ordinal, unsigned int usage, int standing) {
    Pool *made = calloc(1, sizeof *made);
    if (!made) return NULL;
    *made = (Pool){sim.pools, ordinal, usage, standing, 0};
    sim.pools = made;
    return made;
}

static Pool *standing_pool(int ordinal) {
    Pool *other = sim.pools;
    while (other && !(other->standing && other->ordinal == ordinal)) other = other->next;
    return other ? other : add(ordinal, 0, 1);
}

void pools_reset(void) {
    for (Pool *other = sim.pools, *next; other; other = next) {
        next = other->next;
        free(other);
    }
}

API(cuMemPoolCreate, "cuMemPoolCreate", (CUmemoryPool * out, const CUmemPoolProps *properties), (out, properties)) {
    if (!out || !properties || properties->allocType != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
    if (properties->usage & ~USAGE_HW_DECOMPRESS) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < sizeof properties->reserved; i++)
        if (properties->reserved[i]) return CUDA_ERROR_INVALID_VALUE;
    if (properties->handleTypes || properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (properties->location.id < 0 || properties->location.id >= sim.gpus) return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&sim.mutex);
    Pool *made = add(properties->location.id, properties->usage, 0);
    pthread_mutex_unlock(&sim.mutex);
    if (made) *out = made;
    return made ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API(cuMemPoolDestroy, "cuMemPoolDestroy", (CUmemoryPool pool), (pool)) {
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim.mutex);
    for (Pool **at = &sim.pools; *at; at = &(*at)->next)
        if (*at == pool && !pool->standing) {
            *at = pool->next;
            free(pool);
            result = CUDA_SUCCESS;
            break;
        }
    pthread_mutex_unlock(&sim.mutex);
    return result;
}

static CUresult device_pool(CUmemoryPool *out, CUdevice ordinal) {
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    if (ordinal < 0 || ordinal >= sim.gpus) return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&sim.mutex);
    *out = standing_pool(ordinal);
    pthread_mutex_unlock(&sim.mutex);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API(cuDeviceGetDefaultMemPool, "cuDeviceGetDefaultMemPool", (CUmemoryPool * out, CUdevice ordinal), (out, ordinal)) {
    return device_pool(out, ordinal);
}
API(cuDeviceGetMemPool, "cuDeviceGetMemPool", (CUmemoryPool * out, CUdevice ordinal), (out, ordinal)) {
    return device_pool(out, ordinal);
}

static CUresult allocate(CUdeviceptr *out, size_t bytes, Pool *pool, CUstream handle) {
    Stream *stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result != CUDA_SUCCESS) return result;
    if (!out || !bytes) return CUDA_ERROR_INVALID_VALUE;
    uint64_t address;
    pthread_mutex_lock(&sim.mutex);
    if (!pool) pool = standing_pool(stream->context->ordinal);
    int known = pool && live(pool) && pool->ordinal == stream->context->ordinal;
    unsigned int usage = known ? pool->usage : 0;
    pthread_mutex_unlock(&sim.mutex);
    if (!known) return CUDA_ERROR_INVALID_VALUE;
    result = memory_allocate(stream->context, bytes, SEGMENT_POOL, &address);
    if (result != CUDA_SUCCESS) return result;
    pthread_mutex_lock(&sim.mutex);
    segment_at(address)->usage = usage;
    pthread_mutex_unlock(&sim.mutex);
    *out = address;
    return CUDA_SUCCESS;
}

API(cuMemAllocAsync, "cuMemAllocAsync", (CUdeviceptr * out, size_t bytes, CUstream stream), (out, bytes, stream)) {
    return allocate(out, bytes, NULL, stream);
}
API(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync",
    (CUdeviceptr * out, size_t bytes, CUmemoryPool pool, CUstream stream), (out, bytes, pool, stream)) {
    return pool ? allocate(out, bytes, pool, stream) : CUDA_ERROR_INVALID_VALUE;
}

API(cuMemFreeAsync, "cuMemFreeAsync", (CUdeviceptr address, CUstream handle), (address, handle)) {
    Stream *stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result != CUDA_SUCCESS) return result;
    pthread_mutex_lock(&sim.mutex);
    Segment *segment = segment_at(address);
    int known = segment && segment->address == address && !segment->leaving &&
                (segment->kind == SEGMENT_POOL || segment->kind == SEGMENT_MEMORY);
    if (known) segment->leaving = 1;
    pthread_mutex_unlock(&sim.mutex);
    if (!known) return CUDA_ERROR_INVALID_VALUE;
    return stream_submit(stream, (Work){.kind = WORK_FREE, .destination = address}, 0);
}

API(cuMemPoolTrimTo, "cuMemPoolTrimTo", (CUmemoryPool pool, size_t bytes), (pool, bytes)) {
    (void)bytes; /* nothing is kept */
    pthread_mutex_lock(&sim.mutex);
    int known = live(pool) != NULL;
    pthread_mutex_unlock(&sim.mutex);
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* The release threshold (attribute 4) is remembered and changes nothing. */
API(cuMemPoolSetAttribute, "cuMemPoolSetAttribute", (CUmemoryPool pool, int attribute, void *value),
    (pool, attribute, value)) {
    pthread_mutex_lock(&sim.mutex);
    int known = value && live(pool) && attribute >= 1 && attribute <= 4;
    if (known && attribute == 4) memcpy(&pool->threshold, value, 8);
    pthread_mutex_unlock(&sim.mutex);
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
API(cuMemPoolGetAttribute, "cuMemPoolGetAttribute", (CUmemoryPool pool, int attribute, void *value),
    (pool, attribute, value)) {
    pthread_mutex_lock(&sim.mutex);
    int known = value && live(pool) && attribute == 4;
    if (known) memcpy(value, &pool->threshold, 8);
    pthread_mutex_unlock(&sim.mutex);
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
