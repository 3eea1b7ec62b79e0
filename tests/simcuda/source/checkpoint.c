/* cuCheckpointProcess*: what the caller checks, and the command that it sends to the target's restore thread. */
#define _GNU_SOURCE
#include "sim.h"

#include <errno.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct {
    const char *name;
    int pid;
    Process *target;
    int turn;
    int fault;
    Fault ordered;
} Request;

static int is_alive(int pid, const Process *target) { return process_start_time(pid) == target->start_time; }

static int in_state(const Process *target, int state) { return atomic_load(&target->state) == state; }

/* One caller at a time; what a dead caller had begun ends first. What is checked in a turn stays true in it. */
CUresult turn_take(Process *target, int pid) {
    Command *command = &target->command;
    robust_lock(&target->command_mutex);
    for (uint32_t done; (done = atomic_load(&command->done)) != atomic_load(&command->posted) && is_alive(pid, target);)
        futex_wait(&command->done, done, WAIT_NS);
    if (is_alive(pid, target)) return CUDA_SUCCESS;
    turn_give(target);
    return CUDA_ERROR_OPERATING_SYSTEM; /* the target died */
}

void turn_give(Process *target) { pthread_mutex_unlock(&target->command_mutex); }

/* In a turn: has the target's restore thread do it. */
CUresult command_run(Process *target, int pid, const Command *request) {
    Command *command = &target->command;
    uint32_t done = atomic_load(&command->done);
    command->kind = request->kind;
    command->fault = request->fault;
    command->caller = getpid();
    command->next_state = request->next_state;
    command->deadline = request->deadline;
    memcpy(command->new_gpu, request->new_gpu, sizeof command->new_gpu);
    atomic_store(&command->posted, done + 1);
    futex_wake(&command->posted);
    while (atomic_load(&command->done) == done && is_alive(pid, target)) futex_wait(&command->done, done, WAIT_NS);
    return atomic_load(&command->done) != done ? command->result : CUDA_ERROR_OPERATING_SYSTEM;
}

static CUresult find(int pid, Process **target) {
    if (process_attach() != CUDA_SUCCESS) return CUDA_ERROR_NOT_INITIALIZED;
    if (sim.world->driver_version < 12080) return CUDA_ERROR_NOT_SUPPORTED;
    if (pid <= 0 || !process_start_time(pid)) return CUDA_ERROR_INVALID_VALUE;
    world_lock(sim.world);
    world_reap(sim.world);
    *target = world_find(sim.world, pid);
    world_unlock(sim.world);
    return *target ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED; /* it doesn't use CUDA */
}

static CUresult begin(Request *request, const char *name, int pid) {
    *request = (Request){.name = name, .pid = pid, .fault = -1};
    if (process_attach() != CUDA_SUCCESS) return CUDA_ERROR_NOT_INITIALIZED;
    count_call(sim.world, name);
    request->fault = fault_take(sim.world, name, getpid(), pid, &request->ordered);
    if (request->fault >= 0 && request->ordered.point == POINT_BEFORE) {
        CUresult error = fault_act(sim.world, request->fault, getpid(), pid);
        request->fault = -1;
        if (error != CUDA_SUCCESS) return error;
    }
    return find(pid, &request->target);
}

/* The same for a call that changes the state: in a turn, and legal in one state only. */
static CUresult begin_turn(Request *request, const char *name, int pid, int state) {
    CUresult result = begin(request, name, pid);
    if (result != CUDA_SUCCESS) return result;
    result = turn_take(request->target, pid);
    request->turn = result == CUDA_SUCCESS;
    if (result == CUDA_SUCCESS && !in_state(request->target, state)) result = CUDA_ERROR_ILLEGAL_STATE;
    return result;
}

static CUresult end(Request *request, CUresult result) {
    if (request->turn) turn_give(request->target);
    if (request->fault >= 0 && request->ordered.point == POINT_AFTER) {
        CUresult error = fault_act(sim.world, request->fault, getpid(), request->pid);
        if (error != CUDA_SUCCESS) return error;
    }
    return result;
}

static Command command_of(const Request *request, int kind) {
    Command command = {.kind = kind, .fault = -1};
    if (request->fault >= 0 && request->ordered.point == POINT_MIDDLE) command.fault = request->fault;
    for (int i = 0; i < MAX_GPUS; i++) command.new_gpu[i] = i;
    return command;
}

static int unsupported(const Process *target) {
    if (target->flags) return 1;
    for (uint32_t i = 0; i < target->allocations; i++)
        if (sim.world->gpu[target->allocation[i].gpu].mig) return 1;
    return 0;
}

EXPORT CUresult cuCheckpointProcessGetState(int pid, int *state) {
    Request request;
    if (!state) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = begin(&request, "cuCheckpointProcessGetState", pid);
    if (result == CUDA_SUCCESS) *state = atomic_load(&request.target->state);
    return end(&request, result);
}

EXPORT CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *thread) {
    Request request;
    if (!thread) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = begin(&request, "cuCheckpointProcessGetRestoreThreadId", pid);
    if (result == CUDA_SUCCESS) *thread = request.target->restore_thread;
    return end(&request, result);
}

