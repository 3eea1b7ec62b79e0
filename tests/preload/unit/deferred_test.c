/* Pieces are stored whole, told of once, never more of them outstanding than was said, and what is drained is stored. */
#define _GNU_SOURCE
#include "check.h"
#include "deferred.h"
#include "next.h"
#include "stores.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define PIECE (64u << 10)
#define PIECES 256u

static unsigned char *pool, *from;
static _Atomic uint64_t told[PIECES], torn;
static _Atomic int over;

static void stored(const struct ckpt_stored *stored) {
    unsigned piece = (unsigned)(stored->start / PIECE);
    atomic_fetch_add(&torn, (uint64_t)stored->torn);
    CHECK(memcmp(pool + stored->start, from + stored->start, stored->end - stored->start) == 0);
    atomic_fetch_add(&told[piece], 1);
}

/* Somebody else drains all the while: a controller that settles. */
static void *drain(void *unused) {
    while (!atomic_load(&over)) ckpt_deferred_drain();
    return unused;
}

static void round_of(unsigned number, unsigned shares, unsigned most, unsigned threads, unsigned awake) {
    const struct ckpt_deferred_options options = {threads, shares, awake};
    ckpt_deferred_drain();
    ckpt_deferred_set(&options);
    memset(pool, 0, PIECES * (size_t)PIECE);
    for (unsigned i = 0; i < PIECES; i++) {
        size_t bytes = i % 5 == 4 ? 1 + i * 97 % PIECE : PIECE;
        struct ckpt_stored one = {stored, 0, i * (uint64_t)PIECE, i * (uint64_t)PIECE + bytes, 0};
        ckpt_deferred_post(pool + i * (size_t)PIECE, from + i * (size_t)PIECE, bytes, &one);
        ckpt_deferred_wait(i % 31 == 30 ? 0 : most);
        for (unsigned k = 0; k + (i % 31 == 30 ? 0 : most) < i + 1; k++) CHECK(atomic_load(&told[k]) == number);
    }
    ckpt_deferred_drain();
    for (unsigned i = 0; i < PIECES; i++) CHECK(atomic_load(&told[i]) == number);
}

static void told_of_tear(const struct ckpt_stored *stored) { atomic_fetch_add(&torn, (uint64_t)stored->torn); }

/* A copy that overwrites its own source, as a driver would do that fills its buffer too early. */
static void tear(void) {
    const struct ckpt_deferred_options options = {2, 2, 0};
    ckpt_deferred_set(&options);
    CHECK(!ckpt_deferred_torn() && !atomic_load(&torn));
    struct ckpt_stored one = {told_of_tear, 0, 0, PIECE, 0};
    ckpt_deferred_post(from, from + 4096, PIECE, &one);
    ckpt_deferred_post(pool, from, PIECE, &one);
    ckpt_deferred_drain();
    CHECK(ckpt_deferred_torn() && atomic_load(&torn) == 1);
}

int main(void) {
    pthread_t other;
    unsigned number = 0;
    ckpt_next_find();
    ckpt_stores_choose();
    pool = aligned_alloc(4096, PIECES * (size_t)PIECE);
    from = aligned_alloc(4096, PIECES * (size_t)PIECE);
    for (size_t i = 0; i < PIECES * (size_t)PIECE; i++) from[i] = (unsigned char)(i * 2654435761u >> 13);
    CHECK(ckpt_deferred_threads() == 0);
    round_of(++number, 1, 4, 0, 0); /* nobody else: by the caller alone */
    CHECK(ckpt_deferred_start(5, NULL) == 5 && ckpt_deferred_start(9, NULL) == 5);
    CHECK(pthread_create(&other, NULL, drain, NULL) == 0);
    for (unsigned shares = 1; shares <= 4; shares *= 2)
        for (unsigned most = 1; most <= 31; most += 15)
            for (unsigned threads = 0; threads <= 4; threads += 2) round_of(++number, shares, most, threads, threads * 10);
    atomic_store(&over, 1);
    CHECK(pthread_join(other, NULL) == 0);
    tear();
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        ckpt_deferred_forget();
        CHECK(ckpt_deferred_threads() == 0);
        round_of(++number, 1, 4, 0, 0);
        _exit(0);
    }
    int status = 1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    return 0;
}
