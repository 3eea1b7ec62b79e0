/* What the kernel says of this process and of the memory that is left for it. */
#ifndef CKPT_PROCESS_FACTS_H
#define CKPT_PROCESS_FACTS_H

#include <sched.h>
#include <stddef.h>
#include <stdint.h>

uint64_t ckpt_start_time(void); /* field 22 of /proc/self/stat, 0 where it cannot be read */

/* Bytes that may still be taken: MemAvailable, and what every memory cgroup above this process leaves (version 2 or
 * 1; its page cache that is not in use counts as free). `whose` gets words for a message. */
uint64_t ckpt_memory_left(char *whose, size_t room);

/* The NUMA node of the GPUs whose devices this process has open; -1 where they differ or the kernel does not say,
 * -2 where it has none open. */
int ckpt_gpu_node(void);

int ckpt_node_count(void);
/* The processors of a node (of all for -1) that this process may run on; 0 where none is left. */
int ckpt_node_cpus(int node, cpu_set_t *cpus);

struct ckpt_groups {
    const char *list; /* as /proc/self/cgroup */
    const char *root; /* as /sys/fs/cgroup, of both versions */
};

/* Whole processors that a process's cgroups leave it time for; UINT_MAX where none of them limits it. NULL: this one's. */
unsigned ckpt_cpu_quota(const struct ckpt_groups *groups);

/* errno in words; the text lives until this thread asks again. */
const char *ckpt_error_words(int error);

/* Reads a small file, with an end of text; the length, or -1. */
long ckpt_read_file(const char *path, char *text, size_t room);

#endif
