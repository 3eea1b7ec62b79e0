/* Streams: a queue and a thread each, work in order; the legacy stream waits for the blocking ones and they for it. */
#define _GNU_SOURCE
#include "sim.h"

#include <signal.h>
#include <stdlib.h>

int stream_live(const Stream *stream) {
    for (const Stream *other = sim.streams; other; other = other->next)
        if (other == stream) return !other->destroyed;
    return 0;
}

CUresult stream_resolve(CUstream handle, Stream **stream) {
    if (handle == NULL || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
        Context *context;
        CUresult result = context_needed(&context);
        if (result != CUDA_SUCCESS) return result;
        *stream = handle == CU_STREAM_PER_THREAD ? context->per_thread : context->legacy;
        return CUDA_SUCCESS;
    }
    pthread_mutex_lock(&sim.mutex);
    int live = stream_live(handle);
    pthread_mutex_unlock(&sim.mutex);
    *stream = handle;
    return live ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

Stream *stream_make(Context *context, unsigned int flags) {
    Stream *stream = calloc(1, sizeof *stream);
    if (!stream) abort(); /* a test's machine is out of memory */
    stream->context = context;
    stream->flags = flags;
    stream->references = 1;
    stream->tail = &stream->head;
    pthread_cond_init(&stream->arrived, NULL);
    pthread_mutex_lock(&sim.mutex);
    stream->next = sim.streams;
    sim.streams = stream;
    pthread_mutex_unlock(&sim.mutex);
    return stream;
}

/* These run under sim.mutex. */
void stream_release(Stream *stream) {
    if (--stream->references) return;
    pthread_cond_destroy(&stream->arrived);
    free(stream);
}

/* What was enqueued still runs, then the thread ends. */
void stream_destroy(Stream *stream) {
    for (Stream **at = &sim.streams; *at; at = &(*at)->next)
        if (*at == stream) {
            *at = stream->next;
            break;
        }
    stream->destroyed = 1;
    pthread_cond_broadcast(&stream->arrived);
    stream_release(stream);
}

static void *worker(void *argument) {
    Stream *stream = argument;
    sim_worker_thread = 1;
    pthread_mutex_lock(&sim.mutex);
    for (;;) {
        while (!stream->head && !stream->destroyed && !sim.stopping)
            pthread_cond_wait(&stream->arrived, &sim.mutex);
        Work *work = stream->head;
        if (!work) break;
        stream->head = work->next;
        if (!stream->head) stream->tail = &stream->head;
        pthread_mutex_unlock(&sim.mutex);
        CUresult result = work_run(stream, work);
        pthread_mutex_lock(&sim.mutex);
        if (result != CUDA_SUCCESS && !stream->error) stream->error = result;
        if (work->answer) *work->answer = result;
        stream->completed++;
        if (work->event) event_release(work->event);
        if (work->other) stream_release(work->other);
        free(work->memory);
        free(work);
        pthread_cond_broadcast(&sim.progress);
    }
    stream->started = 0;
    stream_release(stream);
    sim.threads--;
    pthread_cond_broadcast(&sim.progress);
    pthread_mutex_unlock(&sim.mutex);
    return NULL;
}

static CUresult start(Stream *stream) {
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&thread, NULL, worker, stream);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) return CUDA_ERROR_OPERATING_SYSTEM;
    pthread_detach(thread);
    stream->started = 1;
    stream->references++;
    sim.threads++;
    return CUDA_SUCCESS;
}

static CUresult append(Stream *stream, const Work *work) {
    if (!stream->started) {
        CUresult result = start(stream);
        if (result != CUDA_SUCCESS) return result;
    }
    Work *copy = malloc(sizeof *copy);
    if (!copy) return CUDA_ERROR_OUT_OF_MEMORY;
    *copy = *work;
    copy->next = NULL;
    if (copy->event) copy->event->references++;
    if (copy->other) copy->other->references++;
    *stream->tail = copy;
    stream->tail = &copy->next;
    stream->submitted++;
    pthread_cond_signal(&stream->arrived);
    return CUDA_SUCCESS;
}

static void order_after(Stream *stream, Stream *other) {
    if (other == stream || other->completed == other->submitted) return;
    append(stream, &(Work){.kind = WORK_WAIT_STREAM, .other = other, .generation = other->submitted, .fault = -1});
}

