#include "mapping.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Older C libraries than the kernel: values of the kernel's own uapi headers. */
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MAP_HUGE_SHIFT
#define MAP_HUGE_SHIFT 26
#endif
#define CK_HUGE_2MB (21 << MAP_HUGE_SHIFT)
#define CK_MPOL_PREFERRED 1
#define CK_MPOL_BIND 2
#define CK_MAX_NODES 1024
#define CK_MAX_THREADS 64

/* The reservation is PROT_NONE and its middle is mapped over: a guard page on both sides keeps the kernel
   from merging two mappings into one VMA (smaps counts per VMA), and an overrun faults at once. */
int ck_mapping_open(ck_mapping *mapping, size_t nbytes, size_t align, int hugetlb) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (align < page) align = page;
    if (nbytes == 0 || nbytes > (SIZE_MAX >> 2)) return EINVAL;
    size_t body = (nbytes + page - 1) / page * page;
    if (hugetlb) body = (nbytes + align - 1) / align * align;
    size_t reserved_bytes = body + align + 2 * page;
    void *reserved = mmap(NULL, reserved_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) return errno;
    uintptr_t start = ((uintptr_t)reserved + page + align - 1) / align * align;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    if (hugetlb) flags |= MAP_HUGETLB | CK_HUGE_2MB;
    void *address = mmap((void *)start, body, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (address == MAP_FAILED) {
        int error = errno;
        munmap(reserved, reserved_bytes);
        return error;
    }
    mapping->reserved = reserved;
    mapping->reserved_bytes = reserved_bytes;
    mapping->address = address;
    mapping->nbytes = body;
    return 0;
}

int ck_mapping_close(ck_mapping *mapping) {
    void *reserved = mapping->reserved;
    if (reserved == NULL) return 0;
    mapping->reserved = NULL;
    mapping->address = NULL;
    return munmap(reserved, mapping->reserved_bytes) == 0 ? 0 : errno;
}

typedef struct {
    unsigned char *address;
    size_t nbytes;
    int error;
    int started;
    pthread_t thread;
} ck_part;

static int ck_populate(unsigned char *address, size_t nbytes) {
    int error = 0;
    do {
        error = madvise(address, nbytes, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
    } while (error == EINTR || error == EAGAIN);
    if (error != EINVAL && error != ENOSYS) return error;
    /* Kernels before 5.14: touch each page. The memory is fresh, so writing zeros changes nothing. */
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (size_t offset = 0; offset < nbytes; offset += page) *(volatile unsigned char *)(address + offset) = 0;
    return 0;
}

static void *ck_part_main(void *argument) {
    ck_part *part = argument;
    part->error = ck_populate(part->address, part->nbytes);
    return NULL;
}

int ck_prefault(unsigned char *address, size_t nbytes, size_t step, int threads) {
    ck_part parts[CK_MAX_THREADS];
    if (threads > CK_MAX_THREADS) threads = CK_MAX_THREADS;
    if (threads < 1) threads = 1;
    size_t steps = (nbytes + step - 1) / step;
    if ((size_t)threads > steps) threads = (int)steps;
    size_t each = (steps + (size_t)threads - 1) / (size_t)threads * step;
    int count = 0;
    for (size_t offset = 0; offset < nbytes; offset += each, count++) {
        ck_part *part = &parts[count];
        part->address = address + offset;
        part->nbytes = nbytes - offset < each ? nbytes - offset : each;
        part->error = 0;
        part->started = 0;
    }
    /* Signals belong to the interpreter's own threads. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 1; i < count; i++)
        parts[i].started = pthread_create(&parts[i].thread, NULL, ck_part_main, &parts[i]) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    ck_part_main(&parts[0]);
    int error = parts[0].error;
    for (int i = 1; i < count; i++) {
        if (parts[i].started)
            pthread_join(parts[i].thread, NULL);
        else
            ck_part_main(&parts[i]); /* no thread to be had: do its part here */
        if (error == 0) error = parts[i].error;
    }
    return error;
}

int ck_bind_memory(unsigned char *address, size_t nbytes, int node, int strict) {
    unsigned long mask[CK_MAX_NODES / (8 * sizeof(unsigned long))];
    if (node < 0 || node >= CK_MAX_NODES - 1) return EINVAL;
    memset(mask, 0, sizeof mask);
    mask[(size_t)node / (8 * sizeof(unsigned long))] |= 1UL << ((size_t)node % (8 * sizeof(unsigned long)));
    int mode = strict ? CK_MPOL_BIND : CK_MPOL_PREFERRED;
    return syscall(SYS_mbind, address, nbytes, mode, mask, (unsigned long)CK_MAX_NODES, 0U) == 0 ? 0 : errno;
}

/* PAGEMAP_SCAN (Linux 6.7, Documentation/admin-guide/mm/pagemap.rst), as in the kernel's <linux/fs.h>. */
typedef struct {
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
    uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
} ck_pagemap_scan;
typedef struct {
    uint64_t start, end, categories;
} ck_pagemap_region;
#define CK_PAGEMAP_SCAN _IOWR('f', 16, ck_pagemap_scan)
#define CK_PAGE_IS_HUGE (1 << 6)

int64_t ck_huge_bytes(const unsigned char *address, size_t nbytes) {
    int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (file < 0) return -1;
    ck_pagemap_region regions[64];
    ck_pagemap_scan scan = {.size = sizeof scan,
                            .start = (uintptr_t)address,
                            .end = (uintptr_t)address + nbytes,
                            .vec = (uintptr_t)regions,
                            .vec_len = sizeof regions / sizeof regions[0],
                            .category_mask = CK_PAGE_IS_HUGE,
                            .return_mask = CK_PAGE_IS_HUGE};
    int64_t found = 0;
    while (scan.start < (uintptr_t)address + nbytes) {
        int count = ioctl(file, CK_PAGEMAP_SCAN, &scan);
        if (count < 0) {
            found = -1;
            break;
        }
        for (int i = 0; i < count; i++) found += (int64_t)(regions[i].end - regions[i].start);
        scan.start = scan.walk_end;
    }
    close(file);
    return found;
}

int ck_current_node(void) {
    unsigned cpu = 0, node = 0;
    return syscall(SYS_getcpu, &cpu, &node, NULL) == 0 ? (int)node : -1;
}
