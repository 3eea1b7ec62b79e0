#include "cuda_queue_state.h"

#include "copy.h"

#include <errno.h>
#include <unistd.h>

static void append(ck_transfers *to, ck_transfer *copy) {
    copy->next = NULL;
    if (to->first == NULL)
        to->first = copy;
    else
        to->last->next = copy;
    to->last = copy;
}

static ck_transfer *take(ck_transfers *from) {
    ck_transfer *copy = from->first;
    if (copy != NULL) from->first = copy->next;
    return copy;
}

static void tell(ck_copies *queue) {
    uint64_t one = 1;
    ssize_t written;
    do {
        written = write(queue->eventfd, &one, sizeof one);
    } while (written < 0 && errno == EINTR);
}

static int failed(ck_transfer *copy, cu_result result, const char *call) {
    if (result == CU_OK) return 0;
    if (copy->error == CU_OK) {
        copy->error = result;
        copy->call = call;
    }
    return 1;
}

/* An operation has ended: on to the host threads, or to the list of the done. */
static void finish(ck_copies *queue, ck_transfer *copy, int holds_place) {
    int host = copy->check == CK_CHECK_HOST && (copy->kind == CK_COPY_DOWN || copy->kind == CK_COPY_UP) &&
               copy->error == CU_OK && !__atomic_load_n(&copy->cancelled, __ATOMIC_RELAXED);
    if (copy->check == CK_CHECK_DEVICE && holds_place && copy->error == CU_OK) {
        copy->crc = queue->answers[2 * copy->place];
        copy->zero = queue->answers[2 * copy->place + 1] == 0;
    }
    pthread_mutex_lock(&queue->mutex);
    if (holds_place) {
        queue->free_places[--queue->running] = copy->place;
        pthread_cond_signal(&queue->issue);
    }
    if (host) {
        /* From here on another thread may end it. */
        pthread_mutex_unlock(&queue->mutex);
        ck_pool_submit(queue->pool, &copy->job, NULL, copy->host, copy->nbytes);
        return;
    }
    int first = queue->done.first == NULL;
    append(&queue->done, copy);
    pthread_mutex_unlock(&queue->mutex);
    if (first) tell(queue);
}

/* After `stream` was given work by `call`, which answered `result`: marks the work's end with an event, and says
   whether it is to be waited for. An error does not prove that nothing was enqueued (it can be that of earlier
   work), and memory that the GPU may still write to must not be given back: then the stream itself is waited
   for, here. */
static int mark(ck_copies *queue, ck_transfer *copy, cu_result result, const char *call, cu_event event,
                cu_stream stream) {
    if (!failed(copy, result, call) &&
        !failed(copy, queue->cuda->event_record(event, stream), "cuEventRecord"))
        return 1;
    queue->cuda->stream_synchronize(stream);
    return 0;
}

/* The checksum, behind whatever the kernels' stream has to wait for. */
static void issue_kernel(ck_copies *queue, ck_transfer *copy) {
    const ck_cuda *cuda = queue->cuda;
    ck_place *place = &queue->places[copy->place];
    uint64_t nbytes = copy->nbytes;
    cu_address answer = queue->answers_device + (cu_address)(8 * copy->place);
    void *arguments[] = {&copy->device, &nbytes, &queue->scratch, &answer};
    if (copy->kind == CK_COPY_UP) {
        if (failed(copy, cuda->stream_wait(queue->scan, place->copied, 0), "cuStreamWaitEvent")) return;
    } else if (queue->borrowed) { /* whatever the caller's stream still does to this memory comes first */
        if (failed(copy, cuda->event_record(place->before, queue->down), "cuEventRecord")) return;
        if (failed(copy, cuda->stream_wait(queue->scan, place->before, 0), "cuStreamWaitEvent")) return;
    }
    cu_result result = cuda->launch(queue->kernel, CK_KERNEL_BLOCKS, 1, 1, CK_KERNEL_THREADS, 1, 1, 0, queue->scan,
                                    arguments, NULL);
    copy->scanning = mark(queue, copy, result, "cuLaunchKernel", place->scanned, queue->scan);
}

static void issue_copy(ck_copies *queue, ck_transfer *copy) {
    const ck_cuda *cuda = queue->cuda;
    cu_event copied = queue->places[copy->place].copied;
    cu_result result;
    if (copy->kind == CK_COPY_DOWN) {
        result = cuda->copy_down(copy->host, copy->device, copy->nbytes, queue->down);
        copy->copying = mark(queue, copy, result, "cuMemcpyDtoHAsync", copied, queue->down);
        return;
    }
    cu_stream up = queue->up[queue->turn++ % UP_STREAMS];
    if (copy->kind == CK_COPY_CLEAR) {
        result = cuda->memory_fill(copy->device, 0, copy->nbytes, up);
        copy->copying = mark(queue, copy, result, "cuMemsetD8Async", copied, up);
    } else {
        result = cuda->copy_up(copy->device, copy->host, copy->nbytes, up);
        copy->copying = mark(queue, copy, result, "cuMemcpyHtoDAsync", copied, up);
    }
}

