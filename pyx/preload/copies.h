/* Copies between the driver's memory and an image, shared out over the ring, or deferred. */
#ifndef CKPT_COPIES_H
#define CKPT_COPIES_H

#include "deferred.h"

#include <sched.h>
#include <stddef.h>
#include <stdint.h>

/* Copies as large as this are shared out; it costs some microseconds. */
#define CKPT_COPIES_BYTES (256u << 10)

struct ckpt_copies_options {
    unsigned defer;        /* pieces that may be stored after the driver's call for them returned; 0: none */
    unsigned shares;       /* that such a piece is cut into */
    unsigned store_awake_us; /* how long one thread that stores them waits awake for the next one */
    unsigned read_ahead;   /* pieces: what the driver will want next is fetched in the meantime */
    unsigned fetch_level;  /* of the cache that it is fetched to: 1, 2, 3; 0: once, past them */
    unsigned lane_steps;   /* that a lane of a copy out of an image is cut into where workers are awake */
    int read_streams;      /* copies out of an image store past the caches, too */
    int aside;             /* the caller copies nothing itself where workers are awake */
};

/* Once, after the ring has started. `cpus`: where threads that store run, NULL: anywhere. */
void ckpt_copies_start(const struct ckpt_copies_options *options, const cpu_set_t *cpus);

/* For measurements: so many threads store from now on, 0 for all. Nothing may be under way. */
void ckpt_copies_set(const struct ckpt_copies_options *options, unsigned threads);

/* Into an image; whether it was deferred. `usual`: the driver goes through it piece by piece, and this is the next one; then the bytes may be
 * stored after the return. Not the `last` of an image: with that, all are. */
int ckpt_copies_write(void *to, const void *from, size_t bytes, int usual, int last, const struct ckpt_stored *stored);

/* Out of an image, complete at the return. `ahead`: so many bytes behind the source may be fetched, and are likely to
 * be wanted next. Everything is drained. */
void ckpt_copies_read(void *to, const void *from, size_t bytes, size_t ahead);

/* Returns when all that was written is stored, and told so. What everything else that has to do with images begins
 * with, and what comes before memory of the driver's is given back; it is learned anew then. Any thread. */
void ckpt_copies_drain(void);

/* Whether there is anything to drain. */
extern _Atomic int ckpt_copies_learning;

struct ckpt_copies_counts {
    uint64_t deferred; /* pieces, ever */
    uint64_t restarts; /* how often something unusual ended the learning */
    unsigned most_buffers; /* that the driver was seen to go round in, ever */
    unsigned most_proven;
    int refused; /* the driver fills its buffers too early: nothing is deferred any more */
};
void ckpt_copies_count(struct ckpt_copies_counts *counts);

/* In the child of a fork. */
void ckpt_copies_forget(void);

#endif
