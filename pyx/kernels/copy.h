/* memcpy with streaming stores, zero tests, and both fused with CRC32C in one pass over memory. */
#ifndef CKPT_COPY_H
#define CKPT_COPY_H

#include <stddef.h>
#include <stdint.h>

/* Picks the vector width by name, NULL or "" for the widest that this CPU runs. 0, or -1 when unknown here. */
int ck_copy_select(const char *name);
const char *ck_copy_name(void);
const char *ck_copy_available(int i); /* widest first; NULL past the last */

/* Ranges must not overlap. */
void ck_copy(void *destination, const void *source, size_t nbytes);
int ck_is_zero(const void *data, size_t nbytes); /* 1 for an empty range */

/* One pass: CRC32C continued from value, and whether every byte is zero. destination NULL: no copy. */
uint32_t ck_pass(void *destination, const void *source, size_t nbytes, uint32_t value, int *zero);

/* From offset on, the next run of blocks of granularity bytes that are not all zero: [*start, *end), end cut to
   nbytes. 0 when there is none. */
int ck_next_data(const unsigned char *data, size_t nbytes, size_t granularity, size_t offset, size_t *start,
                 size_t *end);

#endif
