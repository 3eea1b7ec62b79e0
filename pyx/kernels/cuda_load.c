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
#define PAUSE_NS 30000L                 /* between two looks at a copy; the link takes 20 us for 1 MiB */
#define PAUSE_MAX_NS 1000000L
#define PAUSES_SHORT 64                 /* looks before they grow rare: the link stands still */

typedef struct {
    unsigned char *memory;
    cu_event event;
    ck_transfer *copy; /* whose piece the GPU fetches; NULL: free */
    size_t nbytes;
} ck_buffer;

typedef struct {
    struct ck_loads *loads;
    pthread_t thread;
    cu_stream stream;
    int next; /* the buffer that was used longest ago */
    ck_buffer buffer[CK_LOAD_BUFFERS_MAX];
} ck_reader;

struct ck_loads {
    const ck_cuda *cuda;
    cu_context context;
    ck_copies *queue;
    size_t piece_bytes;
    int threads, buffers, started, poll;
    int streams; /* to destroy */
    cu_stream *stream;

    pthread_mutex_t mutex;
    pthread_cond_t work;
    ck_transfer *first, *last; /* with pieces that nobody has taken up */
    int sleeping, stop;
    ck_reader reader[];
};

/* -- one piece ---------------------------------------------------------------------------------------------- */

/* The first failure of an operation is the one it reports; its other pieces are let go. */
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

/* `nbytes` more are done with: with the last ones the operation goes on to the queue. */
static void arrived(ck_loads *loads, ck_transfer *copy, size_t nbytes) {
    if (__atomic_sub_fetch(&copy->left, nbytes, __ATOMIC_ACQ_REL) == 0) ck_copies_submit(loads->queue, copy);
}

static cu_result await_event(const ck_loads *loads, cu_event event) {
    if (!loads->poll) return loads->cuda->event_synchronize(event);
    struct timespec pause = {0, PAUSE_NS};
    for (int looks = 0;; looks++) {
        cu_result result = loads->cuda->event_query(event);
        if (result != CU_NOT_READY) return result;
        nanosleep(&pause, NULL);
        if (looks > PAUSES_SHORT && pause.tv_nsec < PAUSE_MAX_NS) pause.tv_nsec += pause.tv_nsec / 4;
    }
}

/* Wait until the GPU has fetched what is in the buffer. */
static void empty(ck_loads *loads, ck_buffer *buffer) {
    cu_result result = await_event(loads, buffer->event);
    if (result != CU_OK) fail(loads, buffer->copy, result, loads->poll ? "cuEventQuery" : "cuEventSynchronize", 0, 0);
    ck_transfer *copy = buffer->copy;
    buffer->copy = NULL;
    arrived(loads, copy, buffer->nbytes);
}

