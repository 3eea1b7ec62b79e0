/* Custom storage: one mapping and one stream per GPU in the caller, until cuCheckpointOperationComplete. */
#define _GNU_SOURCE
#include "sim.h"

#include <stdlib.h>
#include <unistd.h>

typedef struct Operation {
    struct Operation *next;
    Process *target;
    int pid;
    int end_state;
    int completing;
    CUcheckpointCustomStorageInfo info;
    CUcheckpointCustomStoragePerDeviceData device[MAX_GPUS];
} Operation;

static void forget(Operation *operation) {
    pthread_mutex_lock(&sim.mutex);
    for (Operation **at = &sim.operations; *at; at = &(*at)->next)
        if (*at == operation) {
            *at = operation->next;
            break;
        }
    for (unsigned int i = 0; i < operation->info.deviceCount; i++)
        if (stream_live(operation->device[i].stream)) stream_destroy(operation->device[i].stream);
    pthread_mutex_unlock(&sim.mutex);
    for (unsigned int i = 0; i < operation->info.deviceCount; i++) memory_unmap(operation->device[i].devPtr);
    free(operation);
}

void operations_forget(void) {
    while (sim.operations) forget(sim.operations);
}

/* "The application is expected to retain primary contexts of all the devices used by the process." */
CUresult custom_contexts(Process *target, const int32_t *new_gpu) {
    for (uint32_t i = 0; i < target->allocations; i++)
        if (!context_primary_of(new_gpu[target->allocation[i].gpu])) return CUDA_ERROR_INVALID_CONTEXT;
    return CUDA_SUCCESS;
}

CUresult custom_open(Process *target, int end_state, CUcheckpointCustomStorageInfo **out) {
    Operation *operation = calloc(1, sizeof *operation);
    if (!operation) return CUDA_ERROR_OUT_OF_MEMORY;
    operation->target = target;
    operation->pid = target->pid;
    operation->end_state = end_state;
    operation->info.handle = operation;
    operation->info.perDeviceData = operation->device;
    CUresult result = CUDA_SUCCESS;
    for (int gpu = 0; gpu < sim.world->gpus && result == CUDA_SUCCESS; gpu++) {
        CUcheckpointCustomStoragePerDeviceData *device = &operation->device[operation->info.deviceCount];
        uint64_t address, bytes;
        result = memory_map(target->allocation, target->allocations, gpu, &address, &bytes);
        Context *context = context_primary_of(gpu);
        if (result != CUDA_SUCCESS || !bytes) continue;
        if (!context) result = CUDA_ERROR_INVALID_CONTEXT; /* released since */
        else {
            device->devPtr = address;
            device->size = bytes;
            device->stream = stream_make(context, CU_STREAM_NON_BLOCKING);
            operation->info.deviceCount++;
        }
    }
    pthread_mutex_lock(&sim.mutex);
    operation->next = sim.operations;
    sim.operations = operation;
    pthread_mutex_unlock(&sim.mutex);
    if (result != CUDA_SUCCESS) {
        forget(operation);
        return result;
    }
    *out = &operation->info;
    return CUDA_SUCCESS;
}

static CUresult complete(Operation *operation, int fault) {
    CUresult result = CUDA_SUCCESS;
    for (unsigned int i = 0; i < operation->info.deviceCount; i++) {
        Stream *stream = operation->device[i].stream;
        pthread_mutex_lock(&sim.mutex);
        int live = stream_live(stream), capturing = live && stream->capturing;
        pthread_mutex_unlock(&sim.mutex);
        if (capturing) result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        if (!live) result = CUDA_ERROR_INVALID_CONTEXT; /* its context was reset meanwhile */
    }
    for (unsigned int i = 0; i < operation->info.deviceCount && result == CUDA_SUCCESS; i++)
        result = stream_wait(operation->device[i].stream);
    if (result != CUDA_SUCCESS) {
        operation->completing = 0;
        return result;
    }
    Command command = {.kind = COMMAND_FINISH, .fault = fault, .next_state = operation->end_state};
    int from_state = operation->end_state == CHECKPOINTED ? CHECKPOINTING : RESTORING;
    result = turn_take(operation->target, operation->pid);
    if (result == CUDA_SUCCESS) {
        if (atomic_load(&operation->target->state) != from_state) result = CUDA_ERROR_ILLEGAL_STATE;
        else result = command_run(operation->target, operation->pid, &command);
        turn_give(operation->target);
    }
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_OPERATING_SYSTEM) {
        if (result != CUDA_SUCCESS) operation->target->operation_pid = 0; /* dead: nobody maps its memory now */
        forget(operation);
        return result;
    }
    operation->completing = 0;
    return result;
}

EXPORT CUresult cuCheckpointOperationComplete(CUcheckpointOperationHandle handle) {
    if (!sim.initialized || sim.pid != getpid()) return CUDA_ERROR_NOT_INITIALIZED;
    if (!sim.world->custom_storage) return CUDA_ERROR_NOT_SUPPORTED;
    count_call(sim.world, "cuCheckpointOperationComplete");
    pthread_mutex_lock(&sim.mutex);
    Operation *operation = sim.operations;
    while (operation && operation != handle) operation = operation->next;
    int busy = operation && operation->completing;
    int pid = operation ? operation->pid : 0;
    if (operation && !busy) operation->completing = 1;
    pthread_mutex_unlock(&sim.mutex);
    Fault ordered;
    int fault = fault_take(sim.world, "cuCheckpointOperationComplete", sim.pid, pid, &ordered);
    CUresult result = CUDA_SUCCESS;
    if (fault >= 0 && ordered.point == POINT_BEFORE) result = fault_act(sim.world, fault, sim.pid, pid);
    if (result == CUDA_SUCCESS) {
        if (!operation) result = CUDA_ERROR_INVALID_VALUE;
        else if (busy) result = CUDA_ERROR_ILLEGAL_STATE;
        else result = complete(operation, fault >= 0 && ordered.point == POINT_MIDDLE ? fault : -1);
    } else if (operation && !busy) {
        operation->completing = 0;
    }
    if (fault >= 0 && ordered.point == POINT_AFTER) {
        CUresult error = fault_act(sim.world, fault, sim.pid, pid);
        if (error != CUDA_SUCCESS) result = error;
    }
    return result;
}
