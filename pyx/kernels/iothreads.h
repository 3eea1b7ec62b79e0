/* Threads that do blocking file I/O and report through an eventfd. */
#ifndef CKPT_IOTHREADS_H
#define CKPT_IOTHREADS_H

#include <stddef.h>
#include <stdint.h>

enum { IO_READ = 0, IO_WRITE = 1, IO_FSYNC = 2, IO_FALLOCATE = 3 };

struct io_job {
    struct io_job *next;
    int kind;
    int fd;
    int mode; /* IO_FSYNC: 1 for fdatasync; IO_FALLOCATE: the mode */
    void *buf;
    int64_t offset; /* under 0: read and write at the descriptor's own position (pipes) */
    int64_t nbytes;
    int64_t result; /* bytes, 0, or -errno */
    uint64_t slot;
};

struct io_threads;

/* At most `limit` threads, started as jobs need them; one now. NULL and *error = -errno when that fails. */
struct io_threads *io_threads_open(unsigned limit, int eventfd, int *error);
/* Appends a job, which stays the caller's memory until reaped. */
void io_threads_prepare(struct io_threads *pool, struct io_job *job);
/* Lets the threads have all prepared jobs. */
void io_threads_submit(struct io_threads *pool);
/* A list of jobs that are done, oldest first, or NULL. */
struct io_job *io_threads_reap(struct io_threads *pool);
unsigned io_threads_count(struct io_threads *pool);
/* Joins the threads, after they did every job that was submitted. */
void io_threads_close(struct io_threads *pool);
/* In a child after fork: the threads are not there. Frees memory only. */
void io_threads_forget(struct io_threads *pool);

#endif
