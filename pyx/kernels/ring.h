/* io_uring by raw system calls: the part of the ABI that ckptpipe uses, and one ring.
 *
 * The layout is that of io_uring(7) and io_uring_enter(2), written out here so that neither liburing nor
 * recent kernel headers are needed to build. All functions return 0 or a count, or -errno.
 */
#ifndef CKPT_RING_H
#define CKPT_RING_H

#include <stddef.h>
#include <stdint.h>

enum {
    RING_OP_NOP = 0,
    RING_OP_FSYNC = 3,
    RING_OP_READ_FIXED = 4,
    RING_OP_WRITE_FIXED = 5,
    RING_OP_POLL_ADD = 6,
    RING_OP_FALLOCATE = 17,
    RING_OP_READ = 22,
    RING_OP_WRITE = 23
};

enum { RING_SQE_ASYNC = 1u << 4 };      /* never try inline: hand to a kernel worker at once */
enum { RING_FSYNC_DATASYNC = 1u << 0 };

enum {
    RING_SETUP_SUBMIT_ALL = 1u << 7,    /* 5.18 */
    RING_SETUP_COOP_TASKRUN = 1u << 8,  /* 5.19 */
    RING_SETUP_TASKRUN_FLAG = 1u << 9,  /* 5.19 */
    RING_SETUP_SINGLE_ISSUER = 1u << 12,/* 6.0 */
    RING_SETUP_DEFER_TASKRUN = 1u << 13 /* 6.1 */
};

struct ring_sqe {
    uint8_t opcode;
    uint8_t flags;
    uint16_t ioprio;
    int32_t fd;
    uint64_t off;
    uint64_t addr;
    uint32_t len;
    uint32_t op_flags;
    uint64_t user_data;
    uint16_t buf_index;
    uint16_t personality;
    int32_t splice_fd_in;
    uint64_t pad[2];
};

struct ring_cqe {
    uint64_t user_data;
    int32_t res;
    uint32_t flags;
};

struct ring {
    int fd;
    uint32_t setup_flags;   /* those that the kernel took */
    uint32_t entries;       /* of the submission queue */
    uint32_t cq_entries;
    uint32_t prepared;      /* entries written since the last submission */
    uint32_t sq_mask, cq_mask;
    uint32_t *sq_head, *sq_tail, *sq_flags;
    uint32_t *cq_head, *cq_tail, *cq_overflow;
    struct ring_sqe *sqes;
    struct ring_cqe *cqes;
    void *sq_map, *cq_map, *sqe_map;
    size_t sq_bytes, cq_bytes, sqe_bytes;
};

/* Makes a ring of at least `entries`. `deferred`: DEFER_TASKRUN is tried first. Older kernels get fewer flags. */
int ring_open(struct ring *ring, unsigned entries, int deferred);
void ring_close(struct ring *ring);

int ring_register_eventfd(struct ring *ring, int eventfd);
/* At most 1 GiB each: the kernel's limit. */
int ring_register_buffers(struct ring *ring, const uintptr_t *bases, const size_t *lengths, unsigned count);
/* 0 when the kernel has every operation listed above, -EOPNOTSUPP when one is missing. */
int ring_probe(struct ring *ring);

/* The next free entry, zeroed, or NULL when the queue is full. */
struct ring_sqe *ring_next(struct ring *ring);
/* Hands all prepared entries to the kernel. Returns how many are left (0: all taken), or -errno when none were. */
int ring_submit(struct ring *ring);
/* Takes the last entry back that the kernel has not taken; 0 when there is none, else 1 and its user_data. */
int ring_take_back(struct ring *ring, uint64_t *user_data);
/* Lets the kernel post completions that wait for this thread (DEFER_TASKRUN, COOP_TASKRUN). */
int ring_run_deferred(struct ring *ring);
int ring_has_deferred(const struct ring *ring);
/* Copies up to `room` completions out of the queue and frees their places. */
unsigned ring_reap(struct ring *ring, struct ring_cqe *out, unsigned room);

#endif
