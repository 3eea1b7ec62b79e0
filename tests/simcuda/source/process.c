/* This process in the world: cuInit registers it, the restore thread serves checkpoint commands, reset leaves. */
#define _GNU_SOURCE
#include "sim.h"

#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

Sim sim = {.mutex = PTHREAD_MUTEX_INITIALIZER};
_Thread_local int sim_worker_thread, sim_worker_ordinal;
static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;

EXPORT int simcuda_version(void) { return 1; }

int physical(int ordinal) { return sim.process->gpu_of[ordinal]; }

void process_wait(void) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += (long)WAIT_NS;
    if (until.tv_nsec >= 1000000000l) {
        until.tv_nsec -= 1000000000l;
        until.tv_sec++;
    }
    pthread_cond_timedwait(&sim.progress, &sim.mutex, &until);
}

CUresult process_attach(void) {
    pthread_mutex_lock(&starting);
    if (!sim.world) {
        const char *directory = getenv("SIMCUDA_DIR");
        if (directory && directory[0]) sim.world = world_open(directory);
        if (directory && directory[0] && !sim.world) perror("simulated CUDA driver: SIMCUDA_DIR");
    }
    pthread_mutex_unlock(&starting);
    return sim.world ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

static int uuid_matches(const Gpu *gpu, const char *text, size_t length) {
    char uuid[48], *end = uuid + snprintf(uuid, sizeof uuid, "GPU-");
    for (int i = 0; i < 16; i++)
        end += snprintf(end, 8, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", gpu->uuid[i]);
    return length > 4 && length <= strlen(uuid) && strncmp(uuid, text, length) == 0;
}

/* CUDA_VISIBLE_DEVICES: ordinals or UUIDs (or beginnings of them); the first unknown one ends the list. */
static int visible(int32_t *gpu_of) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    int count = 0;
    if (!text) {
        for (; count < sim.world->gpus; count++) gpu_of[count] = count;
        return count;
    }
    while (*text && count < MAX_GPUS) {
        size_t length = strcspn(text, ",");
        char *end;
        long number = strtol(text, &end, 10);
        int found = -1;
        if (end == text + length && length && number >= 0 && number < sim.world->gpus) found = (int)number;
        for (int i = 0; i < sim.world->gpus && found < 0; i++)
            if (uuid_matches(&sim.world->gpu[i], text, length)) found = i;
        if (found < 0) break;
        gpu_of[count++] = found;
        text += length;
        if (*text == ',') text++;
    }
    return count;
}

static CUresult map_memory(void) {
    for (int i = 0; i < sim.world->gpus; i++) {
        char path[PATH_MAX];
        snprintf(path, sizeof path, "%s/gpu-%d", sim.world->directory, i);
        int fd = open(path, O_RDWR | O_CLOEXEC);
        if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
        void *memory = mmap(NULL, GPU_SPAN, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        close(fd);
        if (memory == MAP_FAILED) return CUDA_ERROR_OPERATING_SYSTEM;
        sim.memory[i] = memory;
    }
    void *arena = mmap(NULL, ARENA_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (arena == MAP_FAILED) return CUDA_ERROR_OPERATING_SYSTEM;
    sim.arena = (uint64_t)arena;
    sim.arena_next = (sim.arena + PIECE_BYTES - 1) / PIECE_BYTES * PIECE_BYTES;
    return CUDA_SUCCESS;
}

static CUresult take_entry(void) {
    World *world = sim.world;
    world_lock(world);
    world_reap(world);
    for (uint32_t i = 0; i < MAX_PROCESSES; i++) {
        Process *process = &world->process[(world->next_process + i) % MAX_PROCESSES];
        if (process->pid) continue;
        world->next_process = (world->next_process + i + 1) % MAX_PROCESSES;
        memset(process, 0, offsetof(Process, allocation));
        robust_init(&process->command_mutex);
        process->command.fault = -1;
        process->start_time = process_start_time(process_id());
        process->resident = 1;
        FILE *comm = fopen("/proc/self/comm", "re");
        if (comm) {
            if (fscanf(comm, "%15[^\n]", process->name) != 1) process->name[0] = 0;
            fclose(comm);
        }
        process->gpus = visible(process->gpu_of);
        const char *declared = getenv("SIMCUDA_DECLARE");
        if (declared && strstr(declared, "uvm")) process->flags |= FLAG_UVM;
        if (declared && strstr(declared, "ipc")) process->flags |= FLAG_IPC;
        process->pid = process_id();
        sim.process = process;
        break;
    }
    world_unlock(world);
    return sim.process ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

static CUresult start_restore_thread(void) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&sim.restore_thread, NULL, restore_thread_main, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) return CUDA_ERROR_OPERATING_SYSTEM;
    pthread_mutex_lock(&sim.mutex);
    while (!sim.process->restore_thread) process_wait();
    pthread_mutex_unlock(&sim.mutex);
    return CUDA_SUCCESS;
}

CUresult process_init(void) {
    if (process_attach() != CUDA_SUCCESS) return CUDA_ERROR_NO_DEVICE;
    pthread_mutex_lock(&starting);
    CUresult result = CUDA_SUCCESS;
    if (sim.initialized && sim.pid != getpid()) {
        result = CUDA_ERROR_NOT_INITIALIZED; /* a forked child can't use its parent's driver */
    } else if (!sim.initialized) {
        sim.pid = getpid();
        pthread_condattr_t monotonic;
        pthread_condattr_init(&monotonic);
        pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
        pthread_cond_init(&sim.progress, &monotonic);
        pthread_condattr_destroy(&monotonic);
        result = map_memory();
        if (result == CUDA_SUCCESS) result = take_entry();
        if (result == CUDA_SUCCESS) {
            sim.gpus = sim.process->gpus;
            if (!sim.gpus) result = CUDA_ERROR_NO_DEVICE;
        }
        if (result == CUDA_SUCCESS) result = start_restore_thread();
        if (result == CUDA_SUCCESS) sim.initialized = 1;
        if (result != CUDA_SUCCESS && sim.process) {
            sim.process->pid = 0;
            sim.process = NULL;
        }
    }
    pthread_mutex_unlock(&starting);
    return result;
}

EXPORT CUresult cuInit(unsigned int flags) {
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (process_attach() == CUDA_SUCCESS) {
        count_call(sim.world, "cuInit");
        Fault fault;
        int index = fault_take(sim.world, "cuInit", getpid(), 0, &fault);
        CUresult error = index >= 0 ? fault_act(sim.world, index, getpid(), 0) : CUDA_SUCCESS;
        if (error != CUDA_SUCCESS) return error;
    }
    return process_init();
}

/* For a test that uses the driver in its own process: ends the threads, frees everything, leaves the world.
 * The next cuInit joins the world that SIMCUDA_DIR names then. */
EXPORT void simcuda_reset(void) {
    pthread_mutex_lock(&starting);
    if (sim.initialized && sim.pid == getpid()) {
        pthread_mutex_lock(&sim.mutex);
        sim.stopping = 1;
        for (Stream *stream = sim.streams; stream; stream = stream->next) pthread_cond_broadcast(&stream->arrived);
        pthread_cond_broadcast(&sim.progress);
        while (sim.in_flight) process_wait();
        pthread_mutex_unlock(&sim.mutex);
        atomic_fetch_add(&sim.process->command.posted, 1); /* a command of kind 0: look again */
        futex_wake(&sim.process->command.posted);
        pthread_join(sim.restore_thread, NULL);
        operations_forget();
        for (int i = 0; i < MAX_GPUS; i++)
            if (sim.primary[i].alive) context_destroy(&sim.primary[i]);
        while (sim.contexts) context_destroy(sim.contexts);
        pthread_mutex_lock(&sim.mutex);
        while (sim.threads) process_wait();
        pthread_mutex_unlock(&sim.mutex);
        memory_reset();
        world_lock(sim.world);
        world_punch(sim.world, sim.process);
        sim.process->allocations = 0;
        sim.process->pid = 0;
        world_unlock(sim.world);
        for (int i = 0; i < sim.world->gpus; i++) munmap(sim.memory[i], GPU_SPAN);
        munmap((void *)sim.arena, ARENA_BYTES);
        pthread_cond_destroy(&sim.progress);
    }
    World *world = sim.world;
    if (sim.pid == 0 || sim.pid == getpid()) {
        memset((char *)&sim + sizeof sim.mutex, 0, sizeof sim - sizeof sim.mutex);
        context_forget_thread();
        if (world) world_close(world);
    }
    pthread_mutex_unlock(&starting);
}
