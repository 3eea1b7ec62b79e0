/* plain_target whose malloc is its own: each block is populated anonymous memory, as the driver's image is. */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

struct block {
    size_t bytes;
    char pad[4096 - sizeof(size_t)];
};

void *malloc(size_t bytes) {
    size_t whole = (bytes + sizeof(struct block) + 4095) / 4096 * 4096;
    struct block *block =
        mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (block == MAP_FAILED) return NULL;
    block->bytes = whole;
    return block + 1;
}

void free(void *address) {
    if (!address) return;
    struct block *block = (struct block *)address - 1;
    munmap(block, block->bytes);
}

void *calloc(size_t count, size_t bytes) {
    if (bytes && count > SIZE_MAX / bytes) return NULL;
    return malloc(count * bytes);
}

void *realloc(void *address, size_t bytes) {
    void *fresh = malloc(bytes);
    if (fresh && address) {
        size_t old = ((struct block *)address - 1)->bytes - sizeof(struct block);
        memcpy(fresh, address, old < bytes ? old : bytes);
        free(address);
    }
    return fresh;
}

#include "../../simcuda/targets/plain.c"
