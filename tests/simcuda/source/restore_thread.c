/* The target's side: a thread that every process with cuInit has, which does what cuCheckpointProcess* asks.
 *
 * The host image is made as the real driver makes it: one mmap through libc, filled by libc's memcpy in pieces of
 * 2 MiB in ascending order but for four that come late, read back strictly in sequence, given back by munmap.
 *
 * In the target's environment: SIMCUDA_REWRITES=N, so many pieces of the first half hold something else until the
 * end, when they are copied again. SIMCUDA_UNSEEN=N: the same, but the last time by no function of libc;
 * SIMCUDA_UNSEEN=all: nothing is copied by one. */
#define _GNU_SOURCE
#include "sim.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LATE_PIECES 4
#define LATE_BY 3 /* how many pieces overtake a late one */

typedef struct {
    unsigned char *device;
    uint64_t at, bytes; /* in the image */
} Piece;

static uint64_t image_bytes(const Process *process) {
    uint64_t total = 0;
    for (uint32_t i = 0; i < process->allocations; i++) total += process->allocation[i].bytes;
    return (total + PIECE_BYTES - 1) / PIECE_BYTES * PIECE_BYTES;
}

static Piece *cut(const Process *process, size_t *count) {
    size_t total = 0, k = 0;
    for (uint32_t i = 0; i < process->allocations; i++)
        total += (process->allocation[i].bytes + PIECE_BYTES - 1) / PIECE_BYTES;
    Piece *pieces = malloc((total + 1) * sizeof *pieces);
    uint64_t at = 0;
    for (uint32_t i = 0; pieces && i < process->allocations; i++) {
        const Allocation *allocation = &process->allocation[i];
        for (uint64_t done = 0; done < allocation->bytes; done += PIECE_BYTES, k++) {
            uint64_t left = allocation->bytes - done;
            pieces[k] = (Piece){sim.memory[allocation->gpu] + allocation->offset + done, at + done,
                                left < PIECE_BYTES ? left : PIECE_BYTES};
        }
        at += allocation->bytes;
    }
    *count = k;
    return pieces;
}

/* In the middle of the work: an error ordered by a test, or its death. */
static CUresult middle(Process *process) {
    Command *command = &process->command;
    return command->fault >= 0 ? fault_act(sim.world, command->fault, command->caller, process->pid) : CUDA_SUCCESS;
}

static CUresult lock(Process *process) {
    uint64_t deadline = process->command.deadline;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&sim.mutex);
    sim.gate_closed = 1;
    while (sim.in_flight && !sim.stopping && !(deadline && monotonic_ns() >= deadline)) process_wait();
    if (sim.in_flight) result = CUDA_ERROR_NOT_READY;
    pthread_mutex_unlock(&sim.mutex);
    if (result == CUDA_SUCCESS && streams_wait_all(NULL, deadline) == CUDA_ERROR_NOT_READY)
        result = CUDA_ERROR_NOT_READY; /* work submitted before the lock ends first */
    if (result == CUDA_SUCCESS) result = middle(process);
    pthread_mutex_lock(&sim.mutex);
    if (result == CUDA_SUCCESS) {
        atomic_store(&process->state, LOCKED);
    } else {
        sim.gate_closed = 0;
        pthread_cond_broadcast(&sim.progress);
    }
    pthread_mutex_unlock(&sim.mutex);
    return result;
}

static CUresult unlock(Process *process) {
    CUresult result = middle(process);
    if (result != CUDA_SUCCESS) return result;
    pthread_mutex_lock(&sim.mutex);
    atomic_store(&process->state, RUNNING);
    sim.gate_closed = 0;
    pthread_cond_broadcast(&sim.progress);
    pthread_mutex_unlock(&sim.mutex);
    return CUDA_SUCCESS;
}

static void release_gpu(Process *process) {
    for (uint32_t i = 0; i < process->allocations; i++) {
        const Allocation *allocation = &process->allocation[i];
        madvise(sim.memory[allocation->gpu] + allocation->offset, allocation->bytes, MADV_REMOVE);
    }
    world_lock(sim.world);
    process->resident = 0;
    world_unlock(sim.world);
}

static size_t asked_for(const char *name, size_t count) {
    const char *text = getenv(name);
    size_t wanted = text ? strtoul(text, NULL, 10) : 0;
    return wanted < count / 4 ? wanted : count / 4;
}

/* Which of `count` pieces have their contents only at the end: `rewritten` even ones, then `unseen` odd ones. */
static int comes_again(size_t i, size_t rewritten, size_t unseen) {
    return i / 2 < (i % 2 ? unseen : rewritten);
}

