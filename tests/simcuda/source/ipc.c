/* CUDA IPC: another process's allocation, mapped. It makes both ends targets that can't be checkpointed here. */
#define _GNU_SOURCE
#include "sim.h"

#include <string.h>

API(cuIpcGetMemHandle, "cuIpcGetMemHandle", (CUipcMemHandle * out, CUdeviceptr address), (out, address)) {
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    world_lock(sim.world);
    for (uint32_t i = 0; out && i < sim.process->allocations; i++)
        if (sim.process->allocation[i].address == address) {
            memset(out, 0, sizeof *out);
            memcpy(out, &sim.process->allocation[i], sizeof sim.process->allocation[i]);
            atomic_fetch_or(&sim.process->flags, FLAG_IPC);
            result = CUDA_SUCCESS;
        }
    world_unlock(sim.world);
    return result;
}

API(cuIpcOpenMemHandle_v2, "cuIpcOpenMemHandle", (CUdeviceptr * out, CUipcMemHandle handle, unsigned int flags),
    (out, handle, flags)) {
    Allocation allocation;
    uint64_t address, bytes;
    if (!out || flags > 1) return CUDA_ERROR_INVALID_VALUE;
    memcpy(&allocation, &handle, sizeof allocation);
    if (allocation.gpu < 0 || allocation.gpu >= sim.world->gpus || !allocation.bytes) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = memory_map(&allocation, 1, allocation.gpu, &address, &bytes);
    if (result != CUDA_SUCCESS) return result;
    atomic_fetch_or(&sim.process->flags, FLAG_IPC);
    *out = address;
    return CUDA_SUCCESS;
}

API(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", (CUdeviceptr address), (address)) {
    streams_wait_all(NULL, 0);
    memory_unmap(address);
    return CUDA_SUCCESS;
}
