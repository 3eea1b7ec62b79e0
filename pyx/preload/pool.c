#define _GNU_SOURCE
#include "pool.h"

#include "budget.h"
#include "config.h"
#include "control_page.h"
#include "copies.h"
#include "descriptor.h"
#include "next.h"
#include "process_facts.h"
#include "ring.h"
#include "stores.h"
#include "sums.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MFD_HUGE_SHIFT
#define MFD_HUGE_SHIFT 26
#endif
#define HUGE_BYTES CKPT_PIECE_BYTES
#define SLICE_BYTES (256ull << 20) /* warmed at a time: between slices memory is looked at, and others get a turn */
#define SPARE_BYTES (256ull << 20) /* of memory that warming leaves free */
#define MAX_WORKERS 16
#define AWAKE_US 100 /* longer than the driver takes for a transfer of its usual piece */
#define AWAKE_CPUS 4 /* with fewer, a worker that waits awake is in somebody's way */

pthread_mutex_t ckpt_pool_lock = PTHREAD_MUTEX_INITIALIZER;
_Atomic uint32_t ckpt_pool_hurry;

static struct {
    int tried;
    struct ckpt_descriptor file;
    unsigned char *base; /* of the kept mapping */
    uint64_t bytes;
    uint64_t wanted;
    uint64_t claimed; /* of the budget */
    int torn;
    _Atomic int collapse; /* MADV_COLLAPSE is worth a try */
} pool = {.file = CKPT_NO_DESCRIPTOR};

static uint64_t whole_pieces(uint64_t bytes) {
    if (bytes > UINT64_MAX - CKPT_PIECE_BYTES) return UINT64_MAX / CKPT_PIECE_BYTES * CKPT_PIECE_BYTES;
    return (bytes + CKPT_PIECE_BYTES - 1) / CKPT_PIECE_BYTES * CKPT_PIECE_BYTES;
}

static int gone(int reason, const char *what, int error) {
    ckpt_control->pool_reason = (uint32_t)reason;
    if (error)
        ckpt_control_text(ckpt_control->pool_text, "%s: %s", what, ckpt_error_words(error));
    else
        ckpt_control_text(ckpt_control->pool_text, "%s", what);
    atomic_store(&ckpt_control->pool_state, CKPT_POOL_GONE);
    ckpt_control_event();
    return reason;
}

/* Not where they would take a processor, or time of one, from somebody. */
static unsigned awake_us(unsigned cpus, unsigned threads) {
    unsigned quota = ckpt_cpu_quota(NULL);
    if (ckpt_config.awake_us >= 0) return (unsigned)ckpt_config.awake_us;
    if (quota < cpus) cpus = quota;
    return cpus >= AWAKE_CPUS && threads <= cpus ? AWAKE_US : 0;
}

static void prepare_workers(void) {
    cpu_set_t cpus;
    int node = ckpt_config.numa_node;
    if (node == -1 && (node = ckpt_node_count() > 1 ? ckpt_gpu_node() : -1) < 0) node = -1;
    if (node == -2) node = -1;
    int count = ckpt_node_cpus(node, &cpus);
    if (!count && node >= 0) count = ckpt_node_cpus(node = -1, &cpus);
    unsigned threads = ckpt_config.workers ? ckpt_config.workers : count > MAX_WORKERS ? MAX_WORKERS : (unsigned)count;
    struct ckpt_ring_options options = {node >= 0 ? &cpus : NULL, awake_us((unsigned)count, threads)};
    ckpt_stores_choose();
    ckpt_sums_choose();
    ckpt_control->workers = ckpt_ring_start(threads ? threads : 1, &options);
    ckpt_copies_set(&ckpt_config.copies);
    ckpt_control->numa_node = node;
    strncpy(ckpt_control->stores, ckpt_stores_name(), sizeof ckpt_control->stores - 1);
}

/* The size of the file. */
static uint64_t choose_bytes(uint64_t left, uint64_t budget) {
    switch (ckpt_config.mode) {
    case CKPT_POOL_FIXED: return whole_pieces(ckpt_config.pool_bytes);
    case CKPT_POOL_SHARE: {
        uint64_t share = left / 100 * ckpt_config.pool_percent;
        return (share < budget ? share : budget) / CKPT_PIECE_BYTES * CKPT_PIECE_BYTES;
    }
    default: return budget / CKPT_PIECE_BYTES * CKPT_PIECE_BYTES;
    }
}

