/* A target without Python: plain_target SEED GPU:BYTES… prints "ready PID", then for each line on stdin
 * "sums STEP CRC32…" of its buffers, and rewrites buffer STEP % count. Word i of buffer k at step s is
 * (i + 1) * 0x9e3779b97f4a7c15 ^ (seed + 1000003 * k + 7919 * s); with a seed of 2^63 or more every other byte of it
 * is 0, so that the buffers compress. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define MAX_BUFFERS 16

static uint32_t table[256];

static uint32_t crc32_of(const unsigned char *bytes, size_t count) {
    uint32_t state = 0xffffffffu;
    while (count--) state = (state >> 8) ^ table[(state ^ *bytes++) & 0xff];
    return ~state;
}

static void *need(void *library, const char *name) {
    void *address = dlsym(library, name);
    if (!address) {
        fprintf(stderr, "plain_target: libcuda has no %s\n", name);
        exit(2);
    }
    return address;
}

static void check(int result, const char *call) {
    if (!result) return;
    fprintf(stderr, "plain_target: %s answered %d\n", call, result);
    exit(1);
}

static uint64_t kept = ~0ull;

static void fill(uint64_t *words, size_t count, uint64_t mix) {
    for (size_t i = 0; i < count; i++) words[i] = ((i + 1) * 0x9e3779b97f4a7c15ull ^ mix) & kept;
}

int main(int count, char **arguments) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "plain_target: %s\n", dlerror());
        return 2;
    }
    int (*init)(unsigned) = need(library, "cuInit");
    int (*retain)(void **, int) = need(library, "cuDevicePrimaryCtxRetain");
    int (*set)(void *) = need(library, "cuCtxSetCurrent");
    int (*allocate)(uint64_t *, size_t) = need(library, "cuMemAlloc_v2");
    int (*up)(uint64_t, const void *, size_t) = need(library, "cuMemcpyHtoD_v2");
    int (*down)(void *, uint64_t, size_t) = need(library, "cuMemcpyDtoH_v2");
    for (uint32_t i = 0; i < 256; i++) {
        table[i] = i;
        for (int bit = 0; bit < 8; bit++) table[i] = (table[i] >> 1) ^ (0xedb88320u & (0u - (table[i] & 1u)));
    }
    struct {
        void *context;
        uint64_t address;
        size_t bytes;
    } buffer[MAX_BUFFERS];
    int buffers = 0;
    size_t largest = 8;
    uint64_t seed = count > 1 ? strtoull(arguments[1], NULL, 10) : 0;
    if (seed >> 63) kept = 0xff00ff00ff00ff00ull;
    check(init(0), "cuInit");
    uint64_t *host = NULL;
    for (int i = 2; i < count && buffers < MAX_BUFFERS; i++, buffers++) {
        int gpu;
        if (sscanf(arguments[i], "%d:%zu", &gpu, &buffer[buffers].bytes) != 2) return 2;
        buffer[buffers].bytes &= ~(size_t)7;
        if (buffer[buffers].bytes > largest) largest = buffer[buffers].bytes;
        check(retain(&buffer[buffers].context, gpu), "cuDevicePrimaryCtxRetain");
        check(set(buffer[buffers].context), "cuCtxSetCurrent");
        check(allocate(&buffer[buffers].address, buffer[buffers].bytes), "cuMemAlloc");
    }
    host = malloc(largest);
    if (!host || !buffers) return 2;
    for (int k = 0; k < buffers; k++) {
        fill(host, buffer[k].bytes / 8, seed + 1000003ull * (uint64_t)k);
        check(set(buffer[k].context), "cuCtxSetCurrent");
        check(up(buffer[k].address, host, buffer[k].bytes), "cuMemcpyHtoD");
    }
    printf("ready %d\n", (int)getpid());
    fflush(stdout);
    char line[256];
    for (uint64_t step = 1; fgets(line, sizeof line, stdin); step++) {
        printf("sums %llu", (unsigned long long)(step - 1));
        for (int k = 0; k < buffers; k++) {
            check(set(buffer[k].context), "cuCtxSetCurrent");
            check(down(host, buffer[k].address, buffer[k].bytes), "cuMemcpyDtoH");
            printf(" %08x", crc32_of((unsigned char *)host, buffer[k].bytes));
        }
        int k = (int)(step % (uint64_t)buffers);
        fill(host, buffer[k].bytes / 8, seed + 1000003ull * (uint64_t)k + 7919ull * step);
        check(set(buffer[k].context), "cuCtxSetCurrent");
        check(up(buffer[k].address, host, buffer[k].bytes), "cuMemcpyHtoD");
        printf("\n");
        fflush(stdout);
    }
    return 0;
}
