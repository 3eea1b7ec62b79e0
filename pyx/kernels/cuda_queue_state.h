/* What the two halves of the copy queue share: its state. */
#ifndef CKPT_CUDA_QUEUE_STATE_H
#define CKPT_CUDA_QUEUE_STATE_H

#include "cuda_queue.h"

#include <pthread.h>

#define SCRATCH_BYTES 4096                  /* 2 * CK_KERNEL_BLOCKS + 1 words, rounded up */
#define UP_STREAMS 2                        /* in turn: the start of one copy hides behind the end of another */
#define BOUNCE_BYTES ((size_t)4 << 20)      /* of a scan on the host */
#define STACK_BYTES ((size_t)512 << 10)     /* the driver runs on these stacks */

/* What one operation in flight uses: events, and where the kernel puts its answer. */
typedef struct {
    cu_event copied, scanned, before;
} ck_place;

typedef struct {
    ck_transfer *first, *last;
} ck_transfers;

struct ck_copies {
    const ck_cuda *cuda;
    cu_context context;
    cu_stream down, scan;
    cu_stream up[UP_STREAMS];
    unsigned turn; /* whose stream is next: the thread's that issues */
    int borrowed;  /* down and up are the caller's one stream */
    cu_module module;
    cu_function kernel;
    cu_address scratch;
    volatile uint32_t *answers; /* pinned, mapped: {CRC32C, not zero} a place */
    cu_address answers_device;
    unsigned char *bounce;
    ck_pool *pool;
    int eventfd;
    int depth;

    pthread_mutex_t mutex;
    pthread_cond_t issue, wait;
    ck_transfers queued;  /* not begun */
    ck_transfers again;   /* scanned, not zero: to be copied */
    ck_transfers flight;  /* issued, not yet seen by the thread that waits */
    ck_transfers done;
    int running;  /* places in use */
    int stop, ended;
    int issuing;  /* threads that run */
    pthread_t issuer, waiter;
    int *free_places;
    ck_place *places;
};

/* cuda_queue.c: the threads. */
void *ck_copies_issuer(void *queue);
void *ck_copies_waiter(void *queue);
/* cuda_queue_setup.c: destroys what the driver made, in a thread where the context is current. */
void ck_copies_release(ck_copies *queue);

#endif
