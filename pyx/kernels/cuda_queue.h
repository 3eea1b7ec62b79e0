/* Copies between device memory and host memory of one GPU, without the GIL.
 *
 * Two threads a queue. The one that issues takes operations first come first served and enqueues their copies
 * and checksum kernels on streams, at most `depth` operations at a time: calls of the driver can block (pageable
 * memory, a full command buffer), and an event loop must not. The one that waits sleeps on each operation's
 * events (CU_EVENT_BLOCKING_SYNC) and puts what has ended on a list; an eventfd says when that list stops being
 * empty. Host checksums go on to a pool of threads, whose own eventfd reports them.
 */
#ifndef CKPT_CUDA_QUEUE_H
#define CKPT_CUDA_QUEUE_H

#include "cuda_driver.h"
#include "workers.h"

/* From the device; to the device, and checked there when asked; checked alone; from a file (cuda_load.h); zeros. */
enum { CK_COPY_DOWN, CK_COPY_UP, CK_COPY_SCAN, CK_COPY_LOAD, CK_COPY_CLEAR, CK_COPY_KINDS };
enum { CK_CHECK_NONE, CK_CHECK_DEVICE, CK_CHECK_HOST };

#define CK_KERNEL_NAME "ckptpipe_crc32c_zero"
#define CK_KERNEL_BLOCKS 256 /* as in crc32c_device.cu */
#define CK_KERNEL_THREADS 256

typedef struct ck_transfer {
    struct ck_transfer *next;
    ck_job job;  /* the checksum on host threads; its token is the caller's too */
    void *token; /* the caller's */
    int kind;
    int check;
    int elide;     /* scan first, and copy only what is not all zero */
    int cancelled; /* set by ck_copies_cancel: not begun if it has not been */
    cu_address device;
    unsigned char *host;
    size_t nbytes;
    cu_result error; /* CU_OK, or what `call` answered */
    const char *call;
    uint32_t crc;
    int zero;
    int elided; /* nothing was copied: all zero */
    int place;
    int copying, scanning; /* an event is to be waited for */
    /* Of CK_COPY_LOAD. */
    int descriptor;
    uint64_t offset;
    size_t given;   /* bytes that threads have taken up */
    size_t left;    /* bytes that have not arrived */
    int os_error;   /* errno of a read, or CK_FILE_ENDED */
    uint64_t ended; /* where the file ended, or could not be read */
} ck_transfer;

#define CK_FILE_ENDED (-1)

typedef struct ck_copies ck_copies;

typedef struct {
    const ck_cuda *cuda;
    cu_context context;
    cu_stream stream;  /* for all copies; NULL: two of its own, one a direction */
    int depth;
    const void *image; /* the compiled kernel, or NULL: checksums on the host */
    int host_threads;  /* for those */
} ck_copies_options;

/* 0; a CUresult > 0, with *call; or -errno, with *call. */
int ck_copies_open(ck_copies **queue, const ck_copies_options *options, const char **call);
int ck_copies_eventfd(const ck_copies *queue);
int ck_copies_host_eventfd(const ck_copies *queue); /* -1: checksums are the device's */
void ck_copies_submit(ck_copies *queue, ck_transfer *copy);
void ck_copies_cancel(ck_transfer *copy);
/* The operations that ended, oldest first, linked by next; also clears the eventfd. */
ck_transfer *ck_copies_reap(ck_copies *queue);
/* The same for those whose checksum the host threads made: jobs, whose results are then in job->crc, job->zero. */
ck_job *ck_copies_reap_host(ck_copies *queue);
int ck_copies_running(ck_copies *queue); /* operations issued and not ended */
/* Asks the threads to end once nothing is queued; the eventfd tells when ck_copies_ended. */
void ck_copies_stop(ck_copies *queue);
int ck_copies_ended(ck_copies *queue);
/* Joins the threads (after ck_copies_stop; blocks until ck_copies_ended) and frees all but what can be reaped. */
void ck_copies_join(ck_copies *queue);
void ck_copies_free(ck_copies *queue);
/* In a forked child: closes the descriptors alone. */
void ck_copies_abandon(ck_copies *queue);

#endif
