/* Copies that say what becomes of the caches, chosen by what the processor has. */
#ifndef CKPT_STORES_H
#define CKPT_STORES_H

#include <stddef.h>

void ckpt_stores_choose(void);
const char *ckpt_stores_name(void);

/* As memcpy, where the destination is not read again soon: non-temporal stores. Ends with a fence, so that a release
 * store by the same thread publishes the bytes. */
void ckpt_stores_stream(void *destination, const void *source, size_t bytes);

/* As memcpy, where the destination is to stay in the cache. */
void ckpt_stores_keep(void *destination, const void *source, size_t bytes);

/* A hint: the lines of a range are to be in this core's cache of a level (1, 2, 3), to be read; 0: for one read. Memory
 * that is not mapped is no error. */
void ckpt_stores_fetch(const void *address, size_t bytes, unsigned level);

/* For tests: "" for the best, or a name; 0 when this processor lacks it. */
int ckpt_stores_force(const char *name);

#endif
