/* What a test does to a world from outside: makes it, orders faults, sets links, looks at processes. Built into a
 * library of its own, so that a test's process doesn't hold a simulated libcuda. */
#define _GNU_SOURCE
#include "world.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int make_file(const char *directory, const char *name, off_t bytes) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) return -errno;
    int result = ftruncate(fd, bytes) == 0 ? 0 : -errno;
    close(fd);
    return result;
}

EXPORT int control_create(const char *directory, World **out, int gpus, int driver_version, int custom_storage,
                          int persistence, int refuse_at_lock, uint64_t context_bytes, uint64_t image_address) {
    if (gpus < 1 || gpus > MAX_GPUS || strlen(directory) >= sizeof((World *)0)->directory) return -EINVAL;
    for (int i = 0; i < gpus; i++) {
        char name[16];
        snprintf(name, sizeof name, "gpu-%d", i);
        int result = make_file(directory, name, (off_t)GPU_SPAN);
        if (result < 0) return result;
    }
    int result = make_file(directory, "world", sizeof(World));
    if (result < 0) return result;
    char path[512];
    snprintf(path, sizeof path, "%s/world", directory);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return -errno;
    World *world = mmap(NULL, sizeof(World), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (world == MAP_FAILED) return -errno;
    robust_init(&world->mutex);
    world->driver_version = driver_version;
    world->custom_storage = custom_storage;
    world->persistence = persistence;
    world->refuse_at_lock = refuse_at_lock;
    world->gpus = gpus;
    world->context_bytes = context_bytes;
    world->image_address = image_address;
    snprintf(world->directory, sizeof world->directory, "%s", directory);
    world->bytes = sizeof(World);
    world->magic = WORLD_MAGIC;
    *out = world;
    return 0;
}

EXPORT void control_close(World *world) { world_close(world); }

EXPORT void control_gpu(World *world, int index, const char *name, const char *chip, const unsigned char *uuid,
                        int domain, int bus, int device, uint64_t memory, int mig) {
    Gpu *gpu = &world->gpu[index];
    snprintf(gpu->name, sizeof gpu->name, "%s", name);
    snprintf(gpu->chip, sizeof gpu->chip, "%s", chip);
    memcpy(gpu->uuid, uuid, 16);
    gpu->pci_domain = domain;
    gpu->pci_bus = bus;
    gpu->pci_device = device;
    gpu->memory = memory;
    gpu->mig = mig;
}

EXPORT int control_attribute(World *world, int index, int attribute, int value) {
    int32_t(*at)[2] = world->gpu[index].attribute;
    for (int i = 0; i < MAX_ATTRIBUTES; i++)
        if (at[i][0] == 0 || at[i][0] == attribute) {
            at[i][1] = value;
            at[i][0] = attribute;
            return 0;
        }
    return -ENOSPC;
}

EXPORT void control_rate(World *world, int index, int direction, int64_t rate) {
    atomic_store(&world->gpu[index].rate[direction], rate);
    atomic_fetch_add(&world->link_epoch, 1);
    futex_wake(&world->link_epoch);
}

EXPORT uint64_t control_moved(World *world, int index, int direction) {
    return atomic_load(&world->gpu[index].moved[direction]);
}

EXPORT uint64_t control_used(World *world, int index) {
    world_lock(world);
    world_reap(world);
    uint64_t used = world_used(world, index);
    world_unlock(world);
    return used;
}

EXPORT int control_fault(World *world, const Fault *order) {
    int found = -ENOSPC;
    world_lock(world);
    for (int i = 0; i < MAX_FAULTS && found < 0; i++) {
        Fault *fault = &world->fault[i];
        if (fault->call[0]) continue; /* a used one keeps its place: its count can still be read */
        *fault = *order;
        fault->armed = 1;
        atomic_fetch_add(&world->faults, 1);
        found = i;
    }
    world_unlock(world);
    return found;
}

EXPORT uint32_t control_fired(World *world, int index) { return atomic_load(&world->fault[index].fired); }

/* Waits until the fault fired `count` times; 0 when it did not in time. */
EXPORT int control_await(World *world, int index, uint32_t count, uint64_t timeout_ns) {
    uint64_t end = monotonic_ns() + timeout_ns;
    for (;;) {
        uint32_t fired = atomic_load(&world->fault[index].fired);
        uint64_t now = monotonic_ns();
        if (fired >= count) return 1;
        if (now >= end) return 0;
        futex_wait(&world->fault[index].fired, fired, end - now);
    }
}

EXPORT void control_release(World *world, int index) {
    Fault *fault = &world->fault[index];
    world_lock(world);
    fault->hold = 0;
    world_unlock(world);
    atomic_store(&fault->released, 1);
    futex_wake(&fault->released);
}

EXPORT void control_disarm(World *world, int index) {
    world_lock(world);
    if (world->fault[index].armed) {
        world->fault[index].armed = 0;
        atomic_fetch_sub(&world->faults, 1);
    }
    world->fault[index].call[0] = 0;
    world_unlock(world);
    control_release(world, index);
}

EXPORT uint64_t control_calls(World *world, const char *call) {
    for (int i = 0; i < MAX_COUNTERS && world->counter[i].call[0]; i++)
        if (strcmp(world->counter[i].call, call) == 0) return atomic_load(&world->counter[i].count);
    return 0;
}

typedef struct {
    int32_t pid, state, restore_thread, flags, allocations, resident, checkpoint_kind, operation_pid;
    uint64_t bytes[MAX_GPUS];
    uint64_t image_address, image_bytes;
    char name[16];
} ProcessView;

/* The i-th entry of the table; 0 when it is free. */
EXPORT int control_process(World *world, int i, ProcessView *view) {
    world_lock(world);
    if (i == 0) world_reap(world);
    const Process *process = &world->process[i];
    int used = process->pid != 0;
    if (used) {
        *view = (ProcessView){.pid = process->pid, .state = atomic_load(&process->state),
                              .restore_thread = process->restore_thread, .flags = (int32_t)process->flags,
                              .allocations = (int32_t)process->allocations, .resident = process->resident,
                              .checkpoint_kind = process->checkpoint_kind, .operation_pid = process->operation_pid,
                              .image_address = process->image_address, .image_bytes = process->image_bytes};
        memcpy(view->name, process->name, sizeof view->name);
        for (uint32_t k = 0; k < process->allocations; k++)
            view->bytes[process->allocation[k].gpu] += process->allocation[k].bytes;
    }
    world_unlock(world);
    return used;
}

EXPORT int control_max_processes(void) { return MAX_PROCESSES; }
EXPORT int control_fault_bytes(void) { return (int)sizeof(Fault); }
