/* The pool: one sealed, unnamed memory file, mapped once and kept, of which driver images are ranges.
 *
 * Its size is fixed when it is made; its pages come when they are warmed. A pool that grows is a large file with few
 * pages. Every call takes place under ckpt_pool_lock, but for those that say otherwise.
 */
#ifndef CKPT_POOL_H
#define CKPT_POOL_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

extern pthread_mutex_t ckpt_pool_lock;

/* Makes it if that was not tried yet. 0 when there is one; else the control page has the reason. */
int ckpt_pool_make(void);

/* Makes [0, bytes) ready for use, in `width` threads (0: all): pages there, in this process's page table. Stops where
 * memory or the budget end. 0, or an enum ckpt_reason with words in `text`. */
int ckpt_pool_warm(uint64_t bytes, unsigned width, char *text);

/* The same for a range that is warm but for holes that the controller punched. Asks for no more of the budget. */
int ckpt_pool_refill(uint64_t offset, uint64_t bytes, char *text);

/* Where holes were punched: the background makes everything ready again. Not while any image is mapped. Returns whether
 * there is something to do. */
int ckpt_pool_cool(void);

/* What the background should bring `warm` to; 0 for nothing to do. */
uint64_t ckpt_pool_wanted(void);
void ckpt_pool_want(uint64_t bytes);

/* A free range of the pool: images are placed by the caller. */
unsigned char *ckpt_pool_at(uint64_t offset);     /* in the kept mapping; NULL once that was torn */
int ckpt_pool_map(uint64_t offset, uint64_t bytes, void *address, int replace, void **where); /* 0 or errno */
void ckpt_pool_tear(void); /* the program unmapped a part of the kept mapping */

uint64_t ckpt_pool_bytes(void); /* 0 without a pool */
int ckpt_pool_fd(void);         /* any time; -1 where it is lost */

/* Set, without the lock, by whoever waits for it in a hurry: background warming stands back. */
extern _Atomic uint32_t ckpt_pool_hurry;

void ckpt_pool_forget(void); /* in the child of a fork */

#endif