static void copy_something_else(unsigned char *to, const unsigned char *from, size_t bytes) {
    unsigned char *inverted = malloc(bytes);
    if (!inverted) abort();
    for (size_t i = 0; i < bytes; i++) inverted[i] = (unsigned char)~from[i];
    memcpy(to, inverted, bytes);
    free(inverted);
}

static void copy_unseen(volatile unsigned char *to, const unsigned char *from, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) to[i] = from[i];
}

static void copy_piece(unsigned char *to, const unsigned char *from, size_t bytes) {
    const char *text = getenv("SIMCUDA_UNSEEN");
    if (text && strcmp(text, "all") == 0) copy_unseen(to, from, bytes);
    else memcpy(to, from, bytes);
}

static CUresult checkpoint(Process *process) {
    uint64_t bytes = image_bytes(process);
    unsigned char *image = NULL;
    if (bytes) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE;
        if (sim.world->image_address) flags |= MAP_FIXED;
        image = mmap((void *)sim.world->image_address, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (image == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    }
    size_t count, late[LATE_PIECES], waiting = 0, taken = 0;
    Piece *pieces = cut(process, &count);
    if (!pieces) abort();
    if (!count) {
        CUresult result = middle(process);
        free(pieces);
        if (result != CUDA_SUCCESS) return result;
        pieces = NULL;
    }
    size_t rewritten = asked_for("SIMCUDA_REWRITES", count), unseen = asked_for("SIMCUDA_UNSEEN", count);
    for (size_t i = 0; i < count; i++) {
        if (i == count / 2) {
            CUresult result = middle(process);
            if (result != CUDA_SUCCESS) {
                munmap(image, bytes);
                free(pieces);
                return result;
            }
        }
        if (count >= 5 * (LATE_BY + 1) && taken < LATE_PIECES && i == (taken + 1) * count / 5) {
            late[taken++] = i;
        } else if (comes_again(i, rewritten, unseen)) {
            copy_something_else(image + pieces[i].at, pieces[i].device, pieces[i].bytes);
        } else {
            copy_piece(image + pieces[i].at, pieces[i].device, pieces[i].bytes);
        }
        if (waiting < taken && (i == late[waiting] + LATE_BY || i + 1 == count)) {
            const Piece *piece = &pieces[late[waiting++]];
            copy_piece(image + piece->at, piece->device, piece->bytes);
        }
    }
    for (size_t i = 0; i < count; i++) {
        if (!comes_again(i, rewritten, unseen)) continue;
        if (i % 2) copy_unseen(image + pieces[i].at, pieces[i].device, pieces[i].bytes);
        else copy_piece(image + pieces[i].at, pieces[i].device, pieces[i].bytes);
    }
    free(pieces);
    release_gpu(process);
    process->image_address = (uint64_t)image;
    process->image_bytes = bytes;
    process->checkpoint_kind = KIND_HOST;
    atomic_store(&process->state, CHECKPOINTED);
    return CUDA_SUCCESS;
}

/* Takes GPU memory again, on other GPUs where the caller mapped them so. Addresses stay. */
static CUresult claim(Process *process) {
    const int32_t *new_gpu = process->command.new_gpu;
    CUresult result = CUDA_SUCCESS;
    world_lock(sim.world);
    world_reap(sim.world);
    for (int gpu = 0; gpu < sim.world->gpus; gpu++) {
        uint64_t wanted = 0, moved = 0;
        for (uint32_t i = 0; i < process->allocations; i++) {
            const Allocation *allocation = &process->allocation[i];
            if (new_gpu[allocation->gpu] != gpu) continue;
            wanted += allocation->bytes;
            if (allocation->gpu != gpu) moved += allocation->bytes;
        }
        const Gpu *place = &sim.world->gpu[gpu];
        if (world_used(sim.world, gpu) + wanted > place->memory || place->next_offset + moved > GPU_SPAN)
            result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result != CUDA_SUCCESS) {
        world_unlock(sim.world);
        return result;
    }
    Allocation *before = malloc((process->allocations + 1) * sizeof *before);
    if (!before) abort();
    memcpy(before, process->allocation, process->allocations * sizeof *before);
    for (uint32_t i = 0; i < process->allocations; i++) {
        Allocation *allocation = &process->allocation[i];
        int gpu = new_gpu[allocation->gpu];
        if (gpu == allocation->gpu) continue;
        allocation->gpu = gpu;
        allocation->offset = sim.world->gpu[gpu].next_offset;
        sim.world->gpu[gpu].next_offset += allocation->bytes;
    }
    for (int i = 0; i < process->gpus; i++) process->gpu_of[i] = new_gpu[process->gpu_of[i]];
    process->resident = 1;
    world_unlock(sim.world);
    pthread_mutex_lock(&sim.mutex);
    for (uint32_t i = 0; i < process->allocations; i++) {
        const Allocation *allocation = &process->allocation[i];
        if (allocation->gpu == before[i].gpu) continue;
        for (size_t k = 0; k < sim.segments; k++) { /* offsets are never used twice: none is met again */
            Segment *segment = &sim.segment[k];
            uint64_t skip = segment->offset - before[i].offset;
            if (segment->kind == SEGMENT_MAPPED || segment->gpu != before[i].gpu || skip >= allocation->bytes) continue;
            segment->gpu = allocation->gpu;
            segment->offset = allocation->offset + skip;
        }
        virtual_moved(&before[i], allocation);
    }
    pthread_mutex_unlock(&sim.mutex);
    free(before);
    return CUDA_SUCCESS;
}

/* What was restored holds what each context had in its own block; else the context is broken, as it would be. */
static void check_contexts(void) {
    for (int i = 0; i < MAX_GPUS; i++)
        if (sim.primary[i].alive) context_check(&sim.primary[i]);
    for (Context *context = sim.contexts; context; context = context->next) context_check(context);
}

static CUresult restore(Process *process) {
    CUresult result = claim(process);
    if (result != CUDA_SUCCESS) return result;
    size_t count;
    Piece *pieces = cut(process, &count);
    if (!pieces) abort();
    unsigned char *image = (unsigned char *)process->image_address;
    for (size_t i = 0; i <= count; i++) {
        if (i == count / 2 && (result = middle(process)) != CUDA_SUCCESS) break;
        if (i < count) memcpy(pieces[i].device, image + pieces[i].at, pieces[i].bytes);
    }
    free(pieces);
    if (result != CUDA_SUCCESS) {
        release_gpu(process);
        return result;
    }
    if (image) munmap(image, process->image_bytes);
    process->image_address = process->image_bytes = 0;
    process->checkpoint_kind = KIND_NONE;
    check_contexts();
    atomic_store(&process->state, LOCKED);
    return CUDA_SUCCESS;
}

/* Custom storage: the caller maps the memory after PREPARE and has copied before FINISH. */
static CUresult prepare(Process *process) {
    CUresult result = CUDA_SUCCESS;
    int restoring = process->command.next_state == RESTORING;
    if (restoring) result = claim(process);
    if (result == CUDA_SUCCESS) result = middle(process);
    if (result != CUDA_SUCCESS) {
        if (restoring && process->resident) release_gpu(process);
        return result;
    }
    process->operation_start_time = process_start_time(process->command.caller);
    process->operation_pid = process->command.caller;
    atomic_store(&process->state, process->command.next_state);
    return CUDA_SUCCESS;
}

static CUresult finish(Process *process) {
    CUresult result = middle(process);
    if (result != CUDA_SUCCESS) return result;
    int checkpointed = process->command.next_state == CHECKPOINTED;
    if (checkpointed) release_gpu(process);
    else check_contexts();
    process->checkpoint_kind = checkpointed ? KIND_CUSTOM : KIND_NONE;
    process->operation_pid = 0;
    atomic_store(&process->state, process->command.next_state);
    return CUDA_SUCCESS;
}

void *restore_thread_main(void *unused) {
    (void)unused;
    prctl(PR_SET_NAME, "sim-restore", 0, 0, 0);
    Process *process = sim.process;
    Command *command = &process->command;
    void *volatile first = malloc(1);
    free(first); /* the thread's arena is made now: the image is the only mapping that a checkpoint brings */
    pthread_mutex_lock(&sim.mutex);
    process->restore_thread = (int32_t)syscall(SYS_gettid);
    pthread_cond_broadcast(&sim.progress);
    pthread_mutex_unlock(&sim.mutex);
    while (!sim.stopping) {
        uint32_t done = atomic_load(&command->done);
        if (atomic_load(&command->posted) == done) {
            futex_wait(&command->posted, done, 1000000000ull);
            continue;
        }
        switch (command->kind) {
        case COMMAND_LOCK: command->result = lock(process); break;
        case COMMAND_UNLOCK: command->result = unlock(process); break;
        case COMMAND_CHECKPOINT: command->result = checkpoint(process); break;
        case COMMAND_RESTORE: command->result = restore(process); break;
        case COMMAND_PREPARE: command->result = prepare(process); break;
        case COMMAND_FINISH: command->result = finish(process); break;
        default: command->result = CUDA_ERROR_UNKNOWN;
        }
        atomic_store(&command->done, done + 1);
        futex_wake(&command->done);
    }
    return NULL;
}
