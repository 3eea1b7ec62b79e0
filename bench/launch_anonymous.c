/* Linked into a build of the capture library for bench.gpu_launch (--wrap=ckpt_raw_mmap): its pool is private anonymous
 * memory, as the driver's own image is, on transparent huge pages. Nobody else can have such a pool. */
#define _GNU_SOURCE
#include <stddef.h>
#include <sys/mman.h>
#include <sys/types.h>

void *__real_ckpt_raw_mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset);

/* The control page and the budget's file are small, and shared as ever. */
void *__wrap_ckpt_raw_mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset) {
    if (fd >= 0 && (flags & MAP_FIXED) && (flags & MAP_SHARED)) {
        flags = (flags & ~MAP_SHARED) | MAP_PRIVATE | MAP_ANONYMOUS;
        fd = -1;
    }
    return __real_ckpt_raw_mmap(address, bytes, protection, flags, fd, offset);
}
