#define _GNU_SOURCE
#include "ring.h"

#include "futex.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/prctl.h>

#define STACK_BYTES (256u << 10)
#define LANES 256
#define PATIENCE 2000 /* turns that the caller waits awake for the last workers: a step takes some microseconds */
#define COURTESY 100  /* turns that a caller without a lane leaves the workers' lanes alone */
#define TURNS 32      /* between two looks at the clock */
#define LINE 128      /* bytes that processors move together */

/* A lane has the number of the work in its upper half and how many steps are left to take in its lower half. One
 * that was taken for work `n` belongs to it: work `n` is not over before that step is reported, and only then does
 * the caller write the next one. So what describes the work may be read after a step was taken, and not before. */
struct lane {
    _Alignas(LINE) _Atomic uint64_t state;
};

static struct {
    pthread_mutex_t turn; /* of callers */
    _Atomic unsigned workers; /* that have lanes */
    unsigned made;
    uint64_t awake_ns;
    struct ckpt_ring_spare spare;
    _Atomic uint64_t stay_ns; /* of the last work: how long its workers stay awake for the next one */
    cpu_set_t cpus;
    int pinned;
    uint32_t begun; /* number of the last work before the workers were there */

    /* The work. Written while no step of it can be taken. */
    _Alignas(LINE) ckpt_step *step;
    void *context;
    size_t total, step_bytes;
    uint32_t per_lane, steps; /* steps of a lane that is full, and of all together */
    unsigned first;           /* lane that has the first step */

    _Alignas(LINE) _Atomic uint32_t posted; /* futex of the workers: the number of the last work */
    _Atomic uint32_t helpers;               /* workers below this number look at the others' lanes when theirs is done */

    _Alignas(LINE) _Atomic uint32_t resting; /* callers for whom no worker stays awake */

    _Alignas(LINE) _Atomic uint32_t sleepers; /* raised before a worker looks at `posted` for the last time */

    _Alignas(LINE) _Atomic uint32_t left; /* futex of the caller: steps that are not reported */
    _Atomic uint32_t waiting;             /* the caller sleeps on it */

    struct lane lane[LANES];
} ring = {.turn = PTHREAD_MUTEX_INITIALIZER, .spare = {.awake_us = -1}};

static _Thread_local int spares;

/* Takes steps of one lane until none is left; how many. */
static uint32_t work_in(unsigned lane, uint32_t work, struct ckpt_later *later) {
    uint32_t done = 0;
    uint64_t state = atomic_load_explicit(&ring.lane[lane].state, memory_order_relaxed);
    while (state >> 32 == work && (uint32_t)state) {
        if (!atomic_compare_exchange_weak(&ring.lane[lane].state, &state, state - 1)) continue;
        uint32_t before = (lane - ring.first) * ring.per_lane, lanes_steps = ring.steps - before;
        if (lanes_steps > ring.per_lane) lanes_steps = ring.per_lane;
        size_t start = (before + lanes_steps - (uint32_t)state) * ring.step_bytes, bytes = ring.total - start;
        ring.step(ring.context, start, bytes < ring.step_bytes ? bytes : ring.step_bytes, later);
        done++;
        state = atomic_load_explicit(&ring.lane[lane].state, memory_order_relaxed);
    }
    return done;
}

static uint32_t work_elsewhere(unsigned lane, uint32_t work) {
    uint32_t done = 0;
    unsigned lanes = ring.workers + 1;
    for (unsigned i = 1; i < lanes; i++) done += work_in((lane + i) % lanes, work, NULL);
    return done;
}

static void report(uint32_t done) {
    if (done && atomic_fetch_sub(&ring.left, done) == done && atomic_load(&ring.waiting))
        ckpt_futex_wake(&ring.left, 1, 0);
}

/* Whether there was anything for this worker. */
static int work_on(unsigned worker, uint32_t work) {
    struct ckpt_later later = {.worker = worker, .work = work};
    uint32_t own = work_in(worker, work, &later), others = 0;
    report(own);
    if (worker < atomic_load_explicit(&ring.helpers, memory_order_relaxed)) {
        others = work_elsewhere(worker, work);
        report(others);
    }
    if (later.call) later.call(&later);
    return own || others;
}