static int make_file(uint64_t bytes, unsigned pages) {
    unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    if (pages == CKPT_PAGES_HUGETLB) flags |= MFD_HUGETLB | (21u << MFD_HUGE_SHIFT);
    int fd = memfd_create("ckptpipe-pool", flags);
    if (fd < 0) return -errno;
    if (fchmod(fd, 0600) || ftruncate(fd, (off_t)bytes) ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) {
        int error = errno;
        close(fd);
        return -error;
    }
    return fd;
}

static void mark(void *address, uint64_t bytes) {
    madvise(address, bytes, MADV_DONTFORK);
    madvise(address, bytes, MADV_DONTDUMP);
    if (ckpt_control->pool_pages == CKPT_PAGES_THP || ckpt_control->pool_pages == CKPT_PAGES_AUTO)
        madvise(address, bytes, MADV_HUGEPAGE);
}

/* At an address that is a multiple of the huge page size, so that one entry can map a huge page. */
static int map_file(int fd, uint64_t bytes, unsigned pages) {
    unsigned char *space = ckpt_raw_mmap(NULL, bytes + HUGE_BYTES, PROT_NONE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED) return errno;
    unsigned char *base = (unsigned char *)(((uintptr_t)space + HUGE_BYTES - 1) & ~(uintptr_t)(HUGE_BYTES - 1));
    /* A hugetlb mapping reserves its pages here unless told not to: a pool that grows takes them as it does. */
    int reserve = pages == CKPT_PAGES_HUGETLB && ckpt_config.mode != CKPT_POOL_GROW ? 0 : MAP_NORESERVE;
    if (ckpt_raw_mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | reserve, fd, 0) == MAP_FAILED) {
        int error = errno;
        ckpt_raw_munmap(space, bytes + HUGE_BYTES);
        return error;
    }
    if (base > space) ckpt_raw_munmap(space, (size_t)(base - space));
    ckpt_raw_munmap(base + bytes, HUGE_BYTES - (size_t)(base - space));
    pool.base = base;
    return 0;
}

static int make_pages(uint64_t bytes, unsigned pages) {
    int fd = make_file(bytes, pages);
    int error = fd < 0 ? -fd : map_file(fd, bytes, pages);
    if (error) {
        if (fd >= 0) close(fd);
        return error;
    }
    pool.file = ckpt_descriptor_of(fd);
    pool.bytes = bytes;
    ckpt_control->pool_pages = pages;
    ckpt_control->page_bytes = pages == CKPT_PAGES_HUGETLB ? HUGE_BYTES : (uint64_t)sysconf(_SC_PAGESIZE);
    atomic_store(&pool.collapse, pages == CKPT_PAGES_AUTO || pages == CKPT_PAGES_THP);
    mark(pool.base, bytes);
    return 0;
}

static void note_budget(void) {
    ckpt_control->budget_bytes = ckpt_budget_total();
    ckpt_control->budget_used = ckpt_budget_used();
}

/* Takes [0, bytes) from the tree's budget. */
static int claim(uint64_t bytes, uint64_t total) {
    if (bytes <= pool.claimed) return 0;
    int error = ckpt_budget_claim(ckpt_config.budget_path, total, bytes);
    if (!error) pool.claimed = bytes;
    note_budget();
    return error;
}

