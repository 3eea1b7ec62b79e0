/* The driver's images in the pool: mapped, written, read and given back. */
#ifndef CKPT_IMAGE_H
#define CKPT_IMAGE_H

#include <stddef.h>
#include <stdint.h>

/* [low, high) holds every image that is mapped; both 0 when there is none. What a copy looks at first. */
extern _Atomic uintptr_t ckpt_image_low, ckpt_image_high;

static inline int ckpt_image_near(const void *address, size_t bytes) {
    uintptr_t start = (uintptr_t)address;
    return __atomic_load_n((uintptr_t *)&ckpt_image_high, __ATOMIC_RELAXED) > start &&
           start + bytes > __atomic_load_n((uintptr_t *)&ckpt_image_low, __ATOMIC_RELAXED);
}

/* Where the driver's mmap of `bytes` is served from the pool; NULL where it is not, with the reason in the control
 * page. `flags` are mmap's. */
void *ckpt_image_map(void *address, size_t bytes, int flags);

/* An allocation that looked like an image, but came when no checkpoint was plausible. */
void ckpt_image_passed(size_t bytes);

/* 1 where it was an image, and is given back; 0 for the caller to unmap the range itself. */
int ckpt_image_unmap(void *address, size_t bytes);

/* memcpy, or memmove where `overlap`, of which one end may lie in an image. */
void ckpt_image_copy(void *destination, const void *source, size_t bytes, int overlap);

/* Fills what the driver never wrote with zeros, in every image; returns how many bytes that were. */
uint64_t ckpt_images_settle(void);

int ckpt_images_mapped(void);
void ckpt_images_forget(void); /* in the child of a fork */

#endif
