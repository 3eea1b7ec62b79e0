/* Anonymous mappings: reservation with guard pages, parallel prefault, NUMA policy. */
#ifndef CKPT_MAPPING_H
#define CKPT_MAPPING_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    void *reserved; /* the whole reservation, guards included */
    size_t reserved_bytes;
    unsigned char *address; /* what the caller uses */
    size_t nbytes;
} ck_mapping;

/* Each returns 0 or an errno. */
int ck_mapping_open(ck_mapping *mapping, size_t nbytes, size_t align, int hugetlb);
int ck_mapping_close(ck_mapping *mapping);
int ck_prefault(unsigned char *address, size_t nbytes, size_t step, int threads);
int ck_bind_memory(unsigned char *address, size_t nbytes, int node, int strict);
int ck_current_node(void);
/* Bytes of a range that lie in huge pages; -1 where the kernel (before 6.7) or /proc does not say. */
int64_t ck_huge_bytes(const unsigned char *address, size_t nbytes); /* -1 when the kernel does not say */

#endif
