/* Errors, delays and deaths that a test ordered, and how often each call was made. */
#define _GNU_SOURCE
#include "world.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>

#define POLL_NS 20000000ull

int fault_take(World *world, const char *call, int caller, int target, Fault *copy) {
    if (!atomic_load(&world->faults)) return -1;
    int found = -1;
    world_lock(world);
    for (int i = 0; i < MAX_FAULTS; i++) {
        Fault *fault = &world->fault[i];
        if (!fault->armed || strcmp(fault->call, call) != 0) continue;
        if (fault->pid && fault->pid != caller) continue;
        if (fault->target && fault->target != target) continue;
        if (fault->nth > 1) {
            fault->nth--;
            continue;
        }
        if (found >= 0) continue; /* one fault a call; the others still count it */
        found = i;
        *copy = *fault;
        if (fault->times > 0 && --fault->times == 0) {
            fault->armed = 0;
            atomic_fetch_sub(&world->faults, 1);
        }
    }
    world_unlock(world);
    return found;
}

CUresult fault_act(World *world, int index, int caller, int target) {
    Fault *fault = &world->fault[index];
    atomic_fetch_add(&fault->fired, 1);
    futex_wake(&fault->fired);
    while (fault->hold && !atomic_load(&fault->released)) futex_wait(&fault->released, 0, POLL_NS);
    uint64_t end = monotonic_ns() + fault->delay_ms * 1000000ull;
    for (uint64_t now; fault->delay_ms && (now = monotonic_ns()) < end;)
        futex_wait(&fault->released, 0, end - now);
    if (fault->state >= 0 && target) {
        world_lock(world);
        Process *process = world_find(world, target);
        if (process) atomic_store(&process->state, fault->state);
        world_unlock(world);
    }
    if (fault->kill_target && target) {
        kill(target, SIGKILL);
        while (process_start_time(target)) usleep(1000); /* the rest of the call finds it dead */
    }
    if (fault->kill_caller) kill(caller, SIGKILL);
    return fault->error;
}

void count_call(World *world, const char *call) {
    for (int i = 0; i < MAX_COUNTERS; i++) {
        Counter *counter = &world->counter[i];
        if (strcmp(counter->call, call) == 0) {
            atomic_fetch_add(&counter->count, 1);
            return;
        }
        if (!counter->call[0]) {
            world_lock(world);
            if (!counter->call[0]) strncpy(counter->call, call, MAX_NAME - 1);
            world_unlock(world);
            i--; /* look at it again */
        }
    }
}
