/* Twins of the checksum kernel (pyx/kernels/crc32c_device.cu) and of a kernel that only the tests have. */
#define _GNU_SOURCE
#include "kernels.h"

#include <pthread.h>
#include <string.h>

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

uint32_t crc32c_more(uint32_t state, const unsigned char *bytes, uint64_t count) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_table);
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
static CUresult crc32c_zero(const Launch *launch) {
    uint64_t data = launch_value(launch, 0), left = launch_value(launch, 1), run;
    uint32_t state = 0xffffffffu, any = 0, *result, *counter;
    counter = (uint32_t *)reach_all(launch_value(launch, 2) + 2 * 256 * 4, 4);
    if (!counter || *counter) return CUDA_ERROR_ILLEGAL_ADDRESS;
    while (left) {
        const unsigned char *bytes = reach(data, left, &run);
        if (!bytes) return CUDA_ERROR_ILLEGAL_ADDRESS;
        state = crc32c_more(state, bytes, run);
        if (!any && (bytes[0] || memcmp(bytes, bytes + 1, run - 1) != 0)) any = 1;
        data += run;
        left -= run;
    }
    result = (uint32_t *)reach_all(launch_value(launch, 3), 8);
    if (!result) return CUDA_ERROR_ILLEGAL_ADDRESS;
    result[0] = ~state;
    result[1] = any;
    return CUDA_SUCCESS;
}

/* (data, count of 32-bit words, delta): adds delta to each word. */
static CUresult add_words(const Launch *launch) {
    uint64_t data = launch_value(launch, 0), left = launch_value(launch, 1) * 4, run;
    uint32_t delta = (uint32_t)launch_value(launch, 2);
    while (left) {
        unsigned char *bytes = reach(data, left, &run);
        if (!bytes) return CUDA_ERROR_ILLEGAL_ADDRESS;
        for (uint64_t i = 0; i + 4 <= run; i += 4) {
            uint32_t word;
            memcpy(&word, bytes + i, 4);
            word += delta;
            memcpy(bytes + i, &word, 4);
        }
        data += run;
        left -= run;
    }
    return CUDA_SUCCESS;
}

const Kernel checksum_kernels[] = {
    {"ckptpipe_crc32c_zero", {8, 8, 8, 8}, crc32c_zero},
    {"simcuda_add_words", {8, 8, 4}, add_words},
    {.name = NULL},
};
