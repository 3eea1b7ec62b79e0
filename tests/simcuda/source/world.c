/* The shared world: open, lock, look after the dead. */
#define _GNU_SOURCE
#include "world.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

World *world_open(const char *directory) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/world", directory);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return NULL;
    struct stat status;
    World *world = MAP_FAILED;
    if (fstat(fd, &status) == 0 && status.st_size == (off_t)sizeof(World))
        world = mmap(NULL, sizeof(World), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    else
        errno = EINVAL;
    close(fd);
    if (world == MAP_FAILED) return NULL;
    if (world->magic != WORLD_MAGIC || world->bytes != sizeof(World)) {
        munmap(world, sizeof(World));
        errno = EINVAL;
        return NULL;
    }
    return world;
}

void world_close(World *world) { munmap(world, sizeof(World)); }

void robust_init(pthread_mutex_t *mutex) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
}

void robust_lock(pthread_mutex_t *mutex) {
    /* A process killed under the lock left at most an entry half written, which its death frees anyway. */
    if (pthread_mutex_lock(mutex) == EOWNERDEAD) pthread_mutex_consistent(mutex);
}

void world_lock(World *world) { robust_lock(&world->mutex); }
void world_unlock(World *world) { pthread_mutex_unlock(&world->mutex); }

uint64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

void futex_wait(_Atomic uint32_t *word, uint32_t value, uint64_t timeout_ns) {
    struct timespec timeout = {(time_t)(timeout_ns / 1000000000ull), (long)(timeout_ns % 1000000000ull)};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &timeout, NULL, 0);
}

void futex_wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

/* Where processes have the ids by which the world knows them: a container mounts its own /proc elsewhere. */
static const char *proc(void) {
    const char *path = getenv("SIMCUDA_PROC");
    return path && path[0] ? path : "/proc";
}

int process_id(void) {
    char path[PATH_MAX], text[16] = "";
    snprintf(path, sizeof path, "%s/self", proc());
    return readlink(path, text, sizeof text - 1) > 0 ? atoi(text) : getpid();
}

uint64_t process_start_time(int pid) {
    char path[PATH_MAX], text[1024];
    snprintf(path, sizeof path, "%s/%d/stat", proc(), pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0) return 0;
    text[length] = 0;
    const char *after = strrchr(text, ')'); /* the name can hold anything, proc(5) */
    char state;
    unsigned long long start;
    if (!after || sscanf(after + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                         &state, &start) != 2)
        return 0;
    return state == 'Z' || state == 'X' ? 0 : (uint64_t)start + 1;
}

void world_punch(World *world, const Process *process) {
    for (int gpu = 0; gpu < world->gpus; gpu++) {
        char path[PATH_MAX];
        snprintf(path, sizeof path, "%s/gpu-%d", world->directory, gpu);
        int fd = -1;
        for (uint32_t i = 0; i < process->allocations; i++) {
            const Allocation *allocation = &process->allocation[i];
            if (allocation->gpu != gpu) continue;
            if (fd < 0 && (fd = open(path, O_RDWR | O_CLOEXEC)) < 0) break; /* the world is being removed */
            fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)allocation->offset,
                      (off_t)allocation->bytes);
        }
        if (fd >= 0) close(fd);
    }
}

static int alive(int pid, uint64_t start_time) { return pid && process_start_time(pid) == start_time; }

void world_reap(World *world) {
    for (int i = 0; i < MAX_PROCESSES; i++) {
        Process *process = &world->process[i];
        if (!process->pid || alive(process->pid, process->start_time)) continue;
        /* Whoever has its memory mapped keeps it until the operation ends. */
        if (process->operation_pid && alive(process->operation_pid, process->operation_start_time)) continue;
        world_punch(world, process);
        process->allocations = 0;
        process->operation_pid = 0;
        process->pid = 0;
    }
}

uint64_t world_used(World *world, int gpu) {
    uint64_t used = 0;
    for (int i = 0; i < MAX_PROCESSES; i++) {
        const Process *process = &world->process[i];
        if (!process->pid || !process->resident) continue;
        for (uint32_t k = 0; k < process->allocations; k++)
            if (process->allocation[k].gpu == gpu) used += process->allocation[k].bytes;
    }
    return used;
}

Process *world_find(World *world, int pid) {
    for (int i = 0; i < MAX_PROCESSES; i++) {
        Process *process = &world->process[i];
        if (process->pid == pid && alive(pid, process->start_time)) return process;
    }
    return NULL;
}
