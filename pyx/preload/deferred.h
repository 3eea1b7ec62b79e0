/* Pieces that are stored after the driver's call for them returned, by threads of their own: a queue of whole pieces. */
#ifndef CKPT_DEFERRED_H
#define CKPT_DEFERRED_H

#include <sched.h>
#include <stddef.h>
#include <stdint.h>

#define CKPT_DEFERRED_MOST 32u /* pieces that may be outstanding */

/* Called once, by any thread, when all bytes of a write are stored and fenced, in whatever order writes are. `torn`:
 * the source changed while it was copied, so that what was stored is no good. */
struct ckpt_stored {
    void (*call)(const struct ckpt_stored *stored);
    unsigned image;
    uint64_t start, end;
    int torn;
};

struct ckpt_deferred_options {
    unsigned threads; /* that store; fewer than were made: the others sleep */
    unsigned shares;  /* that a piece is cut into: 1, 2, 4… */
    unsigned awake_us; /* how long one idle thread waits awake for the next piece */
};

/* Makes `threads` of them, once; all signals are blocked in them. How many there are. */
unsigned ckpt_deferred_start(unsigned threads, const cpu_set_t *cpus);

/* For measurements. Nothing may be outstanding. */
void ckpt_deferred_set(const struct ckpt_deferred_options *options);

unsigned ckpt_deferred_threads(void);

/* One thread at a time, and at most CKPT_DEFERRED_MOST outstanding: the caller sees to both. */
void ckpt_deferred_post(void *to, const void *from, size_t bytes, const struct ckpt_stored *stored);

/* Returns when all but the last `most` of the posted pieces are stored, and told so. Helps. By the thread that posts. */
void ckpt_deferred_wait(unsigned most);

/* Returns when all that was posted is stored, and told so. Any thread. Helps. */
void ckpt_deferred_drain(void);

/* Whether a source changed while it was copied, ever. */
int ckpt_deferred_torn(void);

void ckpt_deferred_forget(void); /* in the child of a fork */

#endif
