#include "cuda_queue_state.h"
#include "cuda_steps.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* In a thread where the context is current. What fails here cannot be helped: the context may be lost. */
void ck_copies_release(ck_copies *queue) {
    const ck_cuda *cuda = queue->cuda;
    for (int i = 0; queue->places != NULL && i < queue->depth; i++) {
        ck_place *place = &queue->places[i];
        if (place->copied) cuda->event_destroy(place->copied);
        if (place->scanned) cuda->event_destroy(place->scanned);
        if (place->before) cuda->event_destroy(place->before);
    }
    if (!queue->borrowed && queue->down) cuda->stream_destroy(queue->down);
    for (int i = 0; i < UP_STREAMS; i++)
        if (!queue->borrowed && queue->up[i]) cuda->stream_destroy(queue->up[i]);
    if (queue->scan) cuda->stream_destroy(queue->scan);
    if (queue->scratch) cuda->memory_free(queue->scratch);
    if (queue->answers) cuda->host_free((void *)queue->answers);
    if (queue->bounce) cuda->host_free(queue->bounce);
    if (queue->module) cuda->module_unload(queue->module);
}

static int make_kernel(ck_copies *queue, const void *image, const char **call) {
    const ck_cuda *cuda = queue->cuda;
    int error = ck_load_kernels(cuda, &queue->module, image, call);
    if (error) return error;
    TRY(cuda->module_function(&queue->kernel, queue->module, CK_KERNEL_NAME), "cuModuleGetFunction");
    TRY(cuda->memory_allocate(&queue->scratch, SCRATCH_BYTES), "cuMemAlloc");
    TRY(cuda->memory_fill(queue->scratch, 0, SCRATCH_BYTES, queue->scan), "cuMemsetD8Async");
    TRY(cuda->host_allocate((void **)&queue->answers, (size_t)queue->depth * 8, CU_HOST_PORTABLE | CU_HOST_DEVICEMAP),
        "cuMemHostAlloc");
    TRY(cuda->host_address(&queue->answers_device, (void *)queue->answers, 0), "cuMemHostGetDevicePointer");
    return 0;
}

static int make_streams(ck_copies *queue, const ck_copies_options *options, const char **call) {
    const ck_cuda *cuda = queue->cuda;
    const unsigned flags = CU_EVENT_BLOCKS | CU_EVENT_NO_TIMING;
    queue->borrowed = options->stream != NULL;
    if (queue->borrowed) {
        queue->down = options->stream;
        for (int i = 0; i < UP_STREAMS; i++) queue->up[i] = options->stream;
    } else {
        TRY(cuda->stream_create(&queue->down, CU_STREAM_IS_NON_BLOCKING), "cuStreamCreate");
        for (int i = 0; i < UP_STREAMS; i++)
            TRY(cuda->stream_create(&queue->up[i], CU_STREAM_IS_NON_BLOCKING), "cuStreamCreate");
    }
    TRY(cuda->stream_create(&queue->scan, CU_STREAM_IS_NON_BLOCKING), "cuStreamCreate");
    for (int i = 0; i < queue->depth; i++) {
        TRY(cuda->event_create(&queue->places[i].copied, flags), "cuEventCreate");
        TRY(cuda->event_create(&queue->places[i].scanned, flags), "cuEventCreate");
        if (queue->borrowed) TRY(cuda->event_create(&queue->places[i].before, flags), "cuEventCreate");
    }
    return 0;
}

static int make_threads(ck_copies *queue, const char **call) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    sigset_t all, before;
    sigfillset(&all); /* signals belong to the interpreter's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    queue->issuing = 1;
    *call = "pthread_create";
    int error = pthread_create(&queue->waiter, &attributes, ck_copies_waiter, queue);
    if (error == 0) {
        pthread_setname_np(queue->waiter, "ckpt-cuda-wait");
        error = pthread_create(&queue->issuer, &attributes, ck_copies_issuer, queue);
        if (error == 0) {
            pthread_setname_np(queue->issuer, "ckpt-cuda-issue");
        } else {
            pthread_mutex_lock(&queue->mutex);
            queue->issuing = 0;
            pthread_cond_signal(&queue->wait);
            pthread_mutex_unlock(&queue->mutex);
            pthread_join(queue->waiter, NULL);
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return -error;
}

/* On the caller's thread, with the context current. */
static int make_all(ck_copies *queue, const ck_copies_options *options, const char **call) {
    int error = make_streams(queue, options, call);
    if (error == 0 && options->image != NULL) error = make_kernel(queue, options->image, call);
    if (error == 0 && options->image == NULL) {
        *call = "pthread_create";
        error = -ck_pool_open(&queue->pool, options->host_threads, NULL, 0);
    }
    if (error == 0) error = make_threads(queue, call);
    return error;
}

int ck_copies_open(ck_copies **result, const ck_copies_options *options, const char **call) {
    const ck_cuda *cuda = options->cuda;
    ck_copies *queue = calloc(1, sizeof *queue);
    *call = "calloc";
    if (queue == NULL) return -ENOMEM;
    queue->cuda = cuda;
    queue->context = options->context;
    queue->depth = options->depth;
    queue->places = calloc((size_t)options->depth, sizeof *queue->places);
    queue->free_places = calloc((size_t)options->depth, sizeof *queue->free_places);
    queue->eventfd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    int error = queue->places && queue->free_places ? 0 : -ENOMEM;
    if (queue->eventfd < 0) {
        error = -errno;
        *call = "eventfd";
    }
    pthread_mutex_init(&queue->mutex, NULL);
    pthread_cond_init(&queue->issue, NULL);
    pthread_cond_init(&queue->wait, NULL);
    for (int i = 0; error == 0 && i < queue->depth; i++) queue->free_places[i] = i;
    if (error == 0) {
        *call = "cuCtxPushCurrent";
        error = cuda->context_push(queue->context);
        if (error == 0) {
            error = make_all(queue, options, call);
            if (error) ck_copies_release(queue);
            cu_context popped;
            cuda->context_pop(&popped);
        }
    }
    if (error) {
        if (queue->pool != NULL) ck_pool_join(queue->pool);
        ck_copies_free(queue);
        return error;
    }
    *result = queue;
    return 0;
}

void ck_copies_join(ck_copies *queue) {
    pthread_join(queue->issuer, NULL);
    if (queue->pool != NULL) ck_pool_join(queue->pool);
}

void ck_copies_free(ck_copies *queue) {
    if (queue->pool != NULL) ck_pool_free(queue->pool);
    if (queue->eventfd >= 0) close(queue->eventfd);
    pthread_cond_destroy(&queue->issue);
    pthread_cond_destroy(&queue->wait);
    pthread_mutex_destroy(&queue->mutex);
    free(queue->free_places);
    free(queue->places);
    free(queue);
}

void ck_copies_abandon(ck_copies *queue) {
    if (queue->pool != NULL) ck_pool_abandon(queue->pool);
    close(queue->eventfd);
}
