/* The functions that the library stands in front of, as the rest of the process has them. */
#ifndef CKPT_NEXT_H
#define CKPT_NEXT_H

#include <pthread.h>
#include <stddef.h>
#include <sys/types.h>

typedef void *ckpt_mmap_call(void *, size_t, int, int, int, off_t);
typedef int ckpt_munmap_call(void *, size_t);
typedef void *ckpt_copy_call(void *, const void *, size_t);
typedef void *ckpt_checked_copy_call(void *, const void *, size_t, size_t);
typedef int ckpt_thread_call(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

struct ckpt_next {
    ckpt_mmap_call *mmap;
    ckpt_munmap_call *munmap;
    ckpt_copy_call *memcpy, *memmove;
    ckpt_checked_copy_call *memcpy_checked, *memmove_checked;
    ckpt_thread_call *pthread_create;
};

/* For libcuda: what its entries led to before they were redirected. */
extern struct ckpt_next ckpt_next;

/* For every other caller of the exported mmap and munmap: the next library's, NULL before the constructor ran. */
extern ckpt_mmap_call *ckpt_symbol_mmap;
extern ckpt_munmap_call *ckpt_symbol_munmap;

/* The kernel's own, which nobody stands in front of: for the library's own mappings. */
void *ckpt_raw_mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset);
int ckpt_raw_munmap(void *address, size_t bytes);

void ckpt_next_find(void);

#endif
