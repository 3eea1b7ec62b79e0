/* Copies out of an image that is restored through a window: what may be overwritten behind them. */
#ifndef CKPT_WINDOW_H
#define CKPT_WINDOW_H

#include <stdint.h>

void ckpt_window_clear(unsigned image);

/* A copy from `start` of the image begins; it waits where too many are under way. `consumed` goes down to it.
 * Until it is over, the caller's copies leave processors to whoever fills the window (ckpt_ring_spare). */
void ckpt_window_enter(unsigned image, uint64_t start);

/* It is over, up to `end`. */
void ckpt_window_leave(unsigned image, uint64_t start, uint64_t end);

void ckpt_windows_forget(void); /* in the child of a fork */

#endif