CUresult stream_submit(Stream *stream, Work work, int wait) {
    CUresult answer = CUDA_SUCCESS, result;
    if (!current_call || current_call->scope == SCOPE_CALL) work.fault = -1;
    else {
        work.fault = current_call->fault;
        work.scope = current_call->scope;
        current_call->fault = -1;
    }
    pthread_mutex_lock(&sim.mutex);
    if (stream->capturing) { /* recorded in a graph, which the simulation doesn't run */
        pthread_mutex_unlock(&sim.mutex);
        free(work.memory);
        return wait ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
    }
    Context *context = stream->context;
    if (stream == context->legacy) {
        for (Stream *other = sim.streams; other; other = other->next)
            if (other->context == context && !(other->flags & CU_STREAM_NON_BLOCKING)) order_after(stream, other);
    } else if (!(stream->flags & CU_STREAM_NON_BLOCKING)) {
        order_after(stream, context->legacy);
    }
    if (wait) work.answer = &answer;
    result = append(stream, &work);
    if (result != CUDA_SUCCESS) free(work.memory);
    uint64_t number = stream->submitted;
    if (result == CUDA_SUCCESS && wait) {
        stream->references++;
        while (stream->completed < number) process_wait();
        stream_release(stream);
        result = answer;
    }
    pthread_mutex_unlock(&sim.mutex);
    return result;
}

CUresult stream_wait(Stream *stream) {
    pthread_mutex_lock(&sim.mutex);
    uint64_t number = stream->submitted;
    stream->references++;
    while (stream->completed < number) process_wait();
    CUresult result = stream->error;
    stream_release(stream);
    pthread_mutex_unlock(&sim.mutex);
    return result;
}

CUresult streams_wait_all(const Context *context, uint64_t deadline) {
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&sim.mutex);
    for (Stream *stream = sim.streams; stream;) {
        if ((context && stream->context != context) || stream->completed == stream->submitted) {
            if ((!context || stream->context == context) && stream->error && !result) result = stream->error;
            stream = stream->next;
            continue;
        }
        if (deadline && monotonic_ns() >= deadline) {
            result = CUDA_ERROR_NOT_READY;
            break;
        }
        process_wait();
        stream = sim.streams; /* the list may have changed */
    }
    pthread_mutex_unlock(&sim.mutex);
    return result;
}

static CUresult create(CUstream *out, unsigned int flags, int priority) {
    Context *context;
    CUresult result = context_needed(&context);
    if (result != CUDA_SUCCESS) return result;
    if (!out || flags > 1) return CUDA_ERROR_INVALID_VALUE;
    *out = stream_make(context, flags);
    (*out)->priority = priority;
    return CUDA_SUCCESS;
}

API(cuStreamCreate, "cuStreamCreate", (CUstream * out, unsigned int flags), (out, flags)) {
    return create(out, flags, 0);
}

API(cuStreamCreateWithPriority, "cuStreamCreateWithPriority", (CUstream * out, unsigned int flags, int priority),
    (out, flags, priority)) {
    return create(out, flags, priority);
}

API(cuStreamDestroy_v2, "cuStreamDestroy", (CUstream handle), (handle)) {
    pthread_mutex_lock(&sim.mutex);
    int live = handle && stream_live(handle) && !handle->default_stream;
    if (live) stream_destroy(handle);
    pthread_mutex_unlock(&sim.mutex);
    return live ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult usable(CUstream handle, Stream **stream) {
    CUresult result = stream_resolve(handle, stream);
    return result == CUDA_SUCCESS && (*stream)->capturing ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : result;
}

API(cuStreamQuery, "cuStreamQuery", (CUstream handle), (handle)) {
    Stream *stream;
    CUresult result = usable(handle, &stream);
    if (result != CUDA_SUCCESS) return result;
    pthread_mutex_lock(&sim.mutex);
    result = stream->error ? stream->error
                           : stream->completed == stream->submitted ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    pthread_mutex_unlock(&sim.mutex);
    return result;
}

API(cuStreamSynchronize, "cuStreamSynchronize", (CUstream handle), (handle)) {
    Stream *stream;
    CUresult result = usable(handle, &stream);
    return result == CUDA_SUCCESS ? stream_wait(stream) : result;
}

API(cuStreamGetCtx, "cuStreamGetCtx", (CUstream handle, CUcontext *out), (handle, out)) {
    Stream *stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result == CUDA_SUCCESS) *out = stream->context;
    return result;
}

