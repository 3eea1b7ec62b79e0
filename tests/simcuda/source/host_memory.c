/* Host memory that the driver knows: allocated by it, or registered. Only such memory is copied asynchronously. */
#define _GNU_SOURCE
#include "sim.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static CUresult add(uint64_t address, uint64_t bytes, unsigned int flags, int owned, int managed, Context *context) {
    HostRange *range = calloc(1, sizeof *range);
    if (!range) return CUDA_ERROR_OUT_OF_MEMORY;
    *range = (HostRange){.address = address, .bytes = bytes, .flags = flags, .owned = owned, .managed = managed,
                         .context = context};
    pthread_mutex_lock(&sim.mutex);
    range->next = sim.host;
    sim.host = range;
    pthread_mutex_unlock(&sim.mutex);
    return CUDA_SUCCESS;
}

static CUresult allocate(void **out, size_t bytes, unsigned int flags, int managed) {
    Context *context;
    CUresult result = context_needed(&context);
    if (result != CUDA_SUCCESS) return result;
    if (!out || !bytes) return CUDA_ERROR_INVALID_VALUE;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    result = add((uint64_t)memory, bytes, flags, 1, managed, context);
    if (result == CUDA_SUCCESS) *out = memory;
    else munmap(memory, bytes);
    return result;
}

API(cuMemHostAlloc, "cuMemHostAlloc", (void **out, size_t bytes, unsigned int flags), (out, bytes, flags)) {
    return allocate(out, bytes, flags, 0);
}

API(cuMemAllocHost_v2, "cuMemAllocHost", (void **out, size_t bytes), (out, bytes)) {
    return allocate(out, bytes, 0, 0);
}

/* Managed memory makes the process a UVM target, which can't be checkpointed. */
API(cuMemAllocManaged, "cuMemAllocManaged", (CUdeviceptr * out, size_t bytes, unsigned int flags),
    (out, bytes, flags)) {
    void *memory;
    if (!out || !flags) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = allocate(&memory, bytes, flags, 1);
    if (result == CUDA_SUCCESS) {
        *out = (CUdeviceptr)(uintptr_t)memory;
        atomic_fetch_or(&sim.process->flags, FLAG_UVM);
    }
    return result;
}

/* Takes the range that begins at address out of the list. */
static HostRange *take(uint64_t address, int owned) {
    HostRange *found = NULL;
    pthread_mutex_lock(&sim.mutex);
    for (HostRange **at = &sim.host; *at && !found; at = &(*at)->next)
        if ((*at)->address == address && (*at)->owned == owned && !(*at)->managed) {
            found = *at;
            *at = found->next;
            break;
        }
    pthread_mutex_unlock(&sim.mutex);
    return found;
}

API(cuMemFreeHost, "cuMemFreeHost", (void *memory), (memory)) {
    HostRange *range = take((uint64_t)memory, 1);
    if (!range) return CUDA_ERROR_INVALID_VALUE;
    streams_wait_all(NULL, 0);
    munmap(memory, range->bytes);
    free(range);
    return CUDA_SUCCESS;
}

API(cuMemHostRegister_v2, "cuMemHostRegister", (void *memory, size_t bytes, unsigned int flags),
    (memory, bytes, flags)) {
    Context *context;
    CUresult result = context_needed(&context);
    if (result != CUDA_SUCCESS) return result;
    uint64_t address = (uint64_t)memory, page = (uint64_t)sysconf(_SC_PAGESIZE);
    if (!memory || !bytes || memory_is_device(address)) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim.mutex);
    for (const HostRange *range = sim.host; range; range = range->next)
        if (address < range->address + range->bytes && range->address < address + bytes)
            result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    pthread_mutex_unlock(&sim.mutex);
    if (result != CUDA_SUCCESS) return result;
    uint64_t end = (address + bytes + page - 1) / page * page;
    for (uint64_t at = address / page * page; at < end;) {
        unsigned char resident[1024];
        uint64_t part = end - at < page * sizeof resident ? end - at : page * sizeof resident;
        if (mincore((void *)at, part, resident) != 0 && errno == ENOMEM) return CUDA_ERROR_INVALID_VALUE;
        at += part;
    }
    return add(address, bytes, flags, 0, 0, context);
}

API(cuMemHostUnregister, "cuMemHostUnregister", (void *memory), (memory)) {
    HostRange *range = take((uint64_t)memory, 0);
    if (!range) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    streams_wait_all(NULL, 0);
    free(range);
    return CUDA_SUCCESS;
}

API(cuMemHostGetDevicePointer_v2, "cuMemHostGetDevicePointer", (CUdeviceptr * out, void *memory, unsigned int flags),
    (out, memory, flags)) {
    if (!out || flags) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim.mutex);
    int known = host_find((uint64_t)memory, 1) != NULL;
    pthread_mutex_unlock(&sim.mutex);
    *out = known ? (CUdeviceptr)(uintptr_t)memory : 0; /* unified addressing: the same */
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API(cuMemHostGetFlags, "cuMemHostGetFlags", (unsigned int *out, void *memory), (out, memory)) {
    pthread_mutex_lock(&sim.mutex);
    const HostRange *range = host_find((uint64_t)memory, 1);
    if (range && out) *out = range->flags;
    pthread_mutex_unlock(&sim.mutex);
    return range && out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