int ckpt_pool_make(void) {
    if (pool.tried) return pool.bytes ? 0 : -1;
    pool.tried = 1;
    char whose[128], text[CKPT_TEXT];
    prepare_workers();
    uint64_t left = ckpt_memory_left(whose, sizeof whose);
    uint64_t total = ckpt_config.budget_bytes ? ckpt_config.budget_bytes : left / 100 * ckpt_config.budget_percent;
    int error = claim(1, total); /* a seat, and what the tree's first process said is the budget */
    if (error && error != ENOSPC) { /* another user by now, or another root directory */
        ckpt_control->pool_reason = CKPT_REASON_SYSTEM;
        ckpt_control_text(ckpt_control->pool_text, "no budget in common with the launch tree, %s: %s",
                          ckpt_config.budget_path, ckpt_error_words(error));
        ckpt_config.budget_path[0] = 0;
        error = claim(1, total);
    }
    uint64_t others = ckpt_budget_used() - (pool.claimed ? pool.claimed : 0), budget = ckpt_budget_total();
    uint64_t free_budget = budget > others ? budget - others : 0;
    uint64_t bytes = choose_bytes(left, ckpt_config.mode == CKPT_POOL_GROW ? budget : free_budget);
    if (bytes > CKPT_PIECES * CKPT_PIECE_BYTES) bytes = CKPT_PIECES * CKPT_PIECE_BYTES;
    if (!bytes || (ckpt_config.mode != CKPT_POOL_GROW && bytes > free_budget)) {
        ckpt_control_text(text, "the pool wants %llu bytes, the budget of %llu has %llu left",
                          (unsigned long long)bytes, (unsigned long long)budget, (unsigned long long)free_budget);
        return gone(CKPT_REASON_BUDGET, text, 0);
    }
    if (ckpt_config.mode != CKPT_POOL_GROW && bytes > left) {
        ckpt_control_text(text, "the pool wants %llu bytes, %s has %llu left", (unsigned long long)bytes, whose,
                          (unsigned long long)left);
        return gone(CKPT_REASON_MEMORY, text, 0);
    }
    if (ckpt_config.mode != CKPT_POOL_GROW && (error = claim(bytes, total)))
        return gone(error == ENOSPC ? CKPT_REASON_BUDGET : CKPT_REASON_SYSTEM, "the launch tree's budget", error);
    error = make_pages(bytes, ckpt_config.pages);
    if (error && ckpt_config.pages == CKPT_PAGES_HUGETLB) {
        ckpt_control->pool_reason = CKPT_REASON_MEMORY;
        ckpt_control_text(ckpt_control->pool_text, "no hugetlb pages (%s), others were taken", ckpt_error_words(error));
        error = make_pages(bytes, CKPT_PAGES_AUTO);
    }
    if (error) return gone(CKPT_REASON_SYSTEM, "the pool cannot be made", error);
    ckpt_control->pool_bytes = bytes;
    if (ckpt_config.mode == CKPT_POOL_GROW) {
        atomic_store(&ckpt_control->pool_state, CKPT_POOL_READY);
    } else {
        pool.wanted = bytes;
        atomic_store(&ckpt_control->pool_state, CKPT_POOL_WARMING);
    }
    ckpt_control_event();
    return 0;
}

struct warming {
    uint64_t from;
    _Atomic int error;
    _Atomic uint64_t huge;
};

/* A huge page a step: collapsed where the system has none to give on a fault, else page by page. */
static void warm_step(void *context, size_t start, size_t bytes, struct ckpt_later *later) {
    struct warming *warming = context;
    (void)later;
    unsigned char *at = pool.base + warming->from + start;
    if (atomic_load(&warming->error)) return;
    if (atomic_load(&pool.collapse) && bytes == HUGE_BYTES) {
        /* The kernel refuses to collapse a range without any page. */
        if (madvise(at, (size_t)sysconf(_SC_PAGESIZE), MADV_POPULATE_WRITE) == 0 &&
            madvise(at, bytes, MADV_COLLAPSE) == 0)
            atomic_fetch_add(&warming->huge, bytes);
        else if (errno == EINVAL)
            atomic_store(&pool.collapse, 0); /* this kernel never will */
    }
    if (madvise(at, bytes, MADV_POPULATE_WRITE) == 0) return;
    if (errno != EINVAL) {
        atomic_store(&warming->error, errno);
        return;
    }
    for (size_t i = 0; i < bytes; i += 4096) /* before Linux 5.14 */
        __atomic_fetch_or(at + i, 0, __ATOMIC_RELAXED);
}

static int warm_slice(uint64_t from, uint64_t to, unsigned width, char *text) {
    char whose[128];
    uint64_t left = ckpt_memory_left(whose, sizeof whose);
    if (left < SPARE_BYTES + (to - from)) {
        ckpt_control_text(text, "%s has %llu bytes left, the pool would take %llu more", whose,
                          (unsigned long long)left, (unsigned long long)(to - from));
        return CKPT_REASON_MEMORY;
    }
    struct warming warming = {.from = from};
    ckpt_ring_run(warm_step, &warming, to - from, HUGE_BYTES, width, CKPT_RING_PLAIN);
    atomic_fetch_add(&ckpt_control->pool_huge, atomic_load(&warming.huge));
    int error = atomic_load(&warming.error);
    if (!error) return 0;
    ckpt_control_text(text, "no page for the pool: %s", ckpt_error_words(error));
    return CKPT_REASON_MEMORY;
}

