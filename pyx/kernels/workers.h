/* A pool of threads that copy, checksum, test for zeros, read other processes' memory and files; completions through
 * an eventfd. */
#ifndef CKPT_WORKERS_H
#define CKPT_WORKERS_H

#include <stddef.h>
#include <stdint.h>

#define CK_MAX_PIECES 8

/* Checksum only; checksum, zero test, and copy when there is a destination; the same from another process, whose
   address `source` then is; checksum of what is read from a file, whose offset `source` then is; checksum and zero
   test of what a file has there, which goes nowhere. */
enum { CK_JOB_CRC, CK_JOB_PASS, CK_JOB_READ, CK_JOB_FILE, CK_JOB_SCAN_FILE };

typedef struct ck_job ck_job;

/* A range of a job that one thread works on. */
typedef struct ck_piece {
    struct ck_piece *next;
    ck_job *job;
    unsigned char *destination;
    const unsigned char *source;
    size_t nbytes;
    size_t given; /* of a job in parts: bytes that threads have taken up */
    uint32_t crc;
    int zero;
    int error;      /* errno of a read, and the address or offset that could not be read */
    uint64_t fault;
} ck_piece;

struct ck_job {
    ck_job *next; /* in the list of the finished ones */
    void *token;  /* the caller's */
    int kind;
    int pid;  /* of CK_JOB_READ */
    int fd;   /* of CK_JOB_FILE and CK_JOB_SCAN_FILE */
    int huge; /* give the destination huge pages first */
    size_t part; /* of CK_JOB_FILE, without huge: bytes that a thread takes up at a time, in order; 0: it is cut before */
    int pieces;
    int remaining;
    uint32_t crc;
    int zero;
    int error;      /* of the first piece that failed */
    uint64_t fault;
    ck_piece piece[CK_MAX_PIECES];
};

typedef struct ck_pool ck_pool;

/* cpus: ncpus numbers to pin the threads to in turn, or NULL. 0 or an errno. */
int ck_pool_open(ck_pool **pool, int threads, const int *cpus, int ncpus);
/* The same, of threads that run where a CPU has nothing else to do (SCHED_IDLE). */
int ck_pool_open_idle(ck_pool **pool, int threads, const int *cpus, int ncpus);
int ck_pool_eventfd(const ck_pool *pool);
void ck_pool_submit(ck_pool *pool, ck_job *job, unsigned char *destination, const unsigned char *source,
                    size_t nbytes);
/* The finished jobs, oldest first, linked by next; NULL when there are none. Also clears the eventfd. */
ck_job *ck_pool_reap(ck_pool *pool);
double ck_pool_cpu_seconds(ck_pool *pool);
/* Finishes what is queued and joins the threads. */
void ck_pool_join(ck_pool *pool);
/* Closes the eventfd and frees the pool; after ck_pool_join. */
void ck_pool_free(ck_pool *pool);
/* In a forked child, where no thread exists and the locks may be held for ever: closes the eventfd alone. */
void ck_pool_abandon(ck_pool *pool);

void ck_job_run(ck_job *job, unsigned char *destination, const unsigned char *source, size_t nbytes);

#endif
