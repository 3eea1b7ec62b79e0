/* The driver's side of a checkpoint and a restore, without a driver: see launch_pieces.py.
 *
 * A transfer is imitated by waiting awake for so many microseconds; then a piece is copied, and what that takes is
 * what the driver waits for. One line a way: its name, microseconds a piece into the pool, and out of it.
 */
#define _GNU_SOURCE
#include "copies.h"
#include "futex.h"
#include "next.h"
#include "ring.h"
#include "stores.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PIECE (2u << 20)
#define STAGING 2 /* buffers of the driver's, in turn */

static unsigned char *map(size_t bytes) {
    void *made = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) abort();
    madvise(made, bytes, MADV_HUGEPAGE);
    memset(made, 1, bytes);
    return made;
}

static void transfer(unsigned us) {
    for (uint64_t until = ckpt_now_ns() + us * 1000ull; ckpt_now_ns() < until;) ckpt_pause();
}

static double into(unsigned char *pool, unsigned char *staging, size_t pieces, unsigned us) {
    uint64_t spent = 0;
    for (size_t i = 0; i < pieces; i++) {
        unsigned char *from = staging + i % STAGING * PIECE;
        transfer(us);
        uint64_t start = ckpt_now_ns();
        ckpt_copies_write(pool + i * PIECE, from, PIECE);
        spent += ckpt_now_ns() - start;
    }
    return (double)spent / (double)pieces / 1e3;
}

static double out(unsigned char *pool, unsigned char *staging, size_t pieces, unsigned us) {
    uint64_t spent = 0;
    for (size_t i = 0; i < pieces; i++) {
        uint64_t start = ckpt_now_ns();
        ckpt_copies_read(staging + i % STAGING * PIECE, pool + i * PIECE, PIECE, (pieces - i - 1) * PIECE);
        spent += ckpt_now_ns() - start;
        transfer(us);
    }
    return (double)spent / (double)pieces / 1e3;
}

int main(int count, char **argument) {
    if (count != 5) return 2;
    size_t pieces = (size_t)atol(argument[1]);
    unsigned threads = (unsigned)atoi(argument[2]), us = (unsigned)atoi(argument[3]), rounds = (unsigned)atoi(argument[4]);
    static const struct {
        const char *name;
        int awake;
        struct ckpt_copies_options options;
    } way[] = {
        {"parked", 0, {.read_streams = 1}},
        {"awake", 1, {.read_streams = 1}},
        {"awake, demoted", 1, {.demote = CKPT_DEMOTE, .block = 16u << 10, .read_streams = 1}},
        {"awake, demoted, out of the image plain", 1, {.demote = CKPT_DEMOTE, .block = 16u << 10}},
        {"awake, demoted, ahead", 1, {.demote = CKPT_DEMOTE, .block = 16u << 10, .read_streams = 1, .read_ahead = 1}},
        {"awake, demoted, ahead, aside", 1,
         {.demote = CKPT_DEMOTE, .block = 16u << 10, .read_streams = 1, .read_ahead = 1, .aside = 1}},
    };
    ckpt_next_find();
    ckpt_stores_choose();
    struct ckpt_ring_options options = {NULL, 0};
    if (ckpt_ring_start(threads, &options) != threads) return 1;
    unsigned char *pool = map(pieces * PIECE), *staging = map(STAGING * PIECE);
    for (unsigned round = 0; round < rounds; round++)
        for (size_t i = 0; i < sizeof way / sizeof way[0]; i++) {
            ckpt_ring_limit(threads, way[i].awake ? 3 * us + 50 : 0);
            ckpt_copies_set(&way[i].options);
            double in = into(pool, staging, pieces, us);
            printf("%s;%.2f;%.2f\n", way[i].name, in, out(pool, staging, pieces, us));
        }
    return 0;
}
