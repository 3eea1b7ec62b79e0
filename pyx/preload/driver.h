/* libcuda as it is loaded into this process, and what it calls here instead of libc. */
#ifndef CKPT_DRIVER_H
#define CKPT_DRIVER_H

#include <pthread.h>
#include <stddef.h>
#include <sys/types.h>

/* Redirects libcuda's entries where it is loaded and that was not done yet. Nothing else: no pool, no thread. */
void ckpt_driver_look(void);

/* 1 where the address is libcuda's. Takes no lock, where the C library can tell without (glibc 2.35). */
int ckpt_driver_called_from(const void *address);

/* What libcuda's calls of mmap and so on come to; the first one starts the pool's thread. */
void *ckpt_driver_mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset);
int ckpt_driver_munmap(void *address, size_t bytes);
void *ckpt_driver_memcpy(void *destination, const void *source, size_t bytes);
void *ckpt_driver_memmove(void *destination, const void *source, size_t bytes);

int ckpt_driver_create_thread(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                              void *argument);

void ckpt_driver_start(void);  /* the constructor's part */
void ckpt_driver_forget(void); /* in the child of a fork: it may begin anew */

#endif
