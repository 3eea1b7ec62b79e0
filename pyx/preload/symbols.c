/* A call of mmap costs a microsecond or more; what is added to it here is two comparisons, and for shared mappings
 * of files the question whether libcuda asks: it maps its devices so in cuInit. dlopen is not stood in front of, since
 * it looks at its caller's own search path. */
#define _GNU_SOURCE
#include "symbols.h"

#include "driver.h"
#include "image.h"
#include "next.h"

#include <sys/mman.h>

#define POPULATED_MIN (1u << 20) /* bytes */

#define EXPORT __attribute__((visibility("default")))
#define UNLIKELY(condition) __builtin_expect(!!(condition), 0)

static inline int is_populated(size_t bytes, int flags) {
    return (flags & (MAP_POPULATE | MAP_ANONYMOUS)) == (MAP_POPULATE | MAP_ANONYMOUS) && bytes >= POPULATED_MIN;
}

static inline int is_device(int flags, int fd) { return fd >= 0 && (flags & MAP_TYPE) != MAP_PRIVATE; }

void *ckpt_exported_mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset) {
    if (UNLIKELY(!ckpt_symbol_mmap)) return ckpt_raw_mmap(address, bytes, protection, flags, fd, offset);
    if (UNLIKELY(is_populated(bytes, flags) || is_device(flags, fd))) {
        if (ckpt_driver_called_from(__builtin_return_address(0))) {
            ckpt_driver_look();
            return ckpt_driver_mmap(address, bytes, protection, flags, fd, offset);
        }
        /* Another library may stand between libcuda and us. This kind is rare enough to search. */
        if (is_populated(bytes, flags)) ckpt_driver_look();
    }
    return ckpt_symbol_mmap(address, bytes, protection, flags, fd, offset);
}

int ckpt_exported_munmap(void *address, size_t bytes) {
    if (UNLIKELY(!ckpt_symbol_munmap)) return ckpt_raw_munmap(address, bytes);
    if (UNLIKELY(ckpt_image_near(address, bytes)) && ckpt_image_unmap(address, bytes)) return 0;
    return ckpt_symbol_munmap(address, bytes);
}

EXPORT void *mmap(void *, size_t, int, int, int, off_t) __attribute__((alias("ckpt_exported_mmap")));
EXPORT void *mmap64(void *, size_t, int, int, int, off_t) __attribute__((alias("ckpt_exported_mmap")));
EXPORT int munmap(void *, size_t) __attribute__((alias("ckpt_exported_munmap")));

const struct ckpt_interposed ckpt_interposed = {
    &ckpt_image_low,       &ckpt_image_high,          ckpt_driver_memcpy,
    ckpt_driver_memmove,   ckpt_driver_create_thread, ckpt_driver_called_from,
};
