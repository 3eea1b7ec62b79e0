#define _GNU_SOURCE
#include "ring.h"

#include "futex.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/prctl.h>

#define STACK_BYTES (256u << 10)
#define PATIENCE 2000 /* turns that the caller waits awake for the last workers: a step takes some microseconds */

static struct {
    pthread_mutex_t turn; /* of callers */
    unsigned workers;
    cpu_set_t cpus;
    int pinned;

    /* The work. Written while nobody can be inside: see `work_on`. */
    ckpt_work *work;
    void *context;
    size_t total, step;

    _Atomic uint32_t posted;  /* futex of the workers: goes up with each work */
    _Atomic uint32_t open;    /* a work may be entered */
    _Atomic int seats;        /* workers that it still has room for */
    _Atomic size_t next;      /* first byte that nobody took */
    _Atomic uint32_t inside;  /* futex of the caller: workers that may look at the work */
    _Atomic uint32_t waiting; /* the caller sleeps on it */
} ring = {.turn = PTHREAD_MUTEX_INITIALIZER};

static void take_steps(void) {
    for (;;) {
        size_t start = atomic_fetch_add(&ring.next, ring.step);
        if (start >= ring.total) return;
        size_t left = ring.total - start;
        ring.work(ring.context, start, left < ring.step ? left : ring.step);
    }
}

/* `inside` goes up before `open` is looked at, and the caller closes before it looks at `inside`: either the worker
 * sees a closed door, or the caller sees the worker. */
static void work_on(void) {
    atomic_fetch_add(&ring.inside, 1);
    if (atomic_load(&ring.open) && atomic_fetch_sub(&ring.seats, 1) > 0) take_steps();
    if (atomic_fetch_sub(&ring.inside, 1) == 1 && atomic_load(&ring.waiting)) ckpt_futex_wake(&ring.inside, 1, 0);
}

static void *worker(void *unused) {
    (void)unused;
    prctl(PR_SET_NAME, "ckptpipe-copy", 0, 0, 0);
    if (ring.pinned) pthread_setaffinity_np(pthread_self(), sizeof ring.cpus, &ring.cpus);
    uint32_t seen = 0;
    for (;;) {
        uint32_t posted = atomic_load(&ring.posted);
        if (posted == seen) {
            ckpt_futex_wait(&ring.posted, posted, 0, 0);
            continue;
        }
        seen = posted;
        work_on();
    }
    return NULL;
}

unsigned ckpt_ring_start(unsigned threads, const cpu_set_t *cpus) {
    pthread_mutex_lock(&ring.turn);
    if (!ring.workers && threads > 1) {
        if (cpus) {
            ring.cpus = *cpus;
            ring.pinned = 1;
        }
        sigset_t all, before;
        pthread_attr_t attributes;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        pthread_attr_init(&attributes);
        pthread_attr_setstacksize(&attributes, STACK_BYTES);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        while (ring.workers < threads - 1) {
            pthread_t thread;
            if (pthread_create(&thread, &attributes, worker, NULL)) break;
            ring.workers++;
        }
        pthread_attr_destroy(&attributes);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    unsigned all = ring.workers + 1;
    pthread_mutex_unlock(&ring.turn);
    return all;
}

unsigned ckpt_ring_threads(void) { return ring.workers + 1; }

void ckpt_ring_run(ckpt_work *work, void *context, size_t total, size_t step, unsigned width) {
    if (!total) return;
    int before = errno;
    pthread_mutex_lock(&ring.turn);
    unsigned helpers = ring.workers;
    if (width && width - 1 < helpers) helpers = width - 1;
    size_t steps = (total + step - 1) / step;
    if (steps - 1 < helpers) helpers = (unsigned)(steps - 1);
    ring.work = work;
    ring.context = context;
    ring.total = total;
    ring.step = step;
    atomic_store(&ring.next, 0);
    if (helpers) {
        atomic_store(&ring.seats, (int)helpers);
        atomic_store(&ring.open, 1);
        atomic_fetch_add(&ring.posted, 1);
        ckpt_futex_wake(&ring.posted, (int)helpers, 0);
    }
    take_steps();
    if (helpers) {
        atomic_store(&ring.open, 0);
        for (int i = 0; i < PATIENCE && atomic_load(&ring.inside); i++) ckpt_pause();
        uint32_t inside;
        atomic_store(&ring.waiting, 1);
        while ((inside = atomic_load(&ring.inside))) ckpt_futex_wait(&ring.inside, inside, 0, 0);
        atomic_store(&ring.waiting, 0);
    }
    pthread_mutex_unlock(&ring.turn);
    errno = before;
}

void ckpt_ring_forget(void) {
    pthread_mutex_init(&ring.turn, NULL);
    ring.workers = 0;
    ring.pinned = 0;
    atomic_store(&ring.open, 0);
    atomic_store(&ring.inside, 0);
    atomic_store(&ring.waiting, 0);
}
