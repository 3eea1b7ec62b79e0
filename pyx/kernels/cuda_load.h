/* Files into device memory, without a staging ring and without the GIL.
 *
 * There are a few pinned buffers, each as long as one copy of the GPU is to be: a link takes long copies faster than
 * short ones. Several threads fill one buffer side by side, in parts; whoever ends the last part has the GPU fetch
 * it. One thread that finds nothing to fill waits for the GPU, the others sleep. The buffers are used again and
 * again: all of them together stay in the CPU's caches, so that a file's pages cross the memory bus once (a ring
 * larger than the caches would be written to memory and read back by the GPU). When all of an operation's bytes have
 * arrived it goes on to the copy queue, which checksums it there and reports it.
 */
#ifndef CKPT_CUDA_LOAD_H
#define CKPT_CUDA_LOAD_H

#include "cuda_queue.h"

#define CK_LOAD_THREADS_MAX 256
#define CK_LOAD_BUFFERS_MAX 256

typedef struct ck_loads ck_loads;

typedef struct {
    const ck_cuda *cuda;
    cu_context context;
    ck_copies *queue;      /* gets what has arrived */
    cu_stream stream;      /* the caller's, for all copies; NULL: one of its own */
    int threads;
    int buffers;
    size_t copy_bytes;     /* of one buffer: of one copy at most */
    size_t part_bytes;     /* that one thread reads at a time */
    unsigned char *memory; /* pinned: buffers * copy_bytes */
    const int *cpus;       /* the threads may run on these `ncpus`, NULL: on any */
    int ncpus;
} ck_loads_options;

/* 0; a CUresult > 0, with *call; or -errno, with *call. */
int ck_loads_open(ck_loads **loads, const ck_loads_options *options, const char **call);
/* A transfer of kind CK_COPY_LOAD. */
void ck_loads_submit(ck_loads *loads, ck_transfer *copy);
/* Finishes what was submitted, joins the threads, frees everything. Blocks; before ck_copies_stop. */
void ck_loads_close(ck_loads *loads);

#endif
