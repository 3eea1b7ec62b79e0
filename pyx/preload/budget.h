/* One budget for all pools of a launch tree: a file that every process of it opens by its name. */
#ifndef CKPT_BUDGET_H
#define CKPT_BUDGET_H

#include <stdint.h>

#define CKPT_BUDGET_MAGIC 0x4754445543504b43ull
#define CKPT_BUDGET_SEATS 256u

/* The file's contents. Seat i belongs to the process that holds an open-file-description write lock on byte
 * LOCKS + i: the kernel lets it go with the process, so a dead one's share is free at once, in any PID namespace. */
struct ckpt_budget_file {
    uint64_t magic;
    uint64_t total;
    uint64_t used[CKPT_BUDGET_SEATS];
};
#define CKPT_BUDGET_LOCKS (1u << 16)

/* Makes this process's pools `bytes` in all, more or less than before; 0, ENOSPC when the tree has not so much left,
 * or another errno. `total` is used by the first process of the tree. Without a path the budget is this process's. */
int ckpt_budget_claim(const char *path, uint64_t total, uint64_t bytes);

/* As of the last claim. */
uint64_t ckpt_budget_total(void);
uint64_t ckpt_budget_used(void);

void ckpt_budget_leave(void);  /* at the process's end: removes the file when nobody else has a seat */
void ckpt_budget_forget(void); /* in the child of a fork */

#endif