/* A scan where the device has no kernel: through a pinned buffer, piece by piece. Rare; it holds up the queue. */
static void scan_on_host(ck_copies *queue, ck_transfer *copy) {
    const ck_cuda *cuda = queue->cuda;
    cu_event copied = queue->places[copy->place].copied;
    if (queue->bounce == NULL &&
        failed(copy, cuda->host_allocate((void **)&queue->bounce, BOUNCE_BYTES, CU_HOST_PORTABLE), "cuMemHostAlloc")) {
        queue->bounce = NULL;
        return;
    }
    uint32_t crc = 0;
    int zero = 1;
    for (size_t at = 0; at < copy->nbytes;) {
        size_t piece = copy->nbytes - at < BOUNCE_BYTES ? copy->nbytes - at : BOUNCE_BYTES;
        cu_result result = cuda->copy_down(queue->bounce, copy->device + at, piece, queue->down);
        if (!mark(queue, copy, result, "cuMemcpyDtoHAsync", copied, queue->down)) return;
        if (failed(copy, cuda->event_synchronize(copied), "cuEventSynchronize")) return;
        int piece_zero;
        crc = ck_pass(NULL, queue->bounce, piece, crc, &piece_zero);
        zero = zero && piece_zero;
        at += piece;
    }
    copy->crc = crc;
    copy->zero = zero;
}

static void issue(ck_copies *queue, ck_transfer *copy) {
    if (copy->kind == CK_COPY_SCAN && copy->check == CK_CHECK_HOST) {
        scan_on_host(queue, copy);
        return;
    }
    if (copy->kind == CK_COPY_UP || copy->kind == CK_COPY_CLEAR) {
        issue_copy(queue, copy);
        if (copy->check == CK_CHECK_DEVICE && copy->copying) issue_kernel(queue, copy);
        return;
    }
    if (copy->check == CK_CHECK_DEVICE) issue_kernel(queue, copy);
    if (copy->kind == CK_COPY_DOWN && copy->error == CU_OK && !copy->elide) issue_copy(queue, copy);
}

void *ck_copies_issuer(void *argument) {
    ck_copies *queue = argument;
    queue->cuda->context_set(queue->context);
    pthread_mutex_lock(&queue->mutex);
    for (;;) {
        int second = queue->again.first != NULL;
        int ready = second || (queue->queued.first != NULL && queue->running < queue->depth);
        if (!ready) {
            if (queue->stop && queue->queued.first == NULL && queue->running == 0) break;
            pthread_cond_wait(&queue->issue, &queue->mutex);
            continue;
        }
        ck_transfer *copy = take(second ? &queue->again : &queue->queued);
        int over = __atomic_load_n(&copy->cancelled, __ATOMIC_RELAXED);
        if (!second && (copy->error != CU_OK || copy->os_error)) over = 1; /* of a load that failed before */
        if (!second && !over) copy->place = queue->free_places[queue->running++];
        pthread_mutex_unlock(&queue->mutex);
        if (!over && second)
            issue_copy(queue, copy);
        else if (!over)
            issue(queue, copy);
        if (copy->copying || copy->scanning) {
            pthread_mutex_lock(&queue->mutex);
            append(&queue->flight, copy);
            pthread_cond_signal(&queue->wait);
        } else {
            finish(queue, copy, second || !over);
            pthread_mutex_lock(&queue->mutex);
        }
    }
    queue->issuing = 0;
    pthread_cond_signal(&queue->wait);
    pthread_mutex_unlock(&queue->mutex);
    pthread_join(queue->waiter, NULL);
    ck_copies_release(queue);
    queue->cuda->context_set(NULL);
    pthread_mutex_lock(&queue->mutex);
    queue->ended = 1;
    pthread_mutex_unlock(&queue->mutex);
    tell(queue);
    return NULL;
}

/* After an event: the end, or the copy of what turned out not to be zero. */
static void after(ck_copies *queue, ck_transfer *copy) {
    copy->copying = copy->scanning = 0;
    if (copy->elide && copy->error == CU_OK) {
        copy->elide = 0;
        copy->elided = queue->answers[2 * copy->place + 1] == 0;
        if (!copy->elided) {
            pthread_mutex_lock(&queue->mutex);
            append(&queue->again, copy);
            pthread_cond_signal(&queue->issue);
            pthread_mutex_unlock(&queue->mutex);
            return;
        }
    }
    finish(queue, copy, 1);
}

