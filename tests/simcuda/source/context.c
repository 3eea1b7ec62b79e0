/* Contexts: a primary one per device, others by cuCtxCreate, a stack of current ones per thread.
 * Each takes a block of its GPU's memory, filled with a pattern: a restore that loses it breaks the context. */
#define _GNU_SOURCE
#include "sim.h"

#include <stdlib.h>
#include <string.h>

#define STACK_DEPTH 64
static _Thread_local Context *stack[STACK_DEPTH];
static _Thread_local int depth;
static pthread_mutex_t primary_mutex = PTHREAD_MUTEX_INITIALIZER; /* retain, release and reset, one at a time */

Context *context_current(void) { return depth ? stack[depth - 1] : NULL; }
void context_forget_thread(void) { depth = 0; }

int context_live(const Context *context) {
    for (int i = 0; i < MAX_GPUS; i++)
        if (context == &sim.primary[i]) return context->alive;
    for (const Context *other = sim.contexts; other; other = other->next)
        if (other == context) return 1;
    return 0;
}

CUresult context_needed(Context **context) {
    *context = context_current();
    if (!*context) return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&sim.mutex);
    int live = context_live(*context);
    pthread_mutex_unlock(&sim.mutex);
    return live ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

Context *context_primary_of(int gpu) {
    for (int i = 0; i < sim.gpus; i++)
        if (physical(i) == gpu && sim.primary[i].alive) return &sim.primary[i];
    return NULL;
}

static uint64_t pattern(const Context *context, uint64_t i) {
    uint64_t x = (context->block + i) * 0x9e3779b97f4a7c15ull;
    return x ^ (x >> 29);
}

void context_fill(const Context *context) {
    for (uint64_t at = 0, run; context->block && at < sim.world->context_bytes; at += run) {
        int gpu;
        unsigned char *bytes = memory_bytes(context->block + at, sim.world->context_bytes - at, &run, &gpu);
        for (uint64_t i = 0; i + 8 <= run; i += 8) {
            uint64_t value = pattern(context, at + i);
            memcpy(bytes + i, &value, 8);
        }
    }
}

void context_check(Context *context) {
    for (uint64_t at = 0, run; context->block && at < sim.world->context_bytes; at += run) {
        int gpu;
        unsigned char *bytes = memory_bytes(context->block + at, sim.world->context_bytes - at, &run, &gpu);
        for (uint64_t i = 0; i + 8 <= run; i += 8) {
            uint64_t value;
            memcpy(&value, bytes + i, 8);
            if (value != pattern(context, at + i)) {
                context->error = CUDA_ERROR_ILLEGAL_ADDRESS;
                return;
            }
        }
    }
}

CUresult context_create(Context *context, int ordinal) {
    context->ordinal = ordinal;
    context->error = CUDA_SUCCESS;
    context->block = 0;
    if (sim.world->context_bytes) {
        CUresult result = memory_allocate(context, sim.world->context_bytes, SEGMENT_CONTEXT, &context->block);
        if (result != CUDA_SUCCESS) return result;
        context_fill(context);
    }
    context->legacy = stream_make(context, 0);
    context->per_thread = stream_make(context, 0);
    context->legacy->default_stream = context->per_thread->default_stream = 1;
    context->alive = 1;
    return CUDA_SUCCESS;
}

void context_destroy(Context *context) {
    streams_wait_all(context, 0);
    for (;;) {
        pthread_mutex_lock(&sim.mutex);
        Stream *stream = sim.streams;
        while (stream && stream->context != context) stream = stream->next;
        if (stream) stream_destroy(stream);
        pthread_mutex_unlock(&sim.mutex);
        if (!stream) break;
    }
    events_destroy(context);
    modules_destroy(context);
    memory_free_context(context);
    pthread_mutex_lock(&sim.mutex);
    context->alive = 0;
    context->references = 0;
    if (!context->primary) {
        for (Context **at = &sim.contexts; *at; at = &(*at)->next)
            if (*at == context) {
                *at = context->next;
                break;
            }
        free(context);
    }
    pthread_mutex_unlock(&sim.mutex);
}

API(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext * out, CUdevice ordinal), (out, ordinal)) {
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    if (ordinal < 0 || ordinal >= sim.gpus) return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&primary_mutex);
    Context *context = &sim.primary[ordinal];
    context->primary = 1;
    CUresult result = context->alive ? CUDA_SUCCESS : context_create(context, ordinal);
    if (result == CUDA_SUCCESS) {
        context->references++;
        *out = context;
    }
    pthread_mutex_unlock(&primary_mutex);
    return result;
}

API(cuDevicePrimaryCtxRelease_v2, "cuDevicePrimaryCtxRelease", (CUdevice ordinal), (ordinal)) {
    if (ordinal < 0 || ordinal >= sim.gpus) return CUDA_ERROR_INVALID_DEVICE;
    Context *context = &sim.primary[ordinal];
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&primary_mutex);
    if (!context->alive || !context->references) result = CUDA_ERROR_INVALID_CONTEXT;
    else if (--context->references == 0) context_destroy(context);
    pthread_mutex_unlock(&primary_mutex);
    return result;
}

API(cuDevicePrimaryCtxReset_v2, "cuDevicePrimaryCtxReset", (CUdevice ordinal), (ordinal)) {
    if (ordinal < 0 || ordinal >= sim.gpus) return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&primary_mutex);
    if (sim.primary[ordinal].alive) context_destroy(&sim.primary[ordinal]);
    pthread_mutex_unlock(&primary_mutex);
    return CUDA_SUCCESS;
}