EXPORT CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args) {
    Request request;
    CUresult result = begin_turn(&request, "cuCheckpointProcessLock", pid, RUNNING);
    if (result == CUDA_SUCCESS && sim.world->refuse_at_lock && unsupported(request.target))
        result = CUDA_ERROR_NOT_SUPPORTED;
    if (result == CUDA_SUCCESS) {
        Command command = command_of(&request, COMMAND_LOCK);
        if (args && args->timeoutMs) command.deadline = monotonic_ns() + args->timeoutMs * 1000000ull;
        result = command_run(request.target, pid, &command);
    }
    return end(&request, result);
}

EXPORT CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args) {
    Request request;
    (void)args;
    CUresult result = begin_turn(&request, "cuCheckpointProcessUnlock", pid, LOCKED);
    if (result == CUDA_SUCCESS) {
        Command command = command_of(&request, COMMAND_UNLOCK);
        result = command_run(request.target, pid, &command);
    }
    return end(&request, result);
}

static CUresult custom_allowed(int pid) {
    if (!sim.world->custom_storage) return CUDA_ERROR_INVALID_VALUE; /* reserved bytes, to an older driver */
    if (pid == getpid()) return CUDA_ERROR_NOT_SUPPORTED;
    return sim.initialized && sim.pid == getpid() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

EXPORT CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args) {
    Request request;
    CUcheckpointCustomStorageInfo **out = args ? args->customStorageInfo_out : NULL;
    CUresult result = begin_turn(&request, "cuCheckpointProcessCheckpoint", pid, LOCKED);
    if (result == CUDA_SUCCESS && out) result = custom_allowed(pid);
    if (result == CUDA_SUCCESS && unsupported(request.target)) result = CUDA_ERROR_NOT_SUPPORTED;
    if (result == CUDA_SUCCESS) {
        Command command = command_of(&request, out ? COMMAND_PREPARE : COMMAND_CHECKPOINT);
        command.next_state = CHECKPOINTING;
        if (out) result = custom_contexts(request.target, command.new_gpu);
        if (result == CUDA_SUCCESS) result = command_run(request.target, pid, &command);
        if (result == CUDA_SUCCESS && out) result = custom_open(request.target, CHECKPOINTED, out);
    }
    return end(&request, result);
}

static int gpu_of_uuid(const CUuuid *uuid) {
    for (int i = 0; i < sim.world->gpus; i++)
        if (memcmp(sim.world->gpu[i].uuid, uuid->bytes, 16) == 0) return i;
    return -1;
}

/* "If an array of GPU UUID pairs is specified, it must contain every checkpointed GPU"; the same chip type. */
static CUresult remap(const Process *target, const CUcheckpointRestoreArgs *args, int32_t *new_gpu) {
    if (!args || !args->gpuPairsCount) return CUDA_SUCCESS;
    if (!args->gpuPairs || sim.world->driver_version < 13000) return CUDA_ERROR_INVALID_VALUE;
    int listed[MAX_GPUS] = {0}, taken[MAX_GPUS] = {0};
    for (unsigned int i = 0; i < args->gpuPairsCount; i++) {
        int from = gpu_of_uuid(&args->gpuPairs[i].oldUuid), to = gpu_of_uuid(&args->gpuPairs[i].newUuid);
        if (from < 0 || to < 0 || listed[from]++ || taken[to]++) return CUDA_ERROR_INVALID_VALUE;
        if (strcmp(sim.world->gpu[from].chip, sim.world->gpu[to].chip) != 0) return CUDA_ERROR_INVALID_VALUE;
        new_gpu[from] = to;
    }
    for (uint32_t i = 0; i < target->allocations; i++)
        if (!listed[target->allocation[i].gpu]) return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args) {
    Request request;
    CUcheckpointCustomStorageInfo **out = args ? args->customStorageInfo_out : NULL;
    CUresult result = begin_turn(&request, "cuCheckpointProcessRestore", pid, CHECKPOINTED);
    if (result == CUDA_SUCCESS && out) result = custom_allowed(pid);
    if (result == CUDA_SUCCESS && !sim.world->persistence && !(sim.initialized && sim.pid == getpid())) result = CUDA_ERROR_NOT_INITIALIZED;
    if (result == CUDA_SUCCESS) {
        Command command = command_of(&request, out ? COMMAND_PREPARE : COMMAND_RESTORE);
        command.next_state = RESTORING;
        /* Bytes come from where the checkpoint put them: the documentation has no mixed pair. */
        if (request.target->checkpoint_kind != (out ? KIND_CUSTOM : KIND_HOST)) result = CUDA_ERROR_INVALID_VALUE;
        if (result == CUDA_SUCCESS) result = remap(request.target, args, command.new_gpu);
        if (result == CUDA_SUCCESS && out) result = custom_contexts(request.target, command.new_gpu);
        if (result == CUDA_SUCCESS) result = command_run(request.target, pid, &command);
        if (result == CUDA_SUCCESS && out) result = custom_open(request.target, LOCKED, out);
    }
    return end(&request, result);
}
