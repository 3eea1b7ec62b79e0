#include "cuda_load.h"

#include "copy.h"
#include "crc32c.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define STACK_BYTES ((size_t)512 << 10) /* the driver runs on these stacks */
#define PAUSE_NS 20000L                 /* between two looks at a copy; the link takes 150 us for 8 MiB */
#define PAUSE_MAX_NS 1000000L
#define PAUSES_SHORT 64                 /* looks before they grow rare: the link stands still */
#define PAGE ((size_t)4096)

typedef struct ck_buffer {
    struct ck_buffer *next; /* in the list that it is on */
    unsigned char *memory;
    cu_event event;
    ck_transfer *copy; /* whose bytes these are */
    size_t at, nbytes; /* which of its bytes */
    size_t given;      /* bytes that threads have taken up */
    size_t left;       /* bytes that are not there yet */
} ck_buffer;

struct ck_loads {
    const ck_cuda *cuda;
    cu_context context;
    ck_copies *queue;
    size_t copy_bytes, part_bytes;
    int threads, buffers, started;
    cu_stream stream;
    int borrowed; /* the stream is the caller's */
    pthread_t *thread;

    pthread_mutex_t mutex;
    pthread_cond_t work;
    ck_transfer *first, *last; /* with bytes that no buffer was given for */
    ck_buffer *filling;        /* with parts that nobody has taken up; NULL: none */
    ck_buffer *free;           /* the last one used is the first: it is in the caches */
    ck_buffer *flying, *flying_last; /* the GPU fetches them, oldest first */
    int waits;                 /* a thread waits for the oldest of these */
    int sleeping;              /* threads that nobody has woken */
    int stop;
    ck_buffer buffer[];
};

/* What a thread fills. */
typedef struct {
    ck_buffer *buffer;
    size_t at, nbytes; /* in the buffer */
} ck_part;

/* -- one part ----------------------------------------------------------------------------------------------- */