int ckpt_pool_refill(uint64_t offset, uint64_t bytes, char *text) {
    uint64_t warm = atomic_load(&ckpt_control->pool_warm), huge = atomic_load(&ckpt_control->pool_huge);
    for (uint64_t at = offset, end = offset + bytes; at < end; at += SLICE_BYTES) {
        int reason = warm_slice(at, end - at > SLICE_BYTES ? at + SLICE_BYTES : end, 0, text);
        if (reason) return reason;
    }
    /* What was huge before counts once. */
    if (atomic_load(&ckpt_control->pool_huge) > warm) atomic_store(&ckpt_control->pool_huge, huge);
    return 0;
}

int ckpt_pool_warm(uint64_t bytes, unsigned width, char *text) {
    uint64_t warm = atomic_load(&ckpt_control->pool_warm);
    bytes = whole_pieces(bytes);
    if (bytes > pool.bytes) bytes = pool.bytes;
    if (bytes <= warm) return 0;
    int error = claim(bytes, ckpt_budget_total());
    if (error) {
        ckpt_control_text(text, "the launch tree's budget of %llu bytes has no room for %llu",
                          (unsigned long long)ckpt_budget_total(), (unsigned long long)bytes);
        return error == ENOSPC ? CKPT_REASON_BUDGET : CKPT_REASON_SYSTEM;
    }
    while (warm < bytes) {
        uint64_t to = bytes - warm > SLICE_BYTES ? warm + SLICE_BYTES : bytes;
        int reason = warm_slice(warm, to, width, text);
        if (reason) return reason;
        atomic_store(&ckpt_control->pool_warm, warm = to);
    }
    uint64_t huge = ckpt_control->pool_pages == CKPT_PAGES_HUGETLB ? warm : atomic_load(&ckpt_control->pool_huge);
    atomic_store(&ckpt_control->pool_huge, huge);
    ckpt_control->page_bytes = huge * 2 > warm ? HUGE_BYTES : (uint64_t)sysconf(_SC_PAGESIZE);
    return 0;
}

int ckpt_pool_cool(void) {
    uint64_t warm = atomic_load(&ckpt_control->pool_warm);
    uint32_t ready = CKPT_POOL_READY;
    if (!pool.bytes || pool.torn || !atomic_exchange(&ckpt_control->pool_holes, 0)) return 0;
    if (pool.wanted < warm) pool.wanted = warm;
    atomic_store(&ckpt_control->pool_warm, 0);
    atomic_store(&ckpt_control->pool_huge, 0);
    atomic_compare_exchange_strong(&ckpt_control->pool_state, &ready, CKPT_POOL_WARMING);
    return 1;
}

uint64_t ckpt_pool_wanted(void) {
    return pool.bytes && pool.wanted > atomic_load(&ckpt_control->pool_warm) ? pool.wanted : 0;
}

void ckpt_pool_want(uint64_t bytes) { pool.wanted = bytes > pool.bytes ? pool.bytes : bytes; }

unsigned char *ckpt_pool_at(uint64_t offset) { return pool.torn || !pool.base ? NULL : pool.base + offset; }

int ckpt_pool_map(uint64_t offset, uint64_t bytes, void *address, int replace, void **where) {
    int fd = ckpt_pool_fd();
    if (fd < 0) return EBADF;
    if (ckpt_control->pool_pages == CKPT_PAGES_HUGETLB && bytes % HUGE_BYTES) return EINVAL; /* it would map more */
    int flags = MAP_SHARED | MAP_NORESERVE | (replace ? MAP_FIXED : address ? MAP_FIXED_NOREPLACE : 0);
    void *mapped = ckpt_raw_mmap(address, bytes, PROT_READ | PROT_WRITE, flags, fd, (off_t)offset);
    if (mapped == MAP_FAILED) return errno;
    if (address && mapped != address) { /* a kernel that takes MAP_FIXED_NOREPLACE for a hint */
        ckpt_raw_munmap(mapped, bytes);
        return EEXIST;
    }
    mark(mapped, bytes);
    madvise(mapped, bytes, MADV_POPULATE_WRITE); /* the pages are there: only the page table is filled */
    *where = mapped;
    return 0;
}

void ckpt_pool_tear(void) { pool.torn = 1; }

uint64_t ckpt_pool_bytes(void) { return pool.bytes; }

int ckpt_pool_fd(void) { return ckpt_descriptor_number(&pool.file); }

void ckpt_pool_forget(void) {
    ckpt_descriptor_close(&pool.file);
    memset(&pool, 0, sizeof pool);
    pool.file.fd = -1;
    pthread_mutex_init(&ckpt_pool_lock, NULL);
    atomic_store(&ckpt_pool_hurry, 0);
}
