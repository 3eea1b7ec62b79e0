/* Every byte of every work exactly once, with callers side by side, before the start, and after a fork. */
#define _GNU_SOURCE
#include "check.h"
#include "ring.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

struct counts {
    _Atomic unsigned char *seen;
    _Atomic unsigned inside, most;
};

static void count(void *context, size_t start, size_t bytes, struct ckpt_later *later) {
    (void)later;
    struct counts *counts = context;
    unsigned now = atomic_fetch_add(&counts->inside, 1) + 1, most = atomic_load(&counts->most);
    while (now > most && !atomic_compare_exchange_weak(&counts->most, &most, now)) continue;
    for (size_t i = 0; i < bytes; i++) atomic_fetch_add(&counts->seen[start + i], 1);
    atomic_fetch_sub(&counts->inside, 1);
}

static void work(size_t total, size_t step, unsigned width) {
    struct counts counts = {calloc(total + 1, 1), 0, 0};
    errno = 5;
    ckpt_ring_run(count, &counts, total, step, width, total % 2 ? CKPT_RING_ASIDE : CKPT_RING_PLAIN);
    CHECK(errno == 5);
    CHECK(atomic_load(&counts.inside) == 0);
    for (size_t i = 0; i < total; i++) CHECK(atomic_load(&counts.seen[i]) == 1);
    CHECK(!width || atomic_load(&counts.most) <= width);
    free((void *)counts.seen);
}

static void *many(void *unused) {
    for (unsigned i = 0; i < 300; i++) work(1 + i * 7, 1 + i % 64, i % 4);
    return unused;
}

/* Fewer take part, and while the caller rests nobody waits awake; other callers are not concerned. */
static void *sparingly(void *unused) {
    const struct ckpt_ring_spare few = {2, -1}, usual = {0, -1};
    CHECK(ckpt_ring_lanes(CKPT_RING_PLAIN) == 4);
    ckpt_ring_set_spare(&few);
    ckpt_ring_spare(1);
    CHECK(ckpt_ring_lanes(CKPT_RING_PLAIN) == 2 && ckpt_ring_lanes(CKPT_RING_ASIDE) == 2);
    for (unsigned i = 0; i < 300; i++) {
        struct counts counts = {calloc(1000, 1), 0, 0};
        unsigned aside = i % 2; /* a caller without a lane takes what is left over */
        ckpt_ring_run(count, &counts, 1000, 10, 0, aside ? CKPT_RING_ASIDE : CKPT_RING_PLAIN);
        for (size_t k = 0; k < 1000; k++) CHECK(atomic_load(&counts.seen[k]) == 1);
        CHECK(atomic_load(&counts.most) <= 2 + aside);
        free((void *)counts.seen);
    }
    ckpt_ring_limit(4, 1u << 30); /* awake for ever */
    work(1000, 10, 0);
    ckpt_ring_rest(1);
    while (ckpt_ring_asleep() < 3) sched_yield();
    work(1001, 10, 0);
    ckpt_ring_rest(0);
    ckpt_ring_spare(0);
    CHECK(ckpt_ring_lanes(CKPT_RING_PLAIN) == 4);
    ckpt_ring_limit(4, 20);
    ckpt_ring_set_spare(&usual);
    return unused;
}

int main(void) {
    const struct ckpt_ring_options options = {NULL, 20};
    pthread_t callers[3];
    work(1000, 10, 0);
    CHECK(ckpt_ring_threads() == 1);
    CHECK(ckpt_ring_start(4, &options) == 4);
    CHECK(ckpt_ring_start(9, &options) == 4);
    work(0, 10, 0);
    sparingly(NULL);
    for (int i = 0; i < 3; i++) CHECK(pthread_create(&callers[i], NULL, many, NULL) == 0);
    for (int i = 0; i < 3; i++) CHECK(pthread_join(callers[i], NULL) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        ckpt_ring_forget();
        CHECK(ckpt_ring_threads() == 1);
        work(1000, 10, 0);
        _exit(0);
    }
    int status = 1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    return 0;
}