/* The number of a work that is not `seen`. `until`: of the clock, when to fall asleep. */
static uint32_t await(uint32_t seen, unsigned worker, uint64_t until) {
    uint32_t posted;
    while (until && ckpt_now_ns() < until && !atomic_load_explicit(&ring.resting, memory_order_relaxed))
        for (unsigned i = 0; i < TURNS; i++) {
            if ((posted = atomic_load_explicit(&ring.posted, memory_order_acquire)) != seen) return posted;
            ckpt_pause();
        }
    atomic_fetch_add(&ring.sleepers, 1);
    while ((posted = atomic_load(&ring.posted)) == seen)
        ckpt_futex_wait_bits(&ring.posted, seen, 1u << worker % 32);
    atomic_fetch_sub(&ring.sleepers, 1);
    return posted;
}

static _Atomic unsigned numbered;

static void *worker(void *unused) {
    unsigned number = atomic_fetch_add(&numbered, 1) + 1;
    prctl(PR_SET_NAME, "ckptpipe-copy", 0, 0, 0);
    if (ring.pinned) pthread_setaffinity_np(pthread_self(), sizeof ring.cpus, &ring.cpus);
    uint64_t until = 0;
    for (uint32_t seen = ring.begun;;) {
        seen = await(seen, number, until);
        if (!work_on(number, seen)) continue;
        uint64_t stay = atomic_load_explicit(&ring.stay_ns, memory_order_relaxed);
        until = stay ? ckpt_now_ns() + stay : 0;
    }
    return unused;
}

