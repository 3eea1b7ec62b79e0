/* Files into device memory, without a staging ring and without the GIL.
 *
 * Several threads cut each operation into pieces. A thread reads a piece into a small pinned buffer of its own and
 * lets the GPU fetch it from there; it has two or more, so that it reads into one while the GPU fetches another.
 * The buffers are used again and again: all of them together stay in the CPU's caches, so that a file's pages
 * cross the memory bus once (a ring larger than the caches would be written to memory and read back by the GPU).
 * When all pieces have arrived the operation goes on to the copy queue, which checksums it there and reports it.
 */
#ifndef CKPT_CUDA_LOAD_H
#define CKPT_CUDA_LOAD_H

#include "cuda_queue.h"

#define CK_LOAD_THREADS_MAX 256
#define CK_LOAD_BUFFERS_MAX 8

typedef struct ck_loads ck_loads;

typedef struct {
    const ck_cuda *cuda;
    cu_context context;
    ck_copies *queue;      /* gets what has arrived */
    cu_stream stream;      /* the caller's, for all pieces; NULL: `streams` of its own */
    int streams;           /* threads take them in turn */
    int threads;
    int buffers;           /* of each thread */
    size_t piece_bytes;
    unsigned char *memory; /* pinned: threads * buffers * piece_bytes */
    const int *cpus;       /* the threads may run on these `ncpus`, NULL: on any */
    int ncpus;
    int poll;              /* look for the end of a copy again and again, asleep in between; 0: interrupts */
} ck_loads_options;

/* 0; a CUresult > 0, with *call; or -errno, with *call. */
int ck_loads_open(ck_loads **loads, const ck_loads_options *options, const char **call);
/* A transfer of kind CK_COPY_LOAD. */
void ck_loads_submit(ck_loads *loads, ck_transfer *copy);
/* Finishes what was submitted, joins the threads, frees everything. Blocks; before ck_copies_stop. */
void ck_loads_close(ck_loads *loads);

#endif
