/* Blocks that are written once and in order have the checksum of their bytes; all others are spoilt. */
#include "check.h"
#include "control.h"
#include "crc32c.h"
#include "sums.h"

#include <stdatomic.h>
#include <string.h>

#define B CKPT_BLOCK_BYTES
#define BLOCKS 4u
#define KNOWN(i, crc, flags) (atomic_load(&blocks[i]) == ((flags) | B << CKPT_BLOCK_LENGTH_SHIFT | (crc)))

static _Atomic uint64_t blocks[BLOCKS];
static unsigned char data[BLOCKS * CKPT_BLOCK_BYTES];

static void copy(uint64_t start, uint64_t end) {
    ckpt_sums_claim(blocks, start, end);
    for (uint64_t at = start, edge; at < end; at = edge) {
        edge = (at / B + 1) * B;
        if (edge > end) edge = end;
        ckpt_sums_take(blocks, at, data + at, edge - at);
    }
}

static uint32_t crc_of(unsigned i) { return ck_crc32c(0, data + i * B, B); }

/* The generator polynomial, its bits in the order of the checksum's: bytes that may be added anywhere without changing it. */
static const unsigned char polynomial[5] = {0xf1, 0x76, 0xec, 0x05, 0x01};

static void not_zero_but_summed_as_zero(void) {
    static const size_t places[] = {0, 5000, B - sizeof polynomial};
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        memset(data, 0, B);
        memcpy(data + places[i], polynomial, sizeof polynomial);
        ckpt_sums_clear(blocks, B);
        copy(0, B);
        CHECK(crc_of(0) == ck_crc32c_zeros(0, B));
        CHECK(KNOWN(0, crc_of(0), CKPT_BLOCK_DATA));
    }
}

int main(void) {
    ckpt_sums_choose();
    CHECK(ck_crc32c(0, "123456789", 9) == 0xe3069283u);
    for (size_t i = 0; i < sizeof data; i++) data[i] = (unsigned char)(i * 2654435761u >> 13);
    memset(data + B, 0, B);
    ckpt_sums_clear(blocks, sizeof data);
    copy(0, 4096 + 1);
    CHECK(!KNOWN(0, crc_of(0), CKPT_BLOCK_DATA));
    copy(4096 + 1, B + 100); /* goes on where the last one ended */
    copy(B + 100, 3 * B);
    CHECK(KNOWN(0, crc_of(0), CKPT_BLOCK_DATA));
    CHECK(KNOWN(1, crc_of(1), 0));
    CHECK(KNOWN(2, crc_of(2), CKPT_BLOCK_DATA));
    CHECK(atomic_load(&blocks[3]) == 0);

    copy(3 * B + 1, 4 * B); /* a gap */
    CHECK(atomic_load(&blocks[3]) & CKPT_BLOCK_SPOILT);
    copy(2 * B, 3 * B); /* again */
    CHECK(atomic_load(&blocks[2]) & CKPT_BLOCK_SPOILT);
    ckpt_sums_spoil(blocks, B, B + 1);
    CHECK(atomic_load(&blocks[1]) & CKPT_BLOCK_SPOILT);
    CHECK(KNOWN(0, crc_of(0), CKPT_BLOCK_DATA));

    ckpt_sums_clear(blocks, sizeof data);
    ckpt_sums_claim(blocks, 0, B); /* two copies at a time */
    ckpt_sums_claim(blocks, 0, B);
    ckpt_sums_take(blocks, 0, data, B);
    CHECK(atomic_load(&blocks[0]) & CKPT_BLOCK_SPOILT && !KNOWN(0, crc_of(0), CKPT_BLOCK_DATA));
    ckpt_sums_take(blocks, B, data + B, B); /* never claimed */
    CHECK(atomic_load(&blocks[1]) == 0);
    not_zero_but_summed_as_zero();
    return 0;
}
