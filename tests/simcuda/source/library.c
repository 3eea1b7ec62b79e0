/* Work of the simulated libraries beside this one, and what the work of a GPU reaches. */
#define _GNU_SOURCE
#include "sim.h"

#include <stdlib.h>
#include <string.h>

unsigned char *reach(uint64_t address, uint64_t wanted, uint64_t *run) {
    if (memory_is_device(address)) return memory_reach(address, wanted, run, sim_worker_ordinal);
    pthread_mutex_lock(&sim.mutex);
    int known = host_find(address, wanted) != NULL;
    pthread_mutex_unlock(&sim.mutex);
    *run = wanted;
    return known ? (unsigned char *)address : NULL;
}

unsigned char *reach_all(uint64_t address, uint64_t bytes) {
    static unsigned char nothing;
    uint64_t run = 0;
    if (!bytes) return &nothing;
    unsigned char *found = reach(address, bytes, &run);
    return run == bytes ? found : NULL;
}

static CUresult move(unsigned char *host, uint64_t address, uint64_t bytes, int write) {
    uint64_t run;
    for (uint64_t at = 0; at < bytes; at += run)
        if (!reach(address + at, bytes - at, &run)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (!host) return CUDA_SUCCESS;
    for (uint64_t at = 0; at < bytes; at += run) {
        unsigned char *device = reach(address + at, bytes - at, &run);
        if (!device) return CUDA_ERROR_ILLEGAL_ADDRESS; /* freed in this very moment */
        memcpy(write ? device : host + at, write ? host + at : device, run);
    }
    return CUDA_SUCCESS;
}

CUresult device_read(void *to, uint64_t address, uint64_t bytes) { return move(to, address, bytes, 0); }
CUresult device_write(uint64_t address, const void *from, uint64_t bytes) {
    return move((unsigned char *)(uintptr_t)from, address, bytes, 1);
}

EXPORT CUresult simcuda_read(void *to, uint64_t address, uint64_t bytes) { return device_read(to, address, bytes); }
EXPORT CUresult simcuda_write(uint64_t address, const void *from, uint64_t bytes) {
    return device_write(address, from, bytes);
}

EXPORT CUresult simcuda_enqueue(const char *name, CUstream handle, LibraryRun run, void *memory) {
    Call call;
    Stream *stream;
    CUresult result = call_begin(&call, name);
    if (result != CUDA_SUCCESS) {
        free(memory);
        return result;
    }
    result = stream_resolve(handle, &stream);
    if (result == CUDA_SUCCESS)
        result = stream_submit(stream, (Work){.kind = WORK_LIBRARY, .run = run, .memory = memory}, 0);
    else
        free(memory);
    return call_end(&call, result);
}

EXPORT CUresult simcuda_engine(CUstream handle, int *mask, int *longest) {
    Stream *stream;
    if (!sim.initialized) return CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = stream_resolve(handle, &stream);
    if (result != CUDA_SUCCESS) return result;
    device_engine(physical(stream->context->ordinal), mask, longest);
    return CUDA_SUCCESS;
}

EXPORT int simcuda_capable(uint64_t address) { return memory_capable(address); }
