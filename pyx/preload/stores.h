/* Copies that say what becomes of the caches, chosen by what the processor has. */
#ifndef CKPT_STORES_H
#define CKPT_STORES_H

#include <stddef.h>

void ckpt_stores_choose(void);
const char *ckpt_stores_name(void);

/* As memcpy, where the destination is not read again soon: non-temporal stores. Ends with a fence, so that a release
 * store by the same thread publishes the bytes. */
void ckpt_stores_stream(void *destination, const void *source, size_t bytes);

/* As memcpy, where the destination stays in the cache. */
void ckpt_stores_keep(void *destination, const void *source, size_t bytes);

/* A hint: a range is to be in this core's second cache, to be read. Memory that is not mapped is no error. */
void ckpt_stores_fetch(const void *address, size_t bytes);

enum ckpt_stores_demotion {
    CKPT_DEMOTE_NOT = 0,
    CKPT_DEMOTE = 1,       /* cldemote, or clflushopt where the processor has only that */
    CKPT_DEMOTE_FLUSH = 2, /* clflushopt */
};

/* The lines of a range leave this core's caches: for the cache that all share (cldemote), or for memory (clflushopt).
 * Nothing happens where the processor has neither. The bytes stay what they are; the range must be mapped. */
void ckpt_stores_demote(const void *address, size_t bytes, unsigned demotion);
const char *ckpt_stores_demotes_by(unsigned demotion); /* "cldemote", "clflushopt", "nothing" */

/* For tests: "" for the best, or a name; 0 when this processor lacks it. */
int ckpt_stores_force(const char *name);

#endif
