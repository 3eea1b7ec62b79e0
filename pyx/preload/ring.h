/* The worker ring: threads that share out one piece of work at a time, stay awake for a moment, and sleep otherwise.
 *
 * Each participant has a lane: the same share of every work of the same size, so that what a worker left in its
 * core's cache is what it needs next. A lane that its owner has not come to is worked on by others.
 */
#ifndef CKPT_RING_H
#define CKPT_RING_H

#include <sched.h>
#include <stddef.h>
#include <stdint.h>

/* What a worker does for its lane once the work itself is over for it: see ckpt_step. Nobody waits for it, and the
 * next work may be there already, so it has all that it needs in here. */
struct ckpt_later {
    void (*call)(const struct ckpt_later *later);
    unsigned worker; /* 1 and up: set by the ring */
    uint32_t work;   /* ckpt_ring_wanted: set by the ring */
    const void *from; /* `bytes` there, and each `stride` behind it, within `room` */
    size_t bytes, stride, room;
};

/* Does [start, start + bytes) of the work; runs in several threads at once. `later` is for a worker in its own lane
 * to fill, and NULL for everybody else. */
typedef void ckpt_step(void *context, size_t start, size_t bytes, struct ckpt_later *later);

/* While an image comes by way of other threads of this machine, which want processors too. */
struct ckpt_ring_spare {
    unsigned lanes; /* of a work, at most; 0: half of them, but at least CKPT_RING_SPARE_LANES */
    int awake_us;   /* -1: as ever */
};
#define CKPT_RING_SPARE_LANES 4

struct ckpt_ring_options {
    const cpu_set_t *cpus; /* where the workers run, NULL: anywhere */
    unsigned awake_us;     /* how long a worker that has worked stays awake for more; 0: not at all */
};

/* Makes `threads` - 1 workers (the caller of ckpt_ring_run is the last one). All signals are blocked in them. Fewer
 * when the system has no more to give. Returns the number, callers included. */
unsigned ckpt_ring_start(unsigned threads, const struct ckpt_ring_options *options);

enum ckpt_ring_manner {
    CKPT_RING_PLAIN = 0,
    CKPT_RING_ASIDE = 1, /* the caller has no lane of its own: it takes what workers do not come to */
};

/* Cuts [0, total) into steps and returns when all are done. At most `width` threads take part, 0 for all. One work at
 * a time: a second caller waits. Works without workers too. errno is kept. */
void ckpt_ring_run(ckpt_step *step, void *context, size_t total, size_t step_bytes, unsigned width, unsigned manner);

/* From now on the caller's work is done sparingly: until it is called with 0. Of the calling thread alone. */
void ckpt_ring_spare(int on);

/* The caller is about to wait for something else than work: nobody stays awake for it. Until it has none any more. */
void ckpt_ring_rest(int on);

/* How many lanes a work of all threads has that the caller would begin now. */
unsigned ckpt_ring_lanes(unsigned manner);

/* Whether another work than `later`'s has come: it is time to stop. */
int ckpt_ring_wanted(const struct ckpt_later *later);

/* For measurements: from now on so many threads take part, callers included, and stay awake so long. */
void ckpt_ring_limit(unsigned threads, unsigned awake_us);

unsigned ckpt_ring_threads(void); /* callers included; 1 before the start */
unsigned ckpt_ring_asleep(void);  /* workers that sleep now */

/* What sparing work takes. */
void ckpt_ring_set_spare(const struct ckpt_ring_spare *spare);

/* In the child of a fork: the threads are not there. */
void ckpt_ring_forget(void);

#endif
