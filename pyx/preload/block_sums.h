/* What entries of the block table sum up to: the controller's side, for its Cython module. */
#ifndef CKPT_BLOCK_SUMS_H
#define CKPT_BLOCK_SUMS_H

#include "control.h"
#include "crc32c.h"

/* Moving a checksum over a block that follows is linear: a table for each byte of it. */
static uint32_t ckpt_block_shift[4][256];

static inline void ckpt_block_sums_prepare(void) {
    ck_crc32c_select("");
    for (int byte = 0; byte < 4; byte++)
        for (uint32_t value = 0; value < 256; value++)
            ckpt_block_shift[byte][value] = ck_crc32c_combine(value << (8 * byte), 0, CKPT_BLOCK_BYTES);
}

/* CRC32C of [start, start + bytes) of the pool, of an image that ends at `end`, and whether all of that is zero. 0 where a
 * block of it has no good entry. `start` is a multiple of CKPT_BLOCK_BYTES, and so is `bytes` but at the image's end. */
static inline int ckpt_block_sums(const struct ckpt_control *page, uint64_t start, uint64_t bytes, uint64_t end,
                                  uint32_t *crc, int *zero) {
    const uint64_t *blocks = (const uint64_t *)((const unsigned char *)page + CKPT_BLOCKS_OFFSET);
    uint64_t flags = 0;
    *crc = 0;
    if (start % CKPT_BLOCK_BYTES || (bytes % CKPT_BLOCK_BYTES && start + bytes != end)) return 0;
    for (uint64_t done = 0; done < bytes; done += CKPT_BLOCK_BYTES) {
        uint64_t entry = __atomic_load_n(&blocks[(start + done) / CKPT_BLOCK_BYTES], __ATOMIC_ACQUIRE);
        uint64_t length = bytes - done < CKPT_BLOCK_BYTES ? bytes - done : CKPT_BLOCK_BYTES;
        uint64_t good = length << CKPT_BLOCK_LENGTH_SHIFT | (entry & (CKPT_BLOCK_DATA | 0xffffffffull));
        if (entry != good) return 0;
        *crc = length == CKPT_BLOCK_BYTES ? ck_crc32c_shift(ckpt_block_shift, *crc) ^ (uint32_t)entry
                                          : ck_crc32c_combine(*crc, (uint32_t)entry, length);
        flags |= entry;
    }
    *zero = !(flags & CKPT_BLOCK_DATA);
    return 1;
}

#endif
