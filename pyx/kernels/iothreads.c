#include "iothreads.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

struct job_list {
    struct io_job *first, **last;
};

struct io_threads {
    pthread_mutex_t lock;
    pthread_cond_t work;
    struct job_list prepared; /* the owner's alone: not under the lock */
    unsigned prepared_count;
    struct job_list queue, done;
    unsigned queued, idle, count, limit;
    int stopping;
    int eventfd;
    pthread_t threads[];
};

enum { STACK_BYTES = 128 << 10 }; /* a worker's frames are a few hundred bytes; the rest is for signal-less libc */

static void list_init(struct job_list *list)
{
    list->first = NULL;
    list->last = &list->first;
}

static void list_append(struct job_list *list, struct io_job *job)
{
    job->next = NULL;
    *list->last = job;
    list->last = &job->next;
}

static int64_t transfer(const struct io_job *job)
{
    struct iovec piece = {job->buf, (size_t)job->nbytes};
    ssize_t n;
    if (job->kind == IO_READ)
        n = job->offset < 0 ? readv(job->fd, &piece, 1) : preadv(job->fd, &piece, 1, job->offset);
    else
        n = job->offset < 0 ? writev(job->fd, &piece, 1) : pwritev(job->fd, &piece, 1, job->offset);
    return n < 0 ? -errno : n;
}

static int64_t perform(const struct io_job *job)
{
    for (;;) {
        int64_t n;
        if (job->kind == IO_FSYNC)
            n = (job->mode ? fdatasync(job->fd) : fsync(job->fd)) < 0 ? -errno : 0;
        else if (job->kind == IO_FALLOCATE)
            n = fallocate(job->fd, job->mode, job->offset, job->nbytes) < 0 ? -errno : 0;
        else
            n = transfer(job);
        if (n == -EAGAIN && (job->kind == IO_READ || job->kind == IO_WRITE)) {
            /* a non-blocking pipe or socket */
            struct pollfd wait = {job->fd, job->kind == IO_READ ? POLLIN : POLLOUT, 0};
            poll(&wait, 1, -1);
        } else if (n != -EINTR) {
            return n;
        }
    }
}

static void *worker(void *argument)
{
    struct io_threads *pool = argument;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->queue.first && !pool->stopping) {
            pool->idle++;
            pthread_cond_wait(&pool->work, &pool->lock);
            pool->idle--;
        }
        struct io_job *job = pool->queue.first;
        if (!job)
            break;
        pool->queue.first = job->next;
        if (!job->next)
            pool->queue.last = &pool->queue.first;
        pool->queued--;
        pthread_mutex_unlock(&pool->lock);

        job->result = perform(job);

        pthread_mutex_lock(&pool->lock);
        int first = pool->done.first == NULL;
        list_append(&pool->done, job);
        if (first) { /* one signal for all that finish before the owner looks */
            const uint64_t one = 1;
            while (write(pool->eventfd, &one, sizeof one) < 0 && errno == EINTR)
                ;
        }
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* Signals are the interpreter's: a thread that took one would delay it. */
static int start_thread(struct io_threads *pool)
{
    pthread_attr_t attributes;
    sigset_t all, before;
    int rc = pthread_attr_init(&attributes);
    if (rc)
        return -rc;
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    rc = pthread_create(&pool->threads[pool->count], &attributes, worker, pool);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (rc)
        return -rc;
#ifdef __linux__
    pthread_setname_np(pool->threads[pool->count], "ckpt-io");
#endif
    pool->count++;
    return 0;
}

struct io_threads *io_threads_open(unsigned limit, int eventfd, int *error)
{
    struct io_threads *pool = calloc(1, sizeof *pool + limit * sizeof(pthread_t));
    if (!pool) {
        *error = -ENOMEM;
        return NULL;
    }
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    list_init(&pool->prepared);
    list_init(&pool->queue);
    list_init(&pool->done);
    pool->limit = limit;
    pool->eventfd = eventfd;
    *error = start_thread(pool);
    if (*error) {
        io_threads_forget(pool);
        return NULL;
    }
    return pool;
}

void io_threads_prepare(struct io_threads *pool, struct io_job *job)
{
    list_append(&pool->prepared, job);
    pool->prepared_count++;
}

void io_threads_submit(struct io_threads *pool)
{
    if (!pool->prepared.first)
        return;
    pthread_mutex_lock(&pool->lock);
    *pool->queue.last = pool->prepared.first;
    pool->queue.last = pool->prepared.last;
    pool->queued += pool->prepared_count;
    unsigned wake = pool->queued < pool->idle ? pool->queued : pool->idle;
    unsigned missing = pool->queued - wake;
    for (unsigned i = 0; i < wake; i++)
        pthread_cond_signal(&pool->work);
    /* Where no more threads can be had, those that run do the work: there is always one. */
    for (; missing && pool->count < pool->limit; missing--)
        if (start_thread(pool) < 0)
            break;
    pthread_mutex_unlock(&pool->lock);
    list_init(&pool->prepared);
    pool->prepared_count = 0;
}

struct io_job *io_threads_reap(struct io_threads *pool)
{
    pthread_mutex_lock(&pool->lock);
    struct io_job *first = pool->done.first;
    list_init(&pool->done);
    pthread_mutex_unlock(&pool->lock);
    return first;
}

unsigned io_threads_count(struct io_threads *pool)
{
    return pool->count; /* written by the owner alone */
}

void io_threads_forget(struct io_threads *pool)
{
    free(pool);
}

void io_threads_close(struct io_threads *pool)
{
    pthread_mutex_lock(&pool->lock);
    pool->stopping = 1;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (unsigned i = 0; i < pool->count; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}
