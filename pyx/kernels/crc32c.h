/* CRC32C (Castagnoli polynomial 0x1EDC6F41, reflected 0x82F63B78, init and xorout 0xffffffff).
 *
 * ck_crc32c_state works on the raw register (no inversion), so that a stream may be cut anywhere. Call
 * ck_crc32c_select once before use; until then the table implementation runs on unset tables.
 */
#ifndef CKPT_CRC32C_H
#define CKPT_CRC32C_H

#include <stddef.h>
#include <stdint.h>

typedef uint32_t (*ck_crc32c_fn)(uint32_t state, const unsigned char *data, size_t nbytes);

extern ck_crc32c_fn ck_crc32c_state;

/* Picks an implementation by name, NULL or "" for the fastest that this CPU runs. 0, or -1 when unknown here. */
int ck_crc32c_select(const char *name);
const char *ck_crc32c_name(void);
/* The i-th implementation that this CPU runs, fastest first; NULL past the last. */
const char *ck_crc32c_available(int i);

static inline uint32_t ck_crc32c(uint32_t value, const void *data, size_t nbytes) {
    return ~ck_crc32c_state(~value, (const unsigned char *)data, nbytes);
}

/* CRC after nbytes more zero bytes, and CRC of a concatenation: O(log nbytes). */
uint32_t ck_crc32c_zeros(uint32_t value, uint64_t nbytes);
uint32_t ck_crc32c_combine(uint32_t first, uint32_t second, uint64_t second_nbytes);

/* For the implementations. The register holds a polynomial with bit 31 as x^0. */
uint32_t ck_crc32c_xpow(uint64_t bits); /* x^bits mod P */

#define CK_CRC_LONG 2048 /* bytes of one of three interleaved streams */
#define CK_CRC_SHORT 256
extern uint32_t ck_crc32c_shift_long[4][256];
extern uint32_t ck_crc32c_shift_short[4][256];

static inline uint32_t ck_crc32c_shift(const uint32_t table[4][256], uint32_t state) {
    return table[0][state & 0xff] ^ table[1][(state >> 8) & 0xff] ^ table[2][(state >> 16) & 0xff] ^
           table[3][state >> 24];
}

/* Implementations of one architecture: supported() says whether this CPU runs it. */
typedef struct {
    const char *name;
    int (*supported)(void);
    void (*prepare)(void); /* NULL, or fills constants once */
    ck_crc32c_fn run;
} ck_crc32c_implementation;

extern const ck_crc32c_implementation ck_crc32c_native[]; /* fastest first, ends with a NULL name */

#endif
