/* Copies between the driver's memory and an image, shared out over the ring. They are complete at the return. */
#ifndef CKPT_COPIES_H
#define CKPT_COPIES_H

#include <stddef.h>
#include <stdint.h>

/* Copies as large as this are shared out; it costs some microseconds. */
#define CKPT_COPIES_BYTES (256u << 10)

/* The driver's device writes and reads its buffers again and again. Lines of them that lie in the caches of many cores
 * make each of its transfers slower, so those that a copy touched are sent off, block by block. */
struct ckpt_copies_options {
    unsigned demote;     /* enum ckpt_stores_demotion: of the lines of the driver's buffer */
    size_t block;        /* bytes that are copied before their lines are sent off */
    int read_streams;    /* copies out of an image store past the caches */
    unsigned read_ahead; /* pieces that the driver will want next are fetched in the meantime */
    int aside;           /* the caller copies nothing itself where workers are awake */
};

void ckpt_copies_set(const struct ckpt_copies_options *options);

/* Into an image, past the caches: another process reads it, or nobody for long. */
void ckpt_copies_write(void *to, const void *from, size_t bytes);

/* As well, where `take` sums up what was copied, while it is in the caches still: blocks of the image of `block` bytes, of
 * which the copy begins `start` bytes behind the image's beginning. Never more than a block a call, in several threads. */
struct ckpt_copies_sums {
    void (*take)(_Atomic uint64_t *blocks, uint64_t start, const void *data, size_t bytes);
    _Atomic uint64_t *blocks;
    uint64_t start;
    size_t block;
};
void ckpt_copies_write_summed(void *to, const void *from, size_t bytes, const struct ckpt_copies_sums *sums);

/* Out of an image. `ahead`: so many bytes behind the source may be fetched, and are likely to be wanted next. */
void ckpt_copies_read(void *to, const void *from, size_t bytes, size_t ahead);

#endif