EXPORT CUresult cuStreamGetCtx_v2(CUstream handle, CUcontext *out, void **green) {
    if (green) *green = NULL;
    return cuStreamGetCtx(handle, out);
}

API(cuStreamGetDevice, "cuStreamGetDevice", (CUstream handle, CUdevice *out), (handle, out)) {
    Stream *stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result == CUDA_SUCCESS) *out = stream->context->ordinal;
    return result;
}

API(cuStreamGetFlags, "cuStreamGetFlags", (CUstream handle, unsigned int *out), (handle, out)) {
    Stream *stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result == CUDA_SUCCESS) *out = stream->flags;
    return result;
}

API(cuStreamGetPriority, "cuStreamGetPriority", (CUstream handle, int *out), (handle, out)) {
    Stream *stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result == CUDA_SUCCESS) *out = stream->priority;
    return result;
}

API(cuStreamGetId, "cuStreamGetId", (CUstream handle, unsigned long long *out), (handle, out)) {
    Stream *stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result == CUDA_SUCCESS) *out = (unsigned long long)(uintptr_t)stream;
    return result;
}

API(cuStreamIsCapturing, "cuStreamIsCapturing", (CUstream handle, int *out), (handle, out)) {
    Stream *stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result == CUDA_SUCCESS) *out = stream->capturing; /* 1: CU_STREAM_CAPTURE_STATUS_ACTIVE */
    return result;
}

API(cuStreamBeginCapture_v2, "cuStreamBeginCapture", (CUstream handle, int mode), (handle, mode)) {
    Stream *stream;
    (void)mode;
    CUresult result = usable(handle, &stream);
    if (result != CUDA_SUCCESS) return result;
    if (stream->default_stream) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    stream->capturing = 1;
    return CUDA_SUCCESS;
}

API(cuStreamEndCapture, "cuStreamEndCapture", (CUstream handle, void **graph), (handle, graph)) {
    Stream *stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result != CUDA_SUCCESS) return result;
    if (!stream->capturing) return CUDA_ERROR_ILLEGAL_STATE;
    stream->capturing = 0;
    if (graph) *graph = NULL; /* the simulation runs no graphs */
    return CUDA_SUCCESS;
}

API(cuStreamWaitEvent, "cuStreamWaitEvent", (CUstream handle, CUevent event, unsigned int flags),
    (handle, event, flags)) {
    Stream *stream;
    (void)flags;
    CUresult result = stream_resolve(handle, &stream);
    if (result != CUDA_SUCCESS) return result;
    pthread_mutex_lock(&sim.mutex);
    const Event *known = sim.events;
    while (known && known != event) known = known->next;
    uint64_t generation = known ? known->recorded : 0;
    pthread_mutex_unlock(&sim.mutex);
    if (!known) return CUDA_ERROR_INVALID_HANDLE;
    return stream_submit(stream, (Work){.kind = WORK_WAIT_EVENT, .event = event, .generation = generation}, 0);
}

API(cuLaunchHostFunc, "cuLaunchHostFunc", (CUstream handle, CUhostFn function, void *data),
    (handle, function, data)) {
    Stream *stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result != CUDA_SUCCESS) return result;
    if (!function) return CUDA_ERROR_INVALID_VALUE;
    return stream_submit(stream, (Work){.kind = WORK_HOST, .function = function, .user_data = data}, 0);
}

EXPORT CUresult cuLaunchHostFunc_v2(CUstream handle, CUhostFn function, void *data, unsigned int mode) {
    (void)mode;
    return cuLaunchHostFunc(handle, function, data);
}

API(cuStreamAddCallback, "cuStreamAddCallback",
    (CUstream handle, CUstreamCallback callback, void *data, unsigned int flags), (handle, callback, data, flags)) {
    Stream *stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result != CUDA_SUCCESS) return result;
    if (!callback || flags) return CUDA_ERROR_INVALID_VALUE;
    return stream_submit(stream, (Work){.kind = WORK_CALLBACK, .callback = callback, .user_data = data}, 0);
}
