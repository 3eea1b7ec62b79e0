#define _GNU_SOURCE
#include "window.h"

#include "control_page.h"
#include "ring.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>

#define READERS 16 /* copies out of one window at a time */

static struct {
    uint64_t reads[READERS]; /* where the copies that are under way begin */
    unsigned readers;
    uint64_t read_end; /* of the last one */
} windows[CKPT_IMAGES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void note_consumed(unsigned i) {
    uint64_t least = windows[i].readers ? UINT64_MAX : windows[i].read_end;
    for (unsigned k = 0; k < windows[i].readers; k++)
        if (windows[i].reads[k] < least) least = windows[i].reads[k];
    atomic_store(&ckpt_control->image[i].consumed, least);
    atomic_store(&ckpt_control->image[i].readers, windows[i].readers);
}

void ckpt_window_clear(unsigned i) { memset(&windows[i], 0, sizeof windows[i]); }

void ckpt_window_enter(unsigned i, uint64_t start) {
    ckpt_ring_spare(1);
    for (;; sched_yield()) {
        pthread_mutex_lock(&lock);
        int room = windows[i].readers < READERS;
        if (room) {
            windows[i].reads[windows[i].readers++] = start;
            note_consumed(i);
        }
        pthread_mutex_unlock(&lock);
        if (room) return;
    }
}

void ckpt_window_leave(unsigned i, uint64_t start, uint64_t end) {
    ckpt_ring_spare(0);
    pthread_mutex_lock(&lock);
    for (unsigned k = 0; k < windows[i].readers; k++) {
        if (windows[i].reads[k] != start) continue;
        windows[i].reads[k] = windows[i].reads[--windows[i].readers];
        break;
    }
    windows[i].read_end = end;
    note_consumed(i);
    pthread_mutex_unlock(&lock);
}

void ckpt_windows_forget(void) {
    memset(windows, 0, sizeof windows);
    pthread_mutex_init(&lock, NULL);
}