unsigned ckpt_ring_start(unsigned threads, const struct ckpt_ring_options *options) {
    pthread_mutex_lock(&ring.turn);
    if (threads > LANES) threads = LANES;
    if (!ring.workers && threads > 1) {
        if (options->cpus) {
            ring.cpus = *options->cpus;
            ring.pinned = 1;
        }
        ring.awake_ns = options->awake_us * 1000ull;
        atomic_store(&numbered, 0);
        ring.begun = atomic_load(&ring.posted);
        sigset_t all, before;
        pthread_attr_t attributes;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        pthread_attr_init(&attributes);
        pthread_attr_setstacksize(&attributes, STACK_BYTES);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        unsigned made = 0;
        while (made < threads - 1) {
            pthread_t thread;
            if (pthread_create(&thread, &attributes, worker, NULL)) break;
            made++;
        }
        ring.workers = ring.made = made;
        pthread_attr_destroy(&attributes);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    unsigned all = ring.workers + 1;
    pthread_mutex_unlock(&ring.turn);
    return all;
}

void ckpt_ring_limit(unsigned threads, unsigned awake_us) {
    pthread_mutex_lock(&ring.turn);
    ring.workers = threads > ring.made + 1 || !threads ? ring.made : threads - 1;
    ring.awake_ns = awake_us * 1000ull;
    pthread_mutex_unlock(&ring.turn);
}

void ckpt_ring_set_spare(const struct ckpt_ring_spare *spare) {
    pthread_mutex_lock(&ring.turn);
    ring.spare = *spare;
    pthread_mutex_unlock(&ring.turn);
}

unsigned ckpt_ring_threads(void) { return ring.workers + 1; }

unsigned ckpt_ring_asleep(void) { return atomic_load(&ring.sleepers); }

void ckpt_ring_spare(int on) { spares = on; }

void ckpt_ring_rest(int on) {
    if (on)
        atomic_fetch_add(&ring.resting, 1);
    else
        atomic_fetch_sub(&ring.resting, 1);
}

/* The lane of the caller is left out where there is somebody else. */
static unsigned first_lane(unsigned manner) { return manner & CKPT_RING_ASIDE && ring.workers ? 1 : 0; }

static unsigned spare_lanes(unsigned lanes) {
    unsigned half = (ring.workers + 2) / 2, least = CKPT_RING_SPARE_LANES;
    unsigned most = ring.spare.lanes ? ring.spare.lanes : half < least ? least : half;
    return lanes < most ? lanes : most;
}

unsigned ckpt_ring_lanes(unsigned manner) {
    unsigned lanes = ring.workers + 1 - first_lane(manner);
    return spares ? spare_lanes(lanes) : lanes;
}

int ckpt_ring_wanted(const struct ckpt_later *later) {
    return atomic_load_explicit(&ring.posted, memory_order_relaxed) != later->work;
}

/* Bits of the workers of lanes [first, end). */
static uint32_t bits_of(unsigned first, unsigned end) {
    uint32_t bits = 0;
    for (unsigned i = first; i < end; i++) bits |= 1u << i % 32;
    return bits;
}

/* Lanes [first, first + lanes) get their steps; the others keep the number of an older work. */
static uint32_t post(unsigned first, unsigned lanes) {
    uint32_t work = atomic_load_explicit(&ring.posted, memory_order_relaxed) + 1;
    for (unsigned i = 0; i < lanes; i++) {
        uint32_t before = i * ring.per_lane, count = before < ring.steps ? ring.steps - before : 0;
        if (count > ring.per_lane) count = ring.per_lane;
        atomic_store_explicit(&ring.lane[first + i].state, (uint64_t)work << 32 | count, memory_order_release);
    }
    atomic_store(&ring.posted, work);
    return work;
}

static void wait_for_the_last(void) {
    for (int i = 0; i < PATIENCE; i++) {
        if (!atomic_load(&ring.left)) return;
        ckpt_pause();
    }
    uint32_t left;
    atomic_store(&ring.waiting, 1);
    while ((left = atomic_load(&ring.left))) ckpt_futex_wait(&ring.left, left, 0, 0);
    atomic_store(&ring.waiting, 0);
}

void ckpt_ring_run(ckpt_step *step, void *context, size_t total, size_t step_bytes, unsigned width, unsigned manner) {
    if (!total) return;
    int before = errno;
    pthread_mutex_lock(&ring.turn);
    if (width) manner = CKPT_RING_PLAIN; /* the caller is one of them */
    unsigned lanes = ckpt_ring_lanes(manner), first = first_lane(manner);
    if (width && width < lanes) lanes = width;
    size_t steps = (total + step_bytes - 1) / step_bytes;
    if (steps < lanes) lanes = (unsigned)steps;
    ring.step = step;
    ring.context = context;
    ring.total = total;
    ring.step_bytes = step_bytes;
    ring.steps = (uint32_t)steps;
    ring.per_lane = (uint32_t)((steps + lanes - 1) / lanes);
    ring.first = first;
    uint64_t stay = spares && ring.spare.awake_us >= 0 ? (uint64_t)ring.spare.awake_us * 1000u : ring.awake_ns;
    atomic_store_explicit(&ring.stay_ns, stay, memory_order_relaxed);
    atomic_store(&ring.left, (uint32_t)steps);
    int help = ring.per_lane > 1 || atomic_load(&ring.sleepers);
    atomic_store_explicit(&ring.helpers, help ? first + lanes : 0, memory_order_relaxed);
    uint32_t work = post(first, lanes);
    if (first + lanes > 1) {
        /* A worker that is about to sleep raises `sleepers` before its last look at `posted`, which was raised here
         * before this look at `sleepers`: one of both sees the other. */
        int asleep = atomic_load(&ring.sleepers) != 0;
        if (asleep) ckpt_futex_wake_bits(&ring.posted, INT_MAX, bits_of(first ? first : 1, first + lanes));
        if (first && !asleep)
            for (int i = 0; i < COURTESY && atomic_load(&ring.left); i++) ckpt_pause();
    }
    report(work_in(0, work, NULL));
    report(work_elsewhere(0, work));
    wait_for_the_last();
    pthread_mutex_unlock(&ring.turn);
    errno = before;
}

void ckpt_ring_forget(void) {
    pthread_mutex_init(&ring.turn, NULL);
    ring.workers = ring.made = 0;
    ring.pinned = 0;
    atomic_store(&ring.sleepers, 0);
    atomic_store(&ring.resting, 0);
    spares = 0;
    atomic_store(&ring.waiting, 0);
}
