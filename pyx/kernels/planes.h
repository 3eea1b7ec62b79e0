/* Byte planes: the bytes of K-byte elements by position, plane p holding bytes p, p + K, p + 2K, … */
#ifndef CKPT_PLANES_H
#define CKPT_PLANES_H

#include <stddef.h>

/* Picks the vector width by name, NULL or "" for the widest that this CPU runs. 0, or -1 when unknown here. */
int ck_planes_select(const char *name);
const char *ck_planes_name(void);
const char *ck_planes_available(int i); /* widest first; NULL past the last */

/* width is 2 or 4. nbytes is that of the whole; plane p has (nbytes - p + width - 1) / width bytes, rounded down.
   No two ranges overlap; any alignment. */
void ck_planes_split(unsigned char *const *planes, const unsigned char *source, size_t nbytes, int width);
void ck_planes_merge(unsigned char *destination, const unsigned char *const *planes, size_t nbytes, int width);

#endif
