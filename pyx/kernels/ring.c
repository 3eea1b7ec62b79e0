#include "ring.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* One number on every architecture: added after the tables were unified. */
#ifndef SYS_io_uring_setup
#define SYS_io_uring_setup 425
#endif
#ifndef SYS_io_uring_enter
#define SYS_io_uring_enter 426
#endif
#ifndef SYS_io_uring_register
#define SYS_io_uring_register 427
#endif

enum { OFF_SQ_RING = 0, OFF_CQ_RING = 0x8000000, OFF_SQES = 0x10000000 };
enum { FEAT_SINGLE_MMAP = 1u << 0 };
enum { ENTER_GETEVENTS = 1u << 0 };
enum { SQ_CQ_OVERFLOW = 1u << 1, SQ_TASKRUN = 1u << 2 };
enum { REGISTER_BUFFERS = 0, REGISTER_EVENTFD = 4, REGISTER_PROBE = 8 };
enum { OP_SUPPORTED = 1u << 0 };

struct sq_offsets {
    uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, resv1;
    uint64_t user_addr;
};

struct cq_offsets {
    uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, resv1;
    uint64_t user_addr;
};

struct params {
    uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd;
    uint32_t resv[3];
    struct sq_offsets sq_off;
    struct cq_offsets cq_off;
};

struct probe_op {
    uint8_t op, resv;
    uint16_t flags;
    uint32_t resv2;
};

struct probe {
    uint8_t last_op, ops_len;
    uint16_t resv;
    uint32_t resv2[3];
    struct probe_op ops[64];
};

_Static_assert(sizeof(struct ring_sqe) == 64, "io_uring submission entry");
_Static_assert(sizeof(struct ring_cqe) == 16, "io_uring completion entry");
_Static_assert(sizeof(struct params) == 120, "io_uring parameters");
_Static_assert(sizeof(struct probe) == 16 + 64 * 8, "io_uring probe");

static int enter(const struct ring *ring, unsigned submit, unsigned flags)
{
    long n;
    do {
        n = syscall(SYS_io_uring_enter, ring->fd, submit, 0u, flags, NULL, 0);
    } while (n < 0 && errno == EINTR);
    return n < 0 ? -errno : (int)n;
}

static int do_register(const struct ring *ring, unsigned what, const void *arg, unsigned count)
{
    long n = syscall(SYS_io_uring_register, ring->fd, what, arg, count);
    return n < 0 ? -errno : (int)n;
}

static void *map(const struct ring *ring, size_t bytes, off_t offset)
{
    return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->fd, offset);
}

static int map_queues(struct ring *ring, const struct params *p)
{
    size_t sq_bytes = p->sq_off.array + p->sq_entries * sizeof(uint32_t);
    size_t cq_bytes = p->cq_off.cqes + p->cq_entries * sizeof(struct ring_cqe);
    int single = (p->features & FEAT_SINGLE_MMAP) != 0;

    if (single && cq_bytes > sq_bytes)
        sq_bytes = cq_bytes;
    void *sq = map(ring, sq_bytes, OFF_SQ_RING);
    if (sq == MAP_FAILED)
        return -errno;
    ring->sq_map = sq;
    ring->sq_bytes = sq_bytes;

    void *cq = sq;
    if (!single) {
        cq = map(ring, cq_bytes, OFF_CQ_RING);
        if (cq == MAP_FAILED)
            return -errno;
        ring->cq_map = cq;
        ring->cq_bytes = cq_bytes;
    }

    ring->sqe_bytes = p->sq_entries * sizeof(struct ring_sqe);
    void *sqes = map(ring, ring->sqe_bytes, OFF_SQES);
    if (sqes == MAP_FAILED)
        return -errno;
    ring->sqe_map = sqes;
    ring->sqes = sqes;

    char *s = sq, *c = cq;
    ring->sq_head = (uint32_t *)(s + p->sq_off.head);
    ring->sq_tail = (uint32_t *)(s + p->sq_off.tail);
    ring->sq_flags = (uint32_t *)(s + p->sq_off.flags);
    ring->sq_mask = *(uint32_t *)(s + p->sq_off.ring_mask);
    ring->cq_head = (uint32_t *)(c + p->cq_off.head);
    ring->cq_tail = (uint32_t *)(c + p->cq_off.tail);
    ring->cq_overflow = (uint32_t *)(c + p->cq_off.overflow);
    ring->cq_mask = *(uint32_t *)(c + p->cq_off.ring_mask);
    ring->cqes = (struct ring_cqe *)(c + p->cq_off.cqes);
    /* Entry i of the index array always names submission entry i: it is never written again. */
    uint32_t *array = (uint32_t *)(s + p->sq_off.array);
    for (uint32_t i = 0; i < p->sq_entries; i++)
        array[i] = i;
    return 0;
}

