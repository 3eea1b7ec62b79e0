#include "crc32c.h"

#include <string.h>

#define POLYNOMIAL 0x82f63b78u

static uint32_t slices[8][256];     /* slicing-by-8 (Kounavis and Berry, 2005) */
static uint32_t power_of_two[67];   /* x^(2^i) mod P: lengths up to 2^64 bytes */
uint32_t ck_crc32c_shift_long[4][256];
uint32_t ck_crc32c_shift_short[4][256];
static int prepared;

/* a * b mod P, bit 31 being x^0. */
static uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    while (a) {
        if (a & 0x80000000u) product ^= b;
        a <<= 1;
        b = b & 1 ? (b >> 1) ^ POLYNOMIAL : b >> 1;
    }
    return product;
}

uint32_t ck_crc32c_xpow(uint64_t bits) {
    uint32_t result = 0x80000000u;
    for (int i = 0; bits; i++, bits >>= 1)
        if (bits & 1) result = multiply(power_of_two[i], result);
    return result;
}

static uint32_t xpow_bytes(uint64_t nbytes) {
    uint32_t result = 0x80000000u;
    for (int i = 3; nbytes; i++, nbytes >>= 1)
        if (nbytes & 1) result = multiply(power_of_two[i], result);
    return result;
}

/* Multiplication by a constant is linear: 32 products give the whole table. */
static void fill_shift(uint32_t table[4][256], uint64_t nbytes) {
    uint32_t factor = xpow_bytes(nbytes);
    for (int byte = 0; byte < 4; byte++) {
        table[byte][0] = 0;
        for (int bit = 0; bit < 8; bit++) {
            uint32_t basis = multiply((uint32_t)1 << (8 * byte + bit), factor);
            for (int low = 0; low < 1 << bit; low++) table[byte][(1 << bit) + low] = table[byte][low] ^ basis;
        }
    }
}

static void prepare(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t state = i;
        for (int bit = 0; bit < 8; bit++) state = state & 1 ? (state >> 1) ^ POLYNOMIAL : state >> 1;
        slices[0][i] = state;
    }
    for (int slice = 1; slice < 8; slice++)
        for (int i = 0; i < 256; i++)
            slices[slice][i] = (slices[slice - 1][i] >> 8) ^ slices[0][slices[slice - 1][i] & 0xff];
    power_of_two[0] = 0x40000000u;
    for (int i = 1; i < 67; i++) power_of_two[i] = multiply(power_of_two[i - 1], power_of_two[i - 1]);
    fill_shift(ck_crc32c_shift_long, CK_CRC_LONG);
    fill_shift(ck_crc32c_shift_short, CK_CRC_SHORT);
    for (const ck_crc32c_implementation *native = ck_crc32c_native; native->name; native++)
        if (native->prepare && native->supported()) native->prepare();
    prepared = 1;
}

static uint32_t run_table(uint32_t state, const unsigned char *data, size_t nbytes) {
    for (; nbytes >= 8; data += 8, nbytes -= 8) {
        uint32_t low = state ^ ((uint32_t)data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 |
                                (uint32_t)data[3] << 24);
        state = slices[7][low & 0xff] ^ slices[6][(low >> 8) & 0xff] ^ slices[5][(low >> 16) & 0xff] ^
                slices[4][low >> 24] ^ slices[3][data[4]] ^ slices[2][data[5]] ^ slices[1][data[6]] ^
                slices[0][data[7]];
    }
    for (; nbytes; data++, nbytes--) state = (state >> 8) ^ slices[0][(state ^ *data) & 0xff];
    return state;
}

static int always(void) { return 1; }

static const ck_crc32c_implementation table = {"table", always, NULL, run_table};
static const ck_crc32c_implementation *current = &table;
ck_crc32c_fn ck_crc32c_state = run_table;

static const ck_crc32c_implementation *nth_supported(int i) {
    for (const ck_crc32c_implementation *native = ck_crc32c_native; native->name; native++)
        if (native->supported() && i-- == 0) return native;
    return i == 0 ? &table : NULL;
}

int ck_crc32c_select(const char *name) {
    if (!prepared) prepare();
    const ck_crc32c_implementation *found;
    for (int i = 0; (found = nth_supported(i)) != NULL; i++) {
        if (name != NULL && name[0] && strcmp(name, found->name) != 0) continue;
        current = found;
        ck_crc32c_state = found->run;
        return 0;
    }
    return -1;
}

const char *ck_crc32c_name(void) { return current->name; }

const char *ck_crc32c_available(int i) {
    const ck_crc32c_implementation *found = nth_supported(i);
    return found ? found->name : NULL;
}

uint32_t ck_crc32c_zeros(uint32_t value, uint64_t nbytes) { return ~multiply(xpow_bytes(nbytes), ~value); }

uint32_t ck_crc32c_combine(uint32_t first, uint32_t second, uint64_t second_nbytes) {
    return multiply(xpow_bytes(second_nbytes), first) ^ second;
}
