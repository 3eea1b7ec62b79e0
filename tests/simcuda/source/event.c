/* Events: each record is a generation; a wait or a query is for the generation recorded last. */
#define _GNU_SOURCE
#include "sim.h"

#include <stdlib.h>

/* Under sim.mutex. */
void event_release(Event *event) {
    if (--event->references == 0) free(event);
}

static Event *live(const Event *event) {
    Event *other = sim.events;
    while (other && other != event) other = other->next;
    return other;
}

void events_destroy(const Context *context) {
    pthread_mutex_lock(&sim.mutex);
    for (Event **at = &sim.events; *at;) {
        Event *event = *at;
        if (event->context != context) {
            at = &event->next;
            continue;
        }
        *at = event->next;
        event_release(event);
    }
    pthread_mutex_unlock(&sim.mutex);
}

API(cuEventCreate, "cuEventCreate", (CUevent * out, unsigned int flags), (out, flags)) {
    Context *context;
    CUresult result = context_needed(&context);
    if (result != CUDA_SUCCESS) return result;
    if (!out || flags > 7 || ((flags & 4) && !(flags & CU_EVENT_DISABLE_TIMING))) return CUDA_ERROR_INVALID_VALUE;
    Event *event = calloc(1, sizeof *event);
    if (!event) return CUDA_ERROR_OUT_OF_MEMORY;
    event->context = context;
    event->flags = flags;
    event->references = 1;
    pthread_mutex_lock(&sim.mutex);
    event->next = sim.events;
    sim.events = event;
    pthread_mutex_unlock(&sim.mutex);
    *out = event;
    return CUDA_SUCCESS;
}

API(cuEventDestroy_v2, "cuEventDestroy", (CUevent event), (event)) {
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&sim.mutex);
    for (Event **at = &sim.events; *at; at = &(*at)->next)
        if (*at == event) {
            *at = event->next;
            event_release(event); /* a pending record holds its own reference */
            result = CUDA_SUCCESS;
            break;
        }
    pthread_mutex_unlock(&sim.mutex);
    return result;
}

API(cuEventRecord, "cuEventRecord", (CUevent event, CUstream handle), (event, handle)) {
    Stream *stream;
    CUresult result = stream_resolve(handle, &stream);
    if (result != CUDA_SUCCESS) return result;
    pthread_mutex_lock(&sim.mutex);
    if (!live(event) || event->context != stream->context) result = CUDA_ERROR_INVALID_HANDLE;
    uint64_t generation = result == CUDA_SUCCESS ? ++event->recorded : 0;
    pthread_mutex_unlock(&sim.mutex);
    if (result != CUDA_SUCCESS) return result;
    return stream_submit(stream, (Work){.kind = WORK_RECORD, .event = event, .generation = generation}, 0);
}

EXPORT CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int flags) {
    return flags > 1 ? CUDA_ERROR_INVALID_VALUE : cuEventRecord(event, stream);
}

API(cuEventQuery, "cuEventQuery", (CUevent event), (event)) {
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&sim.mutex);
    if (live(event)) result = event->done < event->recorded ? CUDA_ERROR_NOT_READY : event->error;
    pthread_mutex_unlock(&sim.mutex);
    return result;
}

API(cuEventSynchronize, "cuEventSynchronize", (CUevent event), (event)) {
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&sim.mutex);
    if (live(event)) {
        uint64_t generation = event->recorded;
        event->references++;
        while (event->done < generation && !sim.stopping) process_wait();
        result = event->error;
        event_release(event);
    }
    pthread_mutex_unlock(&sim.mutex);
    return result;
}

API(cuEventElapsedTime_v2, "cuEventElapsedTime", (float *milliseconds, CUevent first, CUevent second),
    (milliseconds, first, second)) {
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&sim.mutex);
    if (!milliseconds) result = CUDA_ERROR_INVALID_VALUE;
    else if (!live(first) || !live(second) || !first->recorded || !second->recorded ||
             ((first->flags | second->flags) & CU_EVENT_DISABLE_TIMING))
        result = CUDA_ERROR_INVALID_HANDLE;
    else if (first->done < first->recorded || second->done < second->recorded) result = CUDA_ERROR_NOT_READY;
    else *milliseconds = (float)((double)(int64_t)(second->time - first->time) / 1e6);
    pthread_mutex_unlock(&sim.mutex);
    return result;
}
EXPORT CUresult cuEventElapsedTime(float *milliseconds, CUevent first, CUevent second) {
    return cuEventElapsedTime_v2(milliseconds, first, second);
}
