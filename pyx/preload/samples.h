/* Whether two ranges have the same bytes in some of their lines. */
#ifndef CKPT_SAMPLES_H
#define CKPT_SAMPLES_H

#include <stddef.h>
#include <string.h>

#define CKPT_SAMPLE_BYTES 64u            /* a line of the cache */
#define CKPT_SAMPLE_EVERY (32u << 10)    /* one in so many bytes; and the first and the last, where a writer begins */

static inline int ckpt_samples_equal(const void *a, const void *b, size_t bytes) {
    const char *x = a, *y = b;
    if (bytes <= CKPT_SAMPLE_BYTES) return memcmp(x, y, bytes) == 0;
    size_t last = bytes - CKPT_SAMPLE_BYTES;
    for (size_t at = 0; at < last; at += CKPT_SAMPLE_EVERY)
        if (memcmp(x + at, y + at, CKPT_SAMPLE_BYTES) != 0) return 0;
    return memcmp(x + last, y + last, CKPT_SAMPLE_BYTES) == 0;
}

#endif
