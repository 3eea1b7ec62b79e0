/* Access to the control page for a compiler that does not know _Atomic: the controller's Cython module. */
#ifndef CKPT_CONTROL_ATOMICS_H
#define CKPT_CONTROL_ATOMICS_H

#include "control.h"
#include "futex.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/mman.h>
#include <sys/stat.h>

static inline uint32_t ckpt_load32(const void *word) { return __atomic_load_n((const uint32_t *)word, __ATOMIC_SEQ_CST); }

#define CKPT_READ(name, type, of, field) \
    static inline type name(const struct of *from) { return atomic_load((_Atomic type *)&from->field); }
CKPT_READ(ckpt_image_phase, uint32_t, ckpt_image, phase)
CKPT_READ(ckpt_image_gate, uint32_t, ckpt_image, gate)
CKPT_READ(ckpt_image_ready, uint64_t, ckpt_image, ready)
CKPT_READ(ckpt_image_consumed, uint64_t, ckpt_image, consumed)
CKPT_READ(ckpt_image_window, uint64_t, ckpt_image, window)
CKPT_READ(ckpt_image_readers, uint32_t, ckpt_image, readers)
CKPT_READ(ckpt_image_waiting, uint32_t, ckpt_image, waiting)
CKPT_READ(ckpt_image_base, uint64_t, ckpt_image, base)
CKPT_READ(ckpt_image_watermark, uint64_t, ckpt_image, watermark)
CKPT_READ(ckpt_image_high, uint64_t, ckpt_image, high)
CKPT_READ(ckpt_image_written, uint64_t, ckpt_image, written)
CKPT_READ(ckpt_image_read, uint64_t, ckpt_image, read)
CKPT_READ(ckpt_image_copies, uint64_t, ckpt_image, copies)
CKPT_READ(ckpt_image_flags, uint32_t, ckpt_image, flags)
CKPT_READ(ckpt_image_late_count, uint32_t, ckpt_image, late_count)
CKPT_READ(ckpt_image_gate_waits, uint32_t, ckpt_image, gate_waits)
CKPT_READ(ckpt_events, uint32_t, ckpt_control, events)
CKPT_READ(ckpt_pool_state, uint32_t, ckpt_control, pool_state)
CKPT_READ(ckpt_pool_warm, uint64_t, ckpt_control, pool_warm)
CKPT_READ(ckpt_pool_huge, uint64_t, ckpt_control, pool_huge)
CKPT_READ(ckpt_generation, uint64_t, ckpt_control, generation)
CKPT_READ(ckpt_feeders, uint32_t, ckpt_control, feeders)
CKPT_READ(ckpt_armed, uint32_t, ckpt_control, armed)
CKPT_READ(ckpt_waiters, uint32_t, ckpt_control, gate_waiters)
CKPT_READ(ckpt_served, uint64_t, ckpt_control, served)
CKPT_READ(ckpt_returned, uint64_t, ckpt_control, returned)
CKPT_READ(ckpt_fallbacks, uint64_t, ckpt_control, fallbacks)
CKPT_READ(ckpt_late_serial, uint64_t, ckpt_control, late_serial)
CKPT_READ(ckpt_ended, uint32_t, ckpt_control, ended)
#undef CKPT_READ

static inline void ckpt_gate_changed(struct ckpt_control *page) {
    atomic_fetch_add(&page->gate_events, 1);
    ckpt_futex_wake(&page->gate_events, INT_MAX, 1);
}

static inline void ckpt_set_gate(struct ckpt_control *page, struct ckpt_image *image, uint32_t gate) {
    atomic_store(&image->gate, gate);
    ckpt_gate_changed(page);
}

static inline void ckpt_set_ready(struct ckpt_control *page, struct ckpt_image *image, uint64_t ready) {
    atomic_store(&image->ready, ready);
    ckpt_gate_changed(page);
}

static inline void ckpt_set_window(struct ckpt_image *image, uint64_t window) { atomic_store(&image->window, window); }

static inline void ckpt_set_base(struct ckpt_image *image, uint64_t base) { atomic_store(&image->base, base); }

static inline void ckpt_wait_events(struct ckpt_control *page, uint32_t seen, unsigned timeout_ms) {
    atomic_fetch_add(&page->watchers, 1);
    if (atomic_load(&page->events) == seen) ckpt_futex_wait(&page->events, seen, timeout_ms, 1);
    atomic_fetch_sub(&page->watchers, 1);
}

static inline void ckpt_set_deadlines(struct ckpt_control *page, uint32_t deadline_ms, uint32_t orphan_ms) {
    atomic_store(&page->gate_deadline_ms, deadline_ms);
    atomic_store(&page->gate_orphan_ms, orphan_ms);
}

static inline void ckpt_set_holes(struct ckpt_control *page) { atomic_store(&page->pool_holes, 1); }

static inline int ckpt_sealed_bytes(int fd, uint64_t *nbytes) {
    struct stat found;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW)) return -1;
    if (fstat(fd, &found)) return -1;
    *nbytes = (uint64_t)found.st_size;
    return 0;
}

static inline struct ckpt_control *ckpt_map_page(int fd) {
    void *page = mmap(NULL, CKPT_CONTROL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    return page == MAP_FAILED ? NULL : (struct ckpt_control *)page;
}

static inline void ckpt_unmap_page(struct ckpt_control *page) { munmap(page, CKPT_CONTROL_BYTES); }

#endif