static int read_piece(ck_loads *loads, ck_transfer *copy, size_t at, unsigned char *to, size_t nbytes) {
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

static void load_piece(ck_loads *loads, ck_reader *reader, ck_transfer *copy, size_t at, size_t nbytes) {
    const ck_cuda *cuda = loads->cuda;
    ck_buffer *buffer = &reader->buffer[reader->next];
    if (over(copy) || !read_piece(loads, copy, at, buffer->memory, nbytes)) {
        arrived(loads, copy, nbytes);
        return;
    }
    if (copy->check == CK_CHECK_HOST) checksum(copy, at, buffer->memory, nbytes);
    cu_result result = cuda->copy_up(copy->device + at, buffer->memory, nbytes, reader->stream);
    const char *call = "cuMemcpyHtoDAsync";
    if (result == CU_OK) {
        result = cuda->event_record(buffer->event, reader->stream);
        call = "cuEventRecord";
    }
    if (result != CU_OK) { /* it may have been enqueued all the same: the buffer is not free before the stream is */
        fail(loads, copy, result, call, 0, 0);
        cuda->stream_synchronize(reader->stream);
        arrived(loads, copy, nbytes);
        return;
    }
    buffer->copy = copy;
    buffer->nbytes = nbytes;
    reader->next = (reader->next + 1) % loads->buffers;
}

/* -- the threads -------------------------------------------------------------------------------------------- */

/* With the mutex held: the next piece in order. */
static ck_transfer *take_piece(ck_loads *loads, size_t *at, size_t *nbytes) {
    ck_transfer *copy = loads->first;
    if (copy == NULL) return NULL;
    size_t left = copy->nbytes - copy->given;
    *at = copy->given;
    *nbytes = left < loads->piece_bytes ? left : loads->piece_bytes;
    copy->given += *nbytes;
    if (copy->given == copy->nbytes) loads->first = copy->next;
    return copy;
}

static void *read_files(void *argument) {
    ck_reader *reader = argument;
    ck_loads *loads = reader->loads;
    prctl(PR_SET_TIMERSLACK, 1000UL);
    loads->cuda->context_set(loads->context);
    pthread_mutex_lock(&loads->mutex);
    for (;;) {
        ck_buffer *buffer = &reader->buffer[reader->next];
        size_t at, nbytes;
        ck_transfer *copy = NULL;
        if (buffer->copy == NULL) copy = take_piece(loads, &at, &nbytes);
        if (copy != NULL) {
            pthread_mutex_unlock(&loads->mutex);
            load_piece(loads, reader, copy, at, nbytes);
            pthread_mutex_lock(&loads->mutex);
            continue;
        }
        for (int i = 0; i < loads->buffers && buffer->copy == NULL; i++)
            buffer = &reader->buffer[(reader->next + i) % loads->buffers];
        if (buffer->copy != NULL) { /* no buffer is free, or there is nothing else to do */
            pthread_mutex_unlock(&loads->mutex);
            empty(loads, buffer);
            pthread_mutex_lock(&loads->mutex);
            continue;
        }
        if (loads->stop) break;
        loads->sleeping++;
        pthread_cond_wait(&loads->work, &loads->mutex);
        loads->sleeping--;
    }
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
    if (loads->sleeping) pthread_cond_broadcast(&loads->work);
    pthread_mutex_unlock(&loads->mutex);
}

/* -- beginning and end -------------------------------------------------------------------------------------- */

static void release(ck_loads *loads) {
    const ck_cuda *cuda = loads->cuda;
    for (int i = 0; i < loads->threads; i++)
        for (int j = 0; j < loads->buffers; j++)
            if (loads->reader[i].buffer[j].event) cuda->event_destroy(loads->reader[i].buffer[j].event);
    for (int i = 0; i < loads->streams; i++)
        if (loads->stream[i]) cuda->stream_destroy(loads->stream[i]);
}

static void join(ck_loads *loads) {
    pthread_mutex_lock(&loads->mutex);
    loads->stop = 1;
    pthread_cond_broadcast(&loads->work);
    pthread_mutex_unlock(&loads->mutex);
    for (int i = 0; i < loads->started; i++) pthread_join(loads->reader[i].thread, NULL);
    loads->started = 0;
}

static int make_driver_parts(ck_loads *loads, const ck_loads_options *options, const char **call) {
    const ck_cuda *cuda = loads->cuda;
    const unsigned flags = CU_EVENT_NO_TIMING | (options->poll ? 0 : CU_EVENT_BLOCKS);
    cu_result result;
    *call = "cuStreamCreate";
    for (int i = 0; i < loads->streams; i++)
        if ((result = cuda->stream_create(&loads->stream[i], CU_STREAM_IS_NON_BLOCKING)) != CU_OK) return result;
    *call = "cuEventCreate";
    for (int i = 0; i < loads->threads; i++) {
        ck_reader *reader = &loads->reader[i];
        reader->loads = loads;
        reader->stream = loads->streams ? loads->stream[i % loads->streams] : options->stream;
        for (int j = 0; j < loads->buffers; j++) {
            ck_buffer *buffer = &reader->buffer[j];
            buffer->memory = options->memory + ((size_t)i * (size_t)loads->buffers + (size_t)j) * loads->piece_bytes;
            if ((result = cuda->event_create(&buffer->event, flags)) != CU_OK) return result;
        }
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
        error = pthread_create(&loads->reader[i].thread, &attributes, read_files, &loads->reader[i]);
        if (error == 0) {
            pthread_setname_np(loads->reader[i].thread, "ckpt-cuda-load");
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
    free(loads->stream);
    free(loads);
}

int ck_loads_open(ck_loads **result, const ck_loads_options *options, const char **call) {
    ck_loads *loads = calloc(1, sizeof *loads + (size_t)options->threads * sizeof(ck_reader));
    *call = "calloc";
    if (loads == NULL) return -ENOMEM;
    loads->cuda = options->cuda;
    loads->context = options->context;
    loads->queue = options->queue;
    loads->piece_bytes = options->piece_bytes;
    loads->threads = options->threads;
    loads->buffers = options->buffers;
    loads->poll = options->poll;
    loads->streams = options->stream != NULL ? 0 : options->streams;
    pthread_mutex_init(&loads->mutex, NULL);
    pthread_cond_init(&loads->work, NULL);
    int error = 0;
    if (loads->streams && (loads->stream = calloc((size_t)loads->streams, sizeof *loads->stream)) == NULL) {
        loads->streams = 0;
        error = -ENOMEM;
    }
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
