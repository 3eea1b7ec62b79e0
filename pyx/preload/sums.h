/* The block table: CRC32C and zero test of an image's blocks, taken from the driver's bytes while they are copied.
 *
 * A copy claims its blocks before it stores a byte, and only what it claimed is summed. A block is good for one write of
 * each of its bytes, in order: the first copy's up to some byte, the next one's from there. Anything else (a second write,
 * a gap, two copies at a time) spoils it for as long as the image is mapped, and its reader has to look for himself.
 */
#ifndef CKPT_SUMS_H
#define CKPT_SUMS_H

#include <stddef.h>
#include <stdint.h>

void ckpt_sums_choose(void); /* before the first use */

/* `blocks` are the entries of the image, [start, end) and `start` bytes of it. */
void ckpt_sums_clear(_Atomic uint64_t *blocks, uint64_t bytes);
void ckpt_sums_claim(_Atomic uint64_t *blocks, uint64_t start, uint64_t end); /* one call at a time */
void ckpt_sums_spoil(_Atomic uint64_t *blocks, uint64_t start, uint64_t end);

/* `bytes` at `start`, within one block, were stored; `data` is where they came from. Any thread. */
void ckpt_sums_take(_Atomic uint64_t *blocks, uint64_t start, const void *data, size_t bytes);

#endif
