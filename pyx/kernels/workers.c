#include "workers.h"

#include "copy.h"
#include "crc32c.h"
#include "file_read.h"
#include "process_read.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

/* A job is cut over idle threads when each gets at least this much: below it, waking costs more than it gives. */
#define PIECE_BYTES ((size_t)1 << 20)
#define PIECE_STEP ((size_t)4096)
#define STACK_BYTES ((size_t)256 << 10)

typedef struct {
    ck_pool *pool;
    pthread_t thread;
    clockid_t clock;
    int alive;
    double seconds; /* of CPU, once it has ended */
} ck_thread;

struct ck_pool {
    pthread_mutex_t mutex;
    pthread_cond_t work;
    ck_piece *first, *last;
    int queued; /* pieces */
    int idle;   /* threads that wait */
    int stop;
    ck_job *done_first, *done_last;
    int eventfd;
    int threads;
    int idle_class; /* of the scheduler */
    ck_thread thread[];
};

static double seconds_of(clockid_t clock) {
    struct timespec time;
    if (clock_gettime(clock, &time) != 0) return 0.0;
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void run_piece(ck_piece *piece, int kind) {
    if (piece->job->huge && piece->destination) ck_huge_pages(piece->destination, piece->nbytes);
    if (kind == CK_JOB_CRC)
        piece->crc = ck_crc32c(0, piece->source, piece->nbytes);
    else if (kind == CK_JOB_READ)
        piece->error = ck_read_process(piece->job->pid, piece->destination, (uintptr_t)piece->source, piece->nbytes,
                                       &piece->crc, &piece->zero, &piece->fault);
    else if (kind == CK_JOB_FILE)
        piece->error = ck_read_file(piece->job->fd, piece->destination, (uintptr_t)piece->source, piece->nbytes,
                                    &piece->crc, &piece->fault);
    else if (kind == CK_JOB_SCAN_FILE)
        piece->error = ck_scan_file(piece->job->fd, (uintptr_t)piece->source, piece->nbytes, &piece->crc, &piece->zero,
                                    &piece->fault);
    else
        piece->crc = ck_pass(piece->destination, piece->source, piece->nbytes, 0, &piece->zero);
}

static void join_pieces(ck_job *job) {
    job->crc = job->piece[0].crc;
    job->zero = job->piece[0].zero;
    job->error = job->piece[0].error;
    job->fault = job->piece[0].fault;
    for (int i = 1; i < job->pieces; i++) {
        if (job->error == 0 && job->piece[i].error != 0) {
            job->error = job->piece[i].error;
            job->fault = job->piece[i].fault;
        }
        job->crc = ck_crc32c_combine(job->crc, job->piece[i].crc, job->piece[i].nbytes);
        job->zero = job->zero && job->piece[i].zero;
    }
}

static void cut(ck_job *job, int pieces, unsigned char *destination, const unsigned char *source, size_t nbytes) {
    size_t step = job->huge ? CK_HUGE_BYTES : PIECE_STEP;
    size_t each = (nbytes / (size_t)pieces + step - 1) / step * step;
    if (pieces == 1) each = nbytes;
    int count = 0;
    size_t offset = 0;
    do {
        ck_piece *piece = &job->piece[count++];
        piece->next = NULL;
        piece->job = job;
        piece->destination = destination ? destination + offset : NULL;
        piece->source = source + offset;
        piece->nbytes = count == pieces || nbytes - offset < each ? nbytes - offset : each;
        piece->given = 0;
        piece->crc = 0;
        piece->zero = 0;
        piece->error = 0;
        piece->fault = 0;
        offset += piece->nbytes;
    } while (offset < nbytes);
    job->pieces = job->remaining = count;
    job->next = NULL;
}

void ck_job_run(ck_job *job, unsigned char *destination, const unsigned char *source, size_t nbytes) {
    cut(job, 1, destination, source, nbytes);
    run_piece(&job->piece[0], job->kind);
    join_pieces(job);
}

/* -- jobs in parts: one piece stays in front of the queue until threads have taken up all of it -------------------- */

static int parts_of(const ck_job *job, size_t nbytes) {
    return nbytes ? (int)((nbytes + job->part - 1) / job->part) : 1;
}

/* The next piece, or part of one, with the mutex held; in `part` where it is one. */
static ck_piece *take(ck_pool *pool, ck_piece *part) {
    ck_piece *piece = pool->first;
    size_t each = piece->job->part;
    if (each) {
        size_t left = piece->nbytes - piece->given;
        *part = *piece;
        part->destination += piece->given;
        part->source += piece->given;
        part->nbytes = left < each ? left : each;
        piece->given += part->nbytes;
    }
    if (!each || piece->given == piece->nbytes) {
        pool->first = piece->next;
        if (pool->first == NULL) pool->last = NULL;
    }
    pool->queued--;
    return each ? part : piece;
}

/* What a part found goes into its job; of failures the first one in the file's order. The sum of all shares in the
 * checksum is the checksum, in any order. With the mutex held. */
static void add_part(ck_piece *whole, const ck_piece *part, uint32_t share) {
    whole->crc ^= share;
    if (part->error != 0 && (whole->error == 0 || part->fault < whole->fault)) {
        whole->error = part->error;
        whole->fault = part->fault;
    }
}

static uint32_t share_of(const ck_piece *whole, const ck_piece *part) {
    size_t behind = whole->nbytes - (size_t)(part->source - whole->source) - part->nbytes;
    return ck_crc32c_combine(part->crc, 0, behind);
}

static void *thread_main(void *argument) {
    ck_thread *self = argument;
    ck_pool *pool = self->pool;
    if (pool->idle_class) {
        struct sched_param none = {0};
        pthread_setschedparam(pthread_self(), SCHED_IDLE, &none); /* where it is not allowed, they are as others */
    }
    pthread_mutex_lock(&pool->mutex);
    for (;;) {
        while (pool->first == NULL && !pool->stop) {
            pool->idle++;
            pthread_cond_wait(&pool->work, &pool->mutex);
            pool->idle--;
        }
        if (pool->first == NULL) break; /* stop, and nothing left to do */
        ck_piece part, *piece = take(pool, &part);
        ck_job *job = piece->job;
        int failed = job->part && job->piece[0].error; /* then nobody wants the rest */
        pthread_mutex_unlock(&pool->mutex);

        uint32_t share = 0;
        if (!failed) run_piece(piece, job->kind);
        if (job->part && !failed && !part.error) share = share_of(&job->piece[0], &part);

        pthread_mutex_lock(&pool->mutex);
        if (job->part && !failed) add_part(&job->piece[0], &part, share);
        if (--job->remaining > 0) continue;
        if (job->pieces > 1) { /* the others have written their results under the mutex' protection */
            pthread_mutex_unlock(&pool->mutex);
            join_pieces(job);
            pthread_mutex_lock(&pool->mutex);
        } else {
            join_pieces(job);
        }
        int first = pool->done_first == NULL;
        if (first)
            pool->done_first = job;
        else
            pool->done_last->next = job;
        pool->done_last = job;
        if (first) { /* whoever reaps takes the whole list: one signal for all that finishes until then */
            pthread_mutex_unlock(&pool->mutex);
            uint64_t one = 1;
            ssize_t written;
            do {
                written = write(pool->eventfd, &one, sizeof one);
            } while (written < 0 && errno == EINTR);
            pthread_mutex_lock(&pool->mutex);
        }
    }
    self->seconds = seconds_of(CLOCK_THREAD_CPUTIME_ID);
    self->alive = 0;
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

static int open_pool(ck_pool **result, int threads, const int *cpus, int ncpus, int idle) {
    ck_pool *pool = calloc(1, sizeof *pool + (size_t)threads * sizeof pool->thread[0]);
    if (pool == NULL) return ENOMEM;
    pool->eventfd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (pool->eventfd < 0) {
        int error = errno;
        free(pool);
        return error;
    }
    pool->idle_class = idle;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    /* Signals belong to the interpreter's own threads. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = 0;
    for (int i = 0; i < threads && error == 0; i++) {
        ck_thread *thread = &pool->thread[i];
        thread->pool = pool;
        if (ncpus > 0) {
            cpu_set_t set;
            CPU_ZERO(&set);
            int cpu = cpus[i % ncpus];
            if (cpu < 0 || cpu >= CPU_SETSIZE) {
                error = EINVAL;
                break;
            }
            CPU_SET(cpu, &set);
            error = pthread_attr_setaffinity_np(&attributes, sizeof set, &set);
            if (error) break;
        }
        pthread_mutex_lock(&pool->mutex); /* it starts with its fields set */
        error = pthread_create(&thread->thread, &attributes, thread_main, thread);
        if (error == 0) {
            pthread_setname_np(thread->thread, "ckpt-worker");
            pthread_getcpuclockid(thread->thread, &thread->clock);
            thread->alive = 1;
            pool->threads++;
        }
        pthread_mutex_unlock(&pool->mutex);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (error) {
        ck_pool_join(pool);
        ck_pool_free(pool);
        return error;
    }
    *result = pool;
    return 0;
}

int ck_pool_open(ck_pool **pool, int threads, const int *cpus, int ncpus) {
    return open_pool(pool, threads, cpus, ncpus, 0);
}

int ck_pool_open_idle(ck_pool **pool, int threads, const int *cpus, int ncpus) {
    return open_pool(pool, threads, cpus, ncpus, 1);
}

int ck_pool_eventfd(const ck_pool *pool) { return pool->eventfd; }

void ck_pool_submit(ck_pool *pool, ck_job *job, unsigned char *destination, const unsigned char *source,
                    size_t nbytes) {
    pthread_mutex_lock(&pool->mutex);
    int spare = pool->idle - pool->queued;
    size_t most = nbytes / PIECE_BYTES;
    int pieces = spare < CK_MAX_PIECES ? spare : CK_MAX_PIECES;
    if ((size_t)(pieces > 0 ? pieces : 0) > most) pieces = (int)most;
    if (pieces < 1 || job->part) pieces = 1;
    cut(job, pieces, destination, source, nbytes);
    if (job->part) job->remaining = parts_of(job, nbytes);
    for (int i = 0; i < job->pieces; i++) {
        ck_piece *piece = &job->piece[i];
        if (pool->last == NULL)
            pool->first = piece;
        else
            pool->last->next = piece;
        pool->last = piece;
    }
    int remaining = job->remaining;
    pool->queued += remaining;
    int wake = remaining < pool->idle ? remaining : pool->idle;
    pthread_mutex_unlock(&pool->mutex);
    while (wake-- > 0) pthread_cond_signal(&pool->work);
}

ck_job *ck_pool_reap(ck_pool *pool) {
    uint64_t count;
    ssize_t got;
    do {
        got = read(pool->eventfd, &count, sizeof count);
    } while (got < 0 && errno == EINTR);
    pthread_mutex_lock(&pool->mutex);
    ck_job *done = pool->done_first;
    pool->done_first = pool->done_last = NULL;
    pthread_mutex_unlock(&pool->mutex);
    return done;
}

double ck_pool_cpu_seconds(ck_pool *pool) {
    double seconds = 0.0;
    pthread_mutex_lock(&pool->mutex);
    for (int i = 0; i < pool->threads; i++)
        seconds += pool->thread[i].alive ? seconds_of(pool->thread[i].clock) : pool->thread[i].seconds;
    pthread_mutex_unlock(&pool->mutex);
    return seconds;
}

void ck_pool_join(ck_pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    pool->stop = 1;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
    for (int i = 0; i < pool->threads; i++) pthread_join(pool->thread[i].thread, NULL);
}

void ck_pool_free(ck_pool *pool) {
    close(pool->eventfd);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}

void ck_pool_abandon(ck_pool *pool) { close(pool->eventfd); }
