/* What `ckptpipe launch` asked for: one environment variable, "key=value;key=value". */
#ifndef CKPT_CONFIG_H
#define CKPT_CONFIG_H

#include "copies.h"
#include "ring.h"

#include <stdint.h>

#define CKPT_CONFIG_VARIABLE "CKPTPIPE_LAUNCH"

enum ckpt_pool_mode { CKPT_POOL_GROW, CKPT_POOL_FIXED, CKPT_POOL_SHARE };
enum ckpt_hook_choice { CKPT_HOOKS_AUTO, CKPT_HOOKS_RELOCATIONS, CKPT_HOOKS_SYMBOLS };

struct ckpt_config {
    enum ckpt_pool_mode mode;
    uint64_t pool_bytes;      /* FIXED */
    unsigned pool_percent;    /* SHARE: of the memory that is available when the pool is made */
    unsigned margin_percent;  /* GROW: kept beyond the largest image */
    uint64_t budget_bytes;    /* of the launch tree; 0: budget_percent of what is available */
    unsigned budget_percent;
    unsigned pages;           /* enum ckpt_pages */
    unsigned workers;         /* 0: choose */
    int numa_node;            /* -1: the GPU's; -2: none */
    uint64_t image_bytes_min; /* smaller allocations are no image */
    enum ckpt_hook_choice hook;
    int awake_us;             /* how long workers stay awake after a copy; -1: choose */
    int checksum;             /* of the blocks of images that a controller expects */
    struct ckpt_ring_spare spare; /* of copies out of a window */
    struct ckpt_copies_options copies;
    char budget_path[256];    /* "": no file, the budget is this process's alone */
};

extern struct ckpt_config ckpt_config;

/* Reads the variable as it is now: a program may change or overwrite its environment later. */
void ckpt_config_read(void);

#endif