API(cuDevicePrimaryCtxGetState, "cuDevicePrimaryCtxGetState", (CUdevice ordinal, unsigned int *flags, int *active),
    (ordinal, flags, active)) {
    if (!flags || !active) return CUDA_ERROR_INVALID_VALUE;
    if (ordinal < 0 || ordinal >= sim.gpus) return CUDA_ERROR_INVALID_DEVICE;
    *flags = sim.primary[ordinal].flags;
    *active = sim.primary[ordinal].alive;
    return CUDA_SUCCESS;
}

API(cuDevicePrimaryCtxSetFlags_v2, "cuDevicePrimaryCtxSetFlags", (CUdevice ordinal, unsigned int flags),
    (ordinal, flags)) {
    if (ordinal < 0 || ordinal >= sim.gpus) return CUDA_ERROR_INVALID_DEVICE;
    sim.primary[ordinal].flags = flags;
    return CUDA_SUCCESS;
}

static CUresult push(Context *context) {
    if (depth == STACK_DEPTH) return CUDA_ERROR_OUT_OF_MEMORY;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

API(cuCtxCreate_v2, "cuCtxCreate", (CUcontext * out, unsigned int flags, CUdevice ordinal), (out, flags, ordinal)) {
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    if (ordinal < 0 || ordinal >= sim.gpus) return CUDA_ERROR_INVALID_DEVICE;
    Context *context = calloc(1, sizeof *context);
    if (!context) return CUDA_ERROR_OUT_OF_MEMORY;
    context->flags = flags;
    CUresult result = context_create(context, ordinal);
    if (result != CUDA_SUCCESS) {
        free(context);
        return result;
    }
    pthread_mutex_lock(&sim.mutex);
    context->next = sim.contexts;
    sim.contexts = context;
    pthread_mutex_unlock(&sim.mutex);
    *out = context;
    return push(context);
}

EXPORT CUresult cuCtxCreate_v4(CUcontext *out, void *parameters, unsigned int flags, CUdevice ordinal) {
    (void)parameters;
    return cuCtxCreate_v2(out, flags, ordinal);
}

API(cuCtxDestroy_v2, "cuCtxDestroy", (CUcontext context), (context)) {
    pthread_mutex_lock(&sim.mutex);
    int live = context && !context_live(context) ? 0 : context && !context->primary;
    pthread_mutex_unlock(&sim.mutex);
    if (!live) return CUDA_ERROR_INVALID_CONTEXT;
    if (context_current() == context) depth--;
    context_destroy(context);
    return CUDA_SUCCESS;
}

API(cuCtxSetCurrent, "cuCtxSetCurrent", (CUcontext context), (context)) {
    if (!context) {
        if (depth) depth--;
        return CUDA_SUCCESS;
    }
    pthread_mutex_lock(&sim.mutex);
    int live = context_live(context);
    pthread_mutex_unlock(&sim.mutex);
    if (!live) return CUDA_ERROR_INVALID_CONTEXT;
    if (!depth) return push(context);
    stack[depth - 1] = context;
    return CUDA_SUCCESS;
}

API(cuCtxGetCurrent, "cuCtxGetCurrent", (CUcontext * out), (out)) {
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    *out = context_current();
    return CUDA_SUCCESS;
}

API(cuCtxPushCurrent_v2, "cuCtxPushCurrent", (CUcontext context), (context)) {
    pthread_mutex_lock(&sim.mutex);
    int live = context && context_live(context);
    pthread_mutex_unlock(&sim.mutex);
    return live ? push(context) : CUDA_ERROR_INVALID_CONTEXT;
}

API(cuCtxPopCurrent_v2, "cuCtxPopCurrent", (CUcontext * out), (out)) {
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (out) *out = stack[depth];
    return CUDA_SUCCESS;
}

static CUresult chosen(CUcontext asked, Context **context) {
    if (!asked) return context_needed(context);
    pthread_mutex_lock(&sim.mutex);
    int live = context_live(asked);
    pthread_mutex_unlock(&sim.mutex);
    *context = asked;
    return live ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

API(cuCtxGetDevice_v2, "cuCtxGetDevice", (CUdevice * out, CUcontext asked), (out, asked)) {
    Context *context;
    CUresult result = chosen(asked, &context);
    if (result == CUDA_SUCCESS) *out = context->ordinal;
    return result;
}
EXPORT CUresult cuCtxGetDevice(CUdevice *out) { return cuCtxGetDevice_v2(out, NULL); }

API(cuCtxSynchronize_v2, "cuCtxSynchronize", (CUcontext asked), (asked)) {
    Context *context;
    CUresult result = chosen(asked, &context);
    return result == CUDA_SUCCESS ? streams_wait_all(context, 0) : result;
}
EXPORT CUresult cuCtxSynchronize(void) { return cuCtxSynchronize_v2(NULL); }

API(cuCtxGetFlags, "cuCtxGetFlags", (unsigned int *flags), (flags)) {
    Context *context;
    CUresult result = context_needed(&context);
    if (result == CUDA_SUCCESS) *flags = context->flags;
    return result;
}

API(cuCtxGetApiVersion, "cuCtxGetApiVersion", (CUcontext asked, unsigned int *version), (asked, version)) {
    Context *context;
    CUresult result = chosen(asked, &context);
    if (result == CUDA_SUCCESS) *version = 3020;
    return result;
}

API(cuCtxGetId, "cuCtxGetId", (CUcontext asked, unsigned long long *id), (asked, id)) {
    Context *context;
    CUresult result = chosen(asked, &context);
    if (result == CUDA_SUCCESS) *id = (unsigned long long)(uintptr_t)context;
    return result;
}

API(cuCtxGetStreamPriorityRange, "cuCtxGetStreamPriorityRange", (int *least, int *greatest), (least, greatest)) {
    Context *context;
    CUresult result = context_needed(&context);
    if (result != CUDA_SUCCESS) return result;
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return CUDA_SUCCESS;
}