static void wait_for(ck_copies *queue, ck_transfer *copy) {
    const ck_cuda *cuda = queue->cuda;
    ck_place *place = &queue->places[copy->place];
    if (copy->scanning) {
        int lost = failed(copy, cuda->event_synchronize(place->scanned), "cuEventSynchronize");
        if (!lost && copy->kind == CK_COPY_UP) copy->copying = 0; /* the kernel came after the copy */
    }
    if (copy->copying) failed(copy, cuda->event_synchronize(place->copied), "cuEventSynchronize");
}

/* Whether an event that is to be waited for has passed; its error becomes the operation's. */
static int passed(ck_copies *queue, ck_transfer *copy, cu_event event) {
    cu_result result = queue->cuda->event_query(event);
    if (result == CU_NOT_READY) return 0;
    failed(copy, result, "cuEventQuery");
    return 1;
}

static int has_ended(ck_copies *queue, ck_transfer *copy) {
    ck_place *place = &queue->places[copy->place];
    if (copy->copying && passed(queue, copy, place->copied)) copy->copying = 0;
    if (copy->scanning && passed(queue, copy, place->scanned)) copy->scanning = 0;
    return !copy->copying && !copy->scanning;
}

void *ck_copies_waiter(void *argument) {
    ck_copies *queue = argument;
    ck_transfers mine = {NULL, NULL};
    queue->cuda->context_set(queue->context);
    for (;;) {
        pthread_mutex_lock(&queue->mutex);
        while (queue->flight.first == NULL && mine.first == NULL && queue->issuing)
            pthread_cond_wait(&queue->wait, &queue->mutex);
        for (ck_transfer *copy; (copy = take(&queue->flight)) != NULL;) append(&mine, copy);
        pthread_mutex_unlock(&queue->mutex);
        ck_transfer *head = take(&mine);
        if (head == NULL) break; /* nothing left, and nobody issues */
        wait_for(queue, head);
        after(queue, head);
        /* The streams are independent: what others have ended meanwhile need not wait for the next in order. */
        int missed[CK_COPY_KINDS] = {0};
        ck_transfers rest = {NULL, NULL};
        for (ck_transfer *copy; (copy = take(&mine)) != NULL;) {
            int kind = copy->kind;
            if (missed[kind] || !has_ended(queue, copy)) {
                missed[kind] = 1;
                append(&rest, copy);
                continue;
            }
            after(queue, copy);
        }
        mine = rest;
    }
    queue->cuda->context_set(NULL);
    return NULL;
}

int ck_copies_eventfd(const ck_copies *queue) { return queue->eventfd; }

int ck_copies_host_eventfd(const ck_copies *queue) {
    return queue->pool == NULL ? -1 : ck_pool_eventfd(queue->pool);
}

void ck_copies_submit(ck_copies *queue, ck_transfer *copy) {
    pthread_mutex_lock(&queue->mutex);
    append(&queue->queued, copy);
    pthread_cond_signal(&queue->issue);
    pthread_mutex_unlock(&queue->mutex);
}

void ck_copies_cancel(ck_transfer *copy) {
    __atomic_store_n(&copy->cancelled, 1, __ATOMIC_RELAXED);
}

ck_transfer *ck_copies_reap(ck_copies *queue) {
    uint64_t count;
    ssize_t got;
    do {
        got = read(queue->eventfd, &count, sizeof count);
    } while (got < 0 && errno == EINTR);
    pthread_mutex_lock(&queue->mutex);
    ck_transfer *done = queue->done.first;
    queue->done.first = NULL;
    pthread_mutex_unlock(&queue->mutex);
    return done;
}

ck_job *ck_copies_reap_host(ck_copies *queue) { return queue->pool == NULL ? NULL : ck_pool_reap(queue->pool); }

int ck_copies_running(ck_copies *queue) {
    pthread_mutex_lock(&queue->mutex);
    int running = queue->running;
    pthread_mutex_unlock(&queue->mutex);
    return running;
}

void ck_copies_stop(ck_copies *queue) {
    pthread_mutex_lock(&queue->mutex);
    queue->stop = 1;
    pthread_cond_signal(&queue->issue);
    pthread_mutex_unlock(&queue->mutex);
}

int ck_copies_ended(ck_copies *queue) {
    pthread_mutex_lock(&queue->mutex);
    int ended = queue->ended;
    pthread_mutex_unlock(&queue->mutex);
    return ended;
}