int ring_open(struct ring *ring, unsigned entries, int deferred)
{
    static const uint32_t choices[] = {
        RING_SETUP_SUBMIT_ALL | RING_SETUP_SINGLE_ISSUER | RING_SETUP_DEFER_TASKRUN | RING_SETUP_TASKRUN_FLAG,
        RING_SETUP_SUBMIT_ALL | RING_SETUP_SINGLE_ISSUER | RING_SETUP_COOP_TASKRUN | RING_SETUP_TASKRUN_FLAG,
        RING_SETUP_SUBMIT_ALL | RING_SETUP_COOP_TASKRUN | RING_SETUP_TASKRUN_FLAG,
        0,
    };
    struct params p;
    int fd = -1, error = 0;

    memset(ring, 0, sizeof *ring);
    ring->fd = -1;
    for (size_t i = deferred ? 0 : 1; i < sizeof choices / sizeof *choices; i++) {
        memset(&p, 0, sizeof p);
        p.flags = choices[i];
        fd = (int)syscall(SYS_io_uring_setup, entries, &p);
        if (fd >= 0)
            break;
        error = -errno;
        if (errno != EINVAL) /* EINVAL: a flag that this kernel does not know */
            break;
    }
    if (fd < 0)
        return error;
    ring->fd = fd; /* close-on-exec: the kernel sets it */
    ring->setup_flags = p.flags;
    ring->entries = p.sq_entries;
    ring->cq_entries = p.cq_entries;
    error = map_queues(ring, &p);
    if (error < 0)
        ring_close(ring);
    return error;
}

void ring_close(struct ring *ring)
{
    if (ring->sqe_map)
        munmap(ring->sqe_map, ring->sqe_bytes);
    if (ring->cq_map)
        munmap(ring->cq_map, ring->cq_bytes);
    if (ring->sq_map)
        munmap(ring->sq_map, ring->sq_bytes);
    if (ring->fd >= 0)
        close(ring->fd);
    memset(ring, 0, sizeof *ring);
    ring->fd = -1;
}

int ring_register_eventfd(struct ring *ring, int eventfd)
{
    int32_t fd = eventfd;
    return do_register(ring, REGISTER_EVENTFD, &fd, 1);
}

int ring_register_buffers(struct ring *ring, const uintptr_t *bases, const size_t *lengths, unsigned count)
{
    struct iovec *pieces = calloc(count ? count : 1, sizeof *pieces);
    if (!pieces)
        return -ENOMEM;
    for (unsigned i = 0; i < count; i++) {
        pieces[i].iov_base = (void *)bases[i];
        pieces[i].iov_len = lengths[i];
    }
    int rc = do_register(ring, REGISTER_BUFFERS, pieces, count);
    free(pieces);
    return rc;
}

int ring_probe(struct ring *ring)
{
    static const uint8_t needed[] = {
        RING_OP_NOP,      RING_OP_FSYNC,     RING_OP_READ_FIXED, RING_OP_WRITE_FIXED,
        RING_OP_POLL_ADD, RING_OP_FALLOCATE, RING_OP_READ,       RING_OP_WRITE,
    };
    struct probe probe;
    memset(&probe, 0, sizeof probe);
    int rc = do_register(ring, REGISTER_PROBE, &probe, 64);
    if (rc == -EINVAL)
        return -EOPNOTSUPP; /* before 5.6, which brought READ and WRITE too */
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < sizeof needed; i++)
        if (needed[i] >= probe.ops_len || !(probe.ops[needed[i]].flags & OP_SUPPORTED))
            return -EOPNOTSUPP;
    return 0;
}

struct ring_sqe *ring_next(struct ring *ring)
{
    uint32_t tail = *ring->sq_tail; /* only this thread writes it */
    if (tail - __atomic_load_n(ring->sq_head, __ATOMIC_ACQUIRE) >= ring->entries)
        return NULL;
    struct ring_sqe *sqe = &ring->sqes[tail & ring->sq_mask];
    memset(sqe, 0, sizeof *sqe);
    /* The kernel reads entries only inside io_uring_enter (no SQPOLL), so the caller may still fill it in. */
    __atomic_store_n(ring->sq_tail, tail + 1, __ATOMIC_RELEASE);
    ring->prepared++;
    return sqe;
}

int ring_submit(struct ring *ring)
{
    while (ring->prepared) {
        int n = enter(ring, ring->prepared, 0);
        if (n < 0)
            return n;
        if (n == 0)
            break;
        ring->prepared -= (uint32_t)n;
    }
    return (int)ring->prepared;
}

int ring_take_back(struct ring *ring, uint64_t *user_data)
{
    uint32_t tail = *ring->sq_tail;
    if (tail == __atomic_load_n(ring->sq_head, __ATOMIC_ACQUIRE))
        return 0;
    *user_data = ring->sqes[--tail & ring->sq_mask].user_data;
    __atomic_store_n(ring->sq_tail, tail, __ATOMIC_RELEASE);
    ring->prepared--;
    return 1;
}

int ring_run_deferred(struct ring *ring)
{
    return enter(ring, 0, ENTER_GETEVENTS);
}

int ring_has_deferred(const struct ring *ring)
{
    return (__atomic_load_n(ring->sq_flags, __ATOMIC_ACQUIRE) & (SQ_TASKRUN | SQ_CQ_OVERFLOW)) != 0;
}

unsigned ring_reap(struct ring *ring, struct ring_cqe *out, unsigned room)
{
    uint32_t head = *ring->cq_head; /* only this thread writes it */
    uint32_t tail = __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE);
    unsigned n = 0;
    while (head != tail && n < room)
        out[n++] = ring->cqes[head++ & ring->cq_mask];
    __atomic_store_n(ring->cq_head, head, __ATOMIC_RELEASE);
    return n;
}