/* The first failure of an operation is the one it reports; its other parts are let go. */
static void fail(ck_loads *loads, ck_transfer *copy, cu_result error, const char *call, int os_error, uint64_t ended) {
    pthread_mutex_lock(&loads->mutex);
    if (copy->error == CU_OK && copy->os_error == 0) {
        copy->call = call;
        copy->ended = ended;
        __atomic_store_n(&copy->os_error, os_error, __ATOMIC_RELAXED);
        __atomic_store_n(&copy->error, error, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&loads->mutex);
}

static int over(const ck_transfer *copy) {
    return __atomic_load_n(&copy->cancelled, __ATOMIC_RELAXED) || __atomic_load_n(&copy->os_error, __ATOMIC_RELAXED) ||
           __atomic_load_n(&copy->error, __ATOMIC_RELAXED) != CU_OK;
}

static int read_part(ck_loads *loads, ck_transfer *copy, size_t at, unsigned char *to, size_t nbytes) {
    size_t got = 0;
    while (got < nbytes) {
        ssize_t count = pread(copy->descriptor, to + got, nbytes - got, (off_t)(copy->offset + at + got));
        if (count > 0) {
            got += (size_t)count;
        } else if (count == 0) {
            fail(loads, copy, CU_OK, "pread", CK_FILE_ENDED, copy->offset + at + got);
            return 0;
        } else if (errno != EINTR) {
            fail(loads, copy, CU_OK, "pread", errno, copy->offset + at + got);
            return 0;
        }
    }
    return 1;
}

/* A part's share in the checksum of the whole: the sum of all shares is the checksum, in any order. */
static void checksum(ck_transfer *copy, size_t at, const unsigned char *bytes, size_t nbytes) {
    int zero;
    uint32_t crc = ck_pass(NULL, bytes, nbytes, 0, &zero);
    uint32_t share = ck_crc32c_combine(crc, 0, copy->nbytes - at - nbytes);
    __atomic_fetch_xor(&copy->crc, share, __ATOMIC_RELAXED);
    if (!zero) __atomic_store_n(&copy->zero, 0, __ATOMIC_RELAXED);
}

/* 1: the GPU has the buffer until its event has passed. 0: it does not. */
static int enqueue(ck_loads *loads, ck_buffer *buffer) {
    const ck_cuda *cuda = loads->cuda;
    ck_transfer *copy = buffer->copy;
    if (over(copy)) return 0;
    cu_result result = cuda->copy_up(copy->device + buffer->at, buffer->memory, buffer->nbytes, loads->stream);
    const char *call = "cuMemcpyHtoDAsync";
    if (result == CU_OK) {
        result = cuda->event_record(buffer->event, loads->stream);
        call = "cuEventRecord";
    }
    if (result == CU_OK) return 1;
    fail(loads, copy, result, call, 0, 0);
    cuda->stream_synchronize(loads->stream); /* it may have been enqueued all the same */
    return 0;
}

/* -- buffers, with the mutex held --------------------------------------------------------------------------- */

/* A buffer for the next bytes in order. An operation's copies are about equally long. */
static void begin_buffer(ck_loads *loads) {
    ck_buffer *buffer = loads->free;
    ck_transfer *copy = loads->first;
    size_t left = copy->nbytes - copy->given;
    size_t copies = (left + loads->copy_bytes - 1) / loads->copy_bytes;
    size_t each = ((left + copies - 1) / copies + PAGE - 1) / PAGE * PAGE;
    loads->free = buffer->next;
    buffer->next = NULL;
    buffer->copy = copy;
    buffer->at = copy->given;
    buffer->nbytes = buffer->left = left < each ? left : each;
    buffer->given = 0;
    copy->given += buffer->nbytes;
    if (copy->given == copy->nbytes) loads->first = copy->next;
    loads->filling = buffer;
}

/* The next part in order; 0: there is none, or no buffer for it. */
static int take_part(ck_loads *loads, ck_part *part) {
    if (loads->filling == NULL && loads->first != NULL && loads->free != NULL) begin_buffer(loads);
    ck_buffer *buffer = loads->filling;
    if (buffer == NULL) return 0;
    size_t left = buffer->nbytes - buffer->given;
    part->buffer = buffer;
    part->at = buffer->given;
    part->nbytes = left < loads->part_bytes ? left : loads->part_bytes;
    buffer->given += part->nbytes;
    if (buffer->given == buffer->nbytes) loads->filling = NULL;
    return 1;
}

static size_t parts_of(const ck_loads *loads, size_t nbytes) {
    return (nbytes + loads->part_bytes - 1) / loads->part_bytes;
}

/* There are up to `parts` more to fill than before: how many threads to `wake`; they count as woken from here on. */
static int to_wake(ck_loads *loads, size_t parts) {
    int count = parts < (size_t)loads->sleeping ? (int)parts : loads->sleeping;
    loads->sleeping -= count;
    return count;
}

static void release_buffer(ck_loads *loads, ck_buffer *buffer) {
    buffer->copy = NULL;
    buffer->next = loads->free;
    loads->free = buffer;
}

/* -- the threads -------------------------------------------------------------------------------------------- */

static void wake(ck_loads *loads, int count) {
    while (count-- > 0) pthread_cond_signal(&loads->work);
}

/* The buffer has been fetched, or is not going to be: with its last bytes the operation goes on to the queue. */
static void empty(ck_loads *loads, ck_buffer *buffer) {
    ck_transfer *copy = buffer->copy;
    size_t nbytes = buffer->nbytes;
    pthread_mutex_lock(&loads->mutex);
    release_buffer(loads, buffer);
    /* one of the parts is the caller's; who comes too late for another waits for the GPU in its place */
    int sleepers = to_wake(loads, loads->first != NULL ? parts_of(loads, loads->copy_bytes) : 0);
    pthread_mutex_unlock(&loads->mutex);
    wake(loads, sleepers);
    if (__atomic_sub_fetch(&copy->left, nbytes, __ATOMIC_ACQ_REL) == 0) ck_copies_submit(loads->queue, copy);
}

static void fill(ck_loads *loads, const ck_part *part) {
    ck_buffer *buffer = part->buffer;
    ck_transfer *copy = buffer->copy;
    size_t at = buffer->at + part->at;
    unsigned char *to = buffer->memory + part->at;
    if (!over(copy) && read_part(loads, copy, at, to, part->nbytes) && copy->check == CK_CHECK_HOST)
        checksum(copy, at, to, part->nbytes);
    if (__atomic_sub_fetch(&buffer->left, part->nbytes, __ATOMIC_ACQ_REL) != 0) return;
    if (!enqueue(loads, buffer)) {
        empty(loads, buffer);
        return;
    }
    pthread_mutex_lock(&loads->mutex);
    if (loads->flying == NULL)
        loads->flying = buffer;
    else
        loads->flying_last->next = buffer;
    loads->flying_last = buffer;
    pthread_mutex_unlock(&loads->mutex);
}

static cu_result await_event(const ck_loads *loads, cu_event event) {
    struct timespec pause = {0, PAUSE_NS};
    for (int looks = 0;; looks++) {
        cu_result result = loads->cuda->event_query(event);
        if (result != CU_NOT_READY) return result;
        nanosleep(&pause, NULL);
        if (looks > PAUSES_SHORT && pause.tv_nsec < PAUSE_MAX_NS) pause.tv_nsec += pause.tv_nsec / 4;
    }
}

/* Until the GPU has fetched the oldest buffer that it was given. Others may add to the list meanwhile. */
static void await_oldest(ck_loads *loads) {
    ck_buffer *buffer = loads->flying;
    cu_result result = await_event(loads, buffer->event);
    if (result != CU_OK) fail(loads, buffer->copy, result, "cuEventQuery", 0, 0);
    pthread_mutex_lock(&loads->mutex);
    loads->flying = buffer->next;
    loads->waits = 0;
    pthread_mutex_unlock(&loads->mutex);
    empty(loads, buffer);
}

static void *read_files(void *argument) {
    ck_loads *loads = argument;
    prctl(PR_SET_TIMERSLACK, 1000UL);
    loads->cuda->context_set(loads->context);
    pthread_mutex_lock(&loads->mutex);
    for (;;) {
        ck_part part;
        if (take_part(loads, &part)) {
            pthread_mutex_unlock(&loads->mutex);
            fill(loads, &part);
        } else if (loads->flying != NULL && !loads->waits) {
            loads->waits = 1;
            pthread_mutex_unlock(&loads->mutex);
            await_oldest(loads);
        } else if (loads->stop && loads->first == NULL) {
            break;
        } else {
            loads->sleeping++;
            pthread_cond_wait(&loads->work, &loads->mutex);
            continue;
        }
        pthread_mutex_lock(&loads->mutex);
    }
    loads->sleeping = 0;
    pthread_cond_broadcast(&loads->work); /* those who slept because there was no buffer are to end too */
    pthread_mutex_unlock(&loads->mutex);
    loads->cuda->context_set(NULL);
    return NULL;
}

void ck_loads_submit(ck_loads *loads, ck_transfer *copy) {
    copy->next = NULL;
    copy->given = 0;
    copy->left = copy->nbytes;
    copy->crc = 0;
    copy->zero = 1;
    pthread_mutex_lock(&loads->mutex);
    if (loads->first == NULL)
        loads->first = copy;
    else
        loads->last->next = copy;
    loads->last = copy;
    int sleepers = to_wake(loads, loads->free != NULL ? parts_of(loads, copy->nbytes) : 0);
    pthread_mutex_unlock(&loads->mutex);
    wake(loads, sleepers);
}

/* -- beginning and end -------------------------------------------------------------------------------------- */

static void release(ck_loads *loads) {
    const ck_cuda *cuda = loads->cuda;
    for (int i = 0; i < loads->buffers; i++)
        if (loads->buffer[i].event) cuda->event_destroy(loads->buffer[i].event);
    if (!loads->borrowed && loads->stream) cuda->stream_destroy(loads->stream);
}

static void join(ck_loads *loads) {
    pthread_mutex_lock(&loads->mutex);
    loads->stop = 1;
    loads->sleeping = 0;
    pthread_cond_broadcast(&loads->work);
    pthread_mutex_unlock(&loads->mutex);
    for (int i = 0; i < loads->started; i++) pthread_join(loads->thread[i], NULL);
    loads->started = 0;
}

static int make_driver_parts(ck_loads *loads, const ck_loads_options *options, const char **call) {
    const ck_cuda *cuda = loads->cuda;
    cu_result result;
    *call = "cuStreamCreate";
    if (!loads->borrowed && (result = cuda->stream_create(&loads->stream, CU_STREAM_IS_NON_BLOCKING)) != CU_OK)
        return result;
    *call = "cuEventCreate";
    for (int i = 0; i < loads->buffers; i++) {
        ck_buffer *buffer = &loads->buffer[i];
        buffer->memory = options->memory + (size_t)i * loads->copy_bytes;
        release_buffer(loads, buffer);
        if ((result = cuda->event_create(&buffer->event, CU_EVENT_NO_TIMING)) != CU_OK) return result;
    }
    return 0;
}

static int make_threads(ck_loads *loads, const ck_loads_options *options, const char **call) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    if (options->cpus != NULL && options->ncpus > 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        for (int i = 0; i < options->ncpus; i++)
            if (options->cpus[i] >= 0 && options->cpus[i] < CPU_SETSIZE) CPU_SET(options->cpus[i], &set);
        pthread_attr_setaffinity_np(&attributes, sizeof set, &set);
    }
    sigset_t all, before;
    sigfillset(&all); /* signals belong to the interpreter's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    *call = "pthread_create";
    int error = 0;
    for (int i = 0; error == 0 && i < loads->threads; i++) {
        error = pthread_create(&loads->thread[i], &attributes, read_files, loads);
        if (error == 0) {
            pthread_setname_np(loads->thread[i], "ckpt-cuda-load");
            loads->started++;
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return -error;
}

static void discard(ck_loads *loads) {
    pthread_cond_destroy(&loads->work);
    pthread_mutex_destroy(&loads->mutex);
    free(loads->thread);
    free(loads);
}

int ck_loads_open(ck_loads **result, const ck_loads_options *options, const char **call) {
    ck_loads *loads = calloc(1, sizeof *loads + (size_t)options->buffers * sizeof(ck_buffer));
    *call = "calloc";
    if (loads == NULL) return -ENOMEM;
    loads->cuda = options->cuda;
    loads->context = options->context;
    loads->queue = options->queue;
    loads->copy_bytes = options->copy_bytes;
    loads->part_bytes = options->part_bytes;
    loads->threads = options->threads;
    loads->buffers = options->buffers;
    loads->stream = options->stream;
    loads->borrowed = options->stream != NULL;
    loads->thread = calloc((size_t)loads->threads, sizeof *loads->thread);
    pthread_mutex_init(&loads->mutex, NULL);
    pthread_cond_init(&loads->work, NULL);
    int error = loads->thread != NULL ? 0 : -ENOMEM;
    if (error == 0) {
        *call = "cuCtxPushCurrent";
        error = loads->cuda->context_push(loads->context);
        if (error == 0) {
            cu_context popped;
            error = make_driver_parts(loads, options, call);
            if (error == 0) error = make_threads(loads, options, call);
            if (error) {
                join(loads);
                release(loads);
            }
            loads->cuda->context_pop(&popped);
        }
    }
    if (error) {
        discard(loads);
        return error;
    }
    *result = loads;
    return 0;
}

void ck_loads_close(ck_loads *loads) {
    cu_context popped;
    join(loads);
    if (loads->cuda->context_push(loads->context) == CU_OK) {
        release(loads);
        loads->cuda->context_pop(&popped);
    }
    discard(loads);
}
