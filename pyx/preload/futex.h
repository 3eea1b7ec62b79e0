/* futex(2) on words of this process or, `shared`, of a mapping that others have too. */
#ifndef CKPT_FUTEX_H
#define CKPT_FUTEX_H

#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Sleeps while the word is `seen`, at most `timeout_ms` (0: for ever); may wake for no reason. */
static inline void ckpt_futex_wait(_Atomic uint32_t *word, uint32_t seen, unsigned timeout_ms, int shared) {
    struct timespec timeout = {timeout_ms / 1000, (long)(timeout_ms % 1000) * 1000000};
    syscall(SYS_futex, word, shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, seen, timeout_ms ? &timeout : NULL, NULL, 0);
}

static inline void ckpt_futex_wake(_Atomic uint32_t *word, int count, int shared) {
    syscall(SYS_futex, word, shared ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

/* The same within a process, for sleepers of which a wake chooses some: those that have one of its bits. */
static inline void ckpt_futex_wait_bits(_Atomic uint32_t *word, uint32_t seen, uint32_t bits) {
    syscall(SYS_futex, word, FUTEX_WAIT_BITSET_PRIVATE, seen, NULL, NULL, bits);
}

static inline void ckpt_futex_wake_bits(_Atomic uint32_t *word, int count, uint32_t bits) {
    syscall(SYS_futex, word, FUTEX_WAKE_BITSET_PRIVATE, count, NULL, NULL, bits);
}

static inline uint64_t ckpt_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

static inline void ckpt_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
