/* Copies whose destination is not read again soon: non-temporal stores, chosen by what the processor has. */
#ifndef CKPT_STORES_H
#define CKPT_STORES_H

#include <stddef.h>

void ckpt_stores_choose(void);
const char *ckpt_stores_name(void);

/* As memcpy; ends with a fence, so that a release store by the same thread publishes the bytes. */
void ckpt_stores_copy(void *destination, const void *source, size_t bytes);

/* For tests: "" for the best, or a name; 0 when this processor lacks it. */
int ckpt_stores_force(const char *name);

#endif
