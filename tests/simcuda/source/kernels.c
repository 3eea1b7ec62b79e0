/* The kernels that the simulation runs, in C: add one to `kernels`, with the size of each parameter. */
#define _GNU_SOURCE
#include "sim.h"

#include <string.h>

static uint64_t argument(const unsigned char *arguments, int i) {
    uint64_t value;
    memcpy(&value, arguments + 8 * i, 8);
    return value;
}

/* Bytes at a device address, or at a host address that the device reaches; NULL for any other. */
static unsigned char *reach(uint64_t address, uint64_t wanted, uint64_t *run) {
    int gpu;
    if (memory_is_device(address)) return memory_bytes(address, wanted, run, &gpu);
    pthread_mutex_lock(&sim.mutex);
    int known = host_find(address, wanted) != NULL;
    pthread_mutex_unlock(&sim.mutex);
    *run = wanted;
    return known ? (unsigned char *)address : NULL;
}

static uint32_t crc_table[8][256];

static void make_table(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t state = i;
        for (int bit = 0; bit < 8; bit++) state = (state >> 1) ^ (0x82f63b78u & (0u - (state & 1u)));
        crc_table[0][i] = state;
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t i = 0; i < 256; i++)
            crc_table[k][i] = (crc_table[k - 1][i] >> 8) ^ crc_table[0][crc_table[k - 1][i] & 0xff];
}

static uint32_t crc32c(uint32_t state, const unsigned char *bytes, uint64_t count) {
    for (; count >= 8; count -= 8, bytes += 8) {
        uint64_t word;
        memcpy(&word, bytes, 8);
        word ^= state;
        state = 0;
        for (int k = 0; k < 8; k++) state ^= crc_table[7 - k][(word >> (8 * k)) & 0xff];
    }
    while (count--) state = (state >> 8) ^ crc_table[0][(state ^ *bytes++) & 0xff];
    return state;
}

/* (data, bytes, scratch, result): result[0] = CRC32C, result[1] = 0 only if every byte is 0. The scratch's last
 * word must be 0 and stays so. */
static CUresult crc32c_zero(const unsigned char *arguments) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_table);
    uint64_t data = argument(arguments, 0), left = argument(arguments, 1), run;
    uint32_t state = 0xffffffffu, any = 0, *result, *counter;
    counter = (uint32_t *)reach(argument(arguments, 2) + 2 * 256 * 4, 4, &run);
    if (!counter || *counter) return CUDA_ERROR_ILLEGAL_ADDRESS;
    while (left) {
        const unsigned char *bytes = reach(data, left, &run);
        if (!bytes) return CUDA_ERROR_ILLEGAL_ADDRESS;
        state = crc32c(state, bytes, run);
        if (!any && (bytes[0] || memcmp(bytes, bytes + 1, run - 1) != 0)) any = 1;
        data += run;
        left -= run;
    }
    result = (uint32_t *)reach(argument(arguments, 3), 8, &run);
    if (!result) return CUDA_ERROR_ILLEGAL_ADDRESS;
    result[0] = ~state;
    result[1] = any;
    return CUDA_SUCCESS;
}

/* (data, count of 32-bit words, delta): adds delta to each word. */
static CUresult add_words(const unsigned char *arguments) {
    uint64_t data = argument(arguments, 0), left = argument(arguments, 1) * 4, run;
    uint32_t delta = (uint32_t)argument(arguments, 2);
    while (left) {
        unsigned char *bytes = reach(data, left, &run);
        if (!bytes) return CUDA_ERROR_ILLEGAL_ADDRESS;
        for (uint64_t i = 0; i + 4 <= run; i += 4) {
            uint32_t value;
            memcpy(&value, bytes + i, 4);
            value += delta;
            memcpy(bytes + i, &value, 4);
        }
        data += run;
        left -= run;
    }
    return CUDA_SUCCESS;
}

static const Kernel kernels[] = {
    {"ckptpipe_crc32c_zero", 4, {8, 8, 8, 8}, crc32c_zero},
    {"simcuda_add_words", 3, {8, 8, 4}, add_words},
};

const Kernel *kernel_at(size_t i) { return i < sizeof kernels / sizeof kernels[0] ? &kernels[i] : NULL; }
