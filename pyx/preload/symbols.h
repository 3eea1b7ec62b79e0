/* mmap and munmap, which the library exports in libc's place: how libcuda is noticed without a search. */
#ifndef CKPT_SYMBOLS_H
#define CKPT_SYMBOLS_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Under the names of their own: another preloaded library may stand before us under the exported ones. */
void *ckpt_exported_mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset);
int ckpt_exported_munmap(void *address, size_t bytes);

/* What interpose.c, the library of the second way, finds in this one. */
struct ckpt_interposed {
    _Atomic uintptr_t *low, *high; /* of image.h */
    void *(*memcpy)(void *, const void *, size_t);
    void *(*memmove)(void *, const void *, size_t);
    int (*pthread_create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    int (*called_from_driver)(const void *);
};
extern const struct ckpt_interposed ckpt_interposed __attribute__((visibility("default")));

#endif
