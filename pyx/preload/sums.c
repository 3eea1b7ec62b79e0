#include "sums.h"

#include "control.h"
#include "crc32c.h"

#include <stdatomic.h>
#include <string.h>

static uint32_t zero_crc; /* of a block of zeros */

void ckpt_sums_choose(void) {
    ck_crc32c_select("");
    zero_crc = ck_crc32c_zeros(0, CKPT_BLOCK_BYTES);
}

static uint64_t length_of(uint64_t entry) { return entry >> CKPT_BLOCK_LENGTH_SHIFT & CKPT_BLOCK_LENGTH_MASK; }

void ckpt_sums_clear(_Atomic uint64_t *blocks, uint64_t bytes) {
    uint64_t count = (bytes + CKPT_BLOCK_BYTES - 1) / CKPT_BLOCK_BYTES;
    for (uint64_t i = 0; i < count; i++) atomic_store_explicit(&blocks[i], 0, memory_order_relaxed);
}

void ckpt_sums_claim(_Atomic uint64_t *blocks, uint64_t start, uint64_t end) {
    for (uint64_t at = start; at < end; at = (at / CKPT_BLOCK_BYTES + 1) * CKPT_BLOCK_BYTES) {
        _Atomic uint64_t *block = &blocks[at / CKPT_BLOCK_BYTES];
        uint64_t entry = atomic_load(block);
        int next = !(entry & (CKPT_BLOCK_CLAIMED | CKPT_BLOCK_SPOILT)) && length_of(entry) == at % CKPT_BLOCK_BYTES;
        if (next)
            atomic_store(block, entry | CKPT_BLOCK_CLAIMED);
        else
            atomic_fetch_or(block, CKPT_BLOCK_SPOILT);
    }
}

void ckpt_sums_spoil(_Atomic uint64_t *blocks, uint64_t start, uint64_t end) {
    for (uint64_t at = start; at < end; at = (at / CKPT_BLOCK_BYTES + 1) * CKPT_BLOCK_BYTES)
        atomic_fetch_or(&blocks[at / CKPT_BLOCK_BYTES], CKPT_BLOCK_SPOILT);
}

/* Only asked where the checksum says so already: then it is, and nothing is gained by ending early. The first byte is zero,
 * and every byte is as the one before it. */
static int is_zero(const unsigned char *data, size_t bytes) {
    return !bytes || (!data[0] && !memcmp(data, data + 1, bytes - 1));
}

void ckpt_sums_take(_Atomic uint64_t *blocks, uint64_t start, const void *data, size_t bytes) {
    _Atomic uint64_t *block = &blocks[start / CKPT_BLOCK_BYTES];
    uint64_t before = atomic_load(block), from = start % CKPT_BLOCK_BYTES;
    if ((before & (CKPT_BLOCK_CLAIMED | CKPT_BLOCK_SPOILT)) != CKPT_BLOCK_CLAIMED || length_of(before) != from) return;
    uint32_t crc = ck_crc32c(0, data, bytes);
    uint32_t zeros = bytes == CKPT_BLOCK_BYTES ? zero_crc : ck_crc32c_zeros(0, bytes);
    uint64_t flags = before & CKPT_BLOCK_DATA;
    if (crc != zeros || !is_zero(data, bytes)) flags = CKPT_BLOCK_DATA;
    if (from) crc = ck_crc32c_combine((uint32_t)before, crc, bytes);
    /* A write that came meanwhile has spoilt it. */
    atomic_compare_exchange_strong(block, &before, flags | (from + bytes) << CKPT_BLOCK_LENGTH_SHIFT | crc);
}
