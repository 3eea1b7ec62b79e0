/* The worker ring: threads that share out one piece of work at a time, and sleep otherwise. */
#ifndef CKPT_RING_H
#define CKPT_RING_H

#include <sched.h>
#include <stddef.h>

/* Does [start, start + bytes) of the work; runs in several threads at once. */
typedef void ckpt_work(void *context, size_t start, size_t bytes);

/* Makes `threads` - 1 workers (the caller of ckpt_ring_run is the last one), on `cpus` where it is not NULL. All
 * signals are blocked in them. Fewer when the system has no more to give. Returns the number, callers included. */
unsigned ckpt_ring_start(unsigned threads, const cpu_set_t *cpus);

/* Cuts [0, total) into steps and returns when all are done. At most `width` threads take part, 0 for all. One work at
 * a time: a second caller waits. Works without workers too. errno is kept. */
void ckpt_ring_run(ckpt_work *work, void *context, size_t total, size_t step, unsigned width);

unsigned ckpt_ring_threads(void); /* callers included; 1 before the start */

/* In the child of a fork: the threads are not there. */
void ckpt_ring_forget(void);

#endif
