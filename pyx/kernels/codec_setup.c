#include "codec_lane.h"
#include "cuda_steps.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define STACK_BYTES ((size_t)1 << 20) /* the driver and nvCOMP run on these stacks */
#define ENOUGH_BYTES ((size_t)64 << 20) /* a batch of so many waiting bytes does not wait for more */
#define TOLD_BYTES ((size_t)32 << 20)   /* that are told of at once, at most; */
#define URGENT (-1000)                  /* a stream's priority: the driver takes the highest that there is */
#define TOLD_MOST 8                     /* in so many chunks */

/* What fails here cannot be helped: the context may be lost. */
void ck_codec_release(ck_codec *codec) {
    const ck_cuda *cuda = codec->cuda;
    for (int i = 0; i < codec->lanes; i++) {
        if (codec->lane[i].stream) cuda->stream_synchronize(codec->lane[i].stream);
        if (codec->lane[i].urgent) cuda->stream_synchronize(codec->lane[i].urgent);
    }
    for (int k = 0; k < codec->links; k++)
        if (codec->link[k]) cuda->stream_synchronize(codec->link[k]);
    for (int i = 0; i < codec->lanes; i++) {
        ck_lane *lane = &codec->lane[i];
        if (lane->mark) cuda->event_destroy(lane->mark);
        if (lane->before) cuda->event_destroy(lane->before);
        if (lane->packed) cuda->event_destroy(lane->packed);
        for (int k = 0; k < CK_BATCH; k++)
            if (lane->copied[k]) cuda->event_destroy(lane->copied[k]);
        if (lane->stream) cuda->stream_destroy(lane->stream);
        if (lane->urgent) cuda->stream_destroy(lane->urgent);
        if (lane->host) cuda->host_free(lane->host);
        free(lane->engine_jobs);
        lane->engine_jobs = NULL;
    }
    for (int k = 0; k < codec->links; k++)
        if (codec->link[k]) cuda->stream_destroy(codec->link[k]);
    if (codec->scratch) cuda->memory_free(codec->scratch);
    if (codec->module) cuda->module_unload(codec->module);
}

static int make_kernels(ck_codec *codec, const void *image, const char **call) {
    const ck_cuda *cuda = codec->cuda;
    int error = ck_load_kernels(cuda, &codec->module, image, call);
    if (error) return error;
    TRY(cuda->module_function(&codec->crc_many, codec->module, "ckptpipe_crc_many"), "cuModuleGetFunction");
    TRY(cuda->module_function(&codec->sample, codec->module, "ckptpipe_sample_bytes"), "cuModuleGetFunction");
    TRY(cuda->module_function(&codec->split, codec->module, "ckptpipe_split_planes"), "cuModuleGetFunction");
    TRY(cuda->module_function(&codec->merge, codec->module, "ckptpipe_merge_planes"), "cuModuleGetFunction");
    TRY(cuda->module_function(&codec->copy_pieces, codec->module, "ckptpipe_copy_pieces"), "cuModuleGetFunction");
    TRY(cuda->module_function(&codec->copy_table, codec->module, "ckptpipe_copy_table"), "cuModuleGetFunction");
    return 0;
}

static void *find_entry(const ck_cuda *cuda, const char *entry, int version) {
    void *address = NULL;
    int status = 0;
    return cuda->find(entry, &address, version, 0, &status) == CU_OK && status == 0 ? address : NULL;
}

static int find_entries(ck_codec *codec, const char **call) {
    *(void **)&codec->stream_urgent = find_entry(codec->cuda, "cuStreamCreateWithPriority", 5050);
    *(void **)&codec->batch_decompress = find_entry(codec->cuda, "cuMemBatchDecompressAsync", 12060);
    *(void **)&codec->pointer_attribute = find_entry(codec->cuda, "cuPointerGetAttribute", 4000);
    *call = "cuGetProcAddress(cuStreamCreateWithPriority)";
    return codec->stream_urgent == NULL ? CU_NOT_FOUND : 0;
}

static int make_lane(ck_codec *codec, ck_lane *lane, cu_address memory, const char **call) {
    const ck_cuda *cuda = codec->cuda;
    const unsigned flags = CU_EVENT_BLOCKS | CU_EVENT_NO_TIMING;
    const size_t tables = ck_lane_tables(codec->lane_bytes), fixed = ck_round(CK_SUM_BYTES, 256) + tables;
    lane->codec = codec;
    lane->table_room = tables;
    lane->sums = memory;
    lane->device = memory + ck_round(CK_SUM_BYTES, 256);
    lane->arena = memory + fixed;
    lane->arena_room = codec->lane_bytes > fixed ? codec->lane_bytes - fixed : 0;
    TRY(cuda->stream_create(&lane->stream, CU_STREAM_IS_NON_BLOCKING), "cuStreamCreate");
    TRY(codec->stream_urgent(&lane->urgent, CU_STREAM_IS_NON_BLOCKING, URGENT), "cuStreamCreateWithPriority");
    TRY(cuda->event_create(&lane->mark, flags), "cuEventCreate");
    TRY(cuda->event_create(&lane->before, flags), "cuEventCreate");
    TRY(cuda->event_create(&lane->packed, flags), "cuEventCreate");
    for (int k = 0; k < CK_BATCH; k++) TRY(cuda->event_create(&lane->copied[k], flags), "cuEventCreate");
    TRY(cuda->host_allocate((void **)&lane->host, tables, CU_HOST_PORTABLE | CU_HOST_DEVICEMAP), "cuMemHostAlloc");
    TRY(cuda->host_address(&lane->seen, lane->host, 0), "cuMemHostGetDevicePointer");
    TRY(cuda->memory_fill(lane->sums, 0, CK_SUM_BYTES, lane->stream), "cuMemsetD8Async");
    return 0;
}

static int make_threads(ck_codec *codec, const char **call) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    sigset_t all, before;
    sigfillset(&all); /* signals belong to the interpreter's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = 0;
    *call = "pthread_create";
    for (int i = 0; i < codec->lanes && error == 0; i++) {
        pthread_mutex_lock(&codec->mutex);
        codec->alive++;
        pthread_mutex_unlock(&codec->mutex);
        error = pthread_create(&codec->lane[i].thread, &attributes, ck_lane_run, &codec->lane[i]);
        if (error == 0) {
            codec->lane[i].started = 1;
            pthread_setname_np(codec->lane[i].thread, "ckpt-codec");
        } /* else no lane will be the last: what was made is released by the caller */
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (error) {
        ck_codec_stop(codec);
        ck_codec_join(codec);
    }
    return -error;
}

/* On the caller's thread, with the context current. */
static int make_all(ck_codec *codec, const ck_codec_options *options, const char **call) {
    const ck_cuda *cuda = codec->cuda;
    int error = make_kernels(codec, options->image, call);
    if (error) return error;
    error = find_entries(codec, call);
    if (error) return error;
    TRY(cuda->memory_allocate(&codec->scratch, codec->scratch_bytes), "cuMemAlloc");
    uint64_t capable = 0;
    codec->engine_memory =
        codec->pointer_attribute != NULL && codec->batch_decompress != NULL &&
        codec->pointer_attribute(&capable, CU_POINTER_DECOMPRESS_CAPABLE, codec->scratch) == CU_OK && capable != 0;
    if (!codec->engine_memory) codec->engine_mask = 0;
    for (int k = 0; k < codec->links; k++)
        TRY(cuda->stream_create(&codec->link[k], CU_STREAM_IS_NON_BLOCKING), "cuStreamCreate");
    for (int i = 0; i < codec->lanes && error == 0; i++)
        error = make_lane(codec, &codec->lane[i], codec->scratch + codec->lane_bytes * (uint64_t)i, call);
    return error ? error : make_threads(codec, call);
}

int ck_codec_open(ck_codec **result, const ck_codec_options *options, const char **call) {
    ck_codec *codec = calloc(1, sizeof *codec);
    *call = "calloc";
    if (codec == NULL) return -ENOMEM;
    codec->cuda = options->cuda;
    codec->nvcomp = options->nvcomp;
    codec->context = options->context;
    codec->borrowed = options->stream;
    codec->scratch_bytes = options->scratch_bytes;
    codec->chunk_bytes = options->chunk_bytes;
    codec->lanes = options->lanes;
    codec->links = options->links;
    codec->lane_bytes = options->scratch_bytes / (uint64_t)options->lanes / 4096 * 4096;
    codec->engine_mask = options->engine_mask;
    codec->engine_longest = options->engine_longest;
    codec->engine_forced = options->engine_forced;
    codec->enough = (int)(ENOUGH_BYTES / options->chunk_bytes);
    if (codec->enough > CK_BATCH / 2) codec->enough = CK_BATCH / 2;
    codec->together = (int)(TOLD_BYTES / options->chunk_bytes);
    if (codec->together > TOLD_MOST) codec->together = TOLD_MOST;
    codec->eventfd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&codec->mutex, NULL);
    pthread_mutex_init(&codec->link_mutex, NULL);
    pthread_cond_init(&codec->work, NULL);
    pthread_cond_init(&codec->more, &monotonic);
    pthread_condattr_destroy(&monotonic);
    int error = 0;
    if (codec->eventfd < 0) {
        error = -errno;
        *call = "eventfd";
    }
    if (error == 0) {
        *call = "cuCtxPushCurrent";
        error = codec->cuda->context_push(codec->context);
        if (error == 0) {
            error = make_all(codec, options, call);
            if (error) ck_codec_release(codec);
            cu_context popped;
            codec->cuda->context_pop(&popped);
        }
    }
    if (error) {
        ck_codec_free(codec);
        return error;
    }
    *result = codec;
    return 0;
}

int ck_codec_eventfd(const ck_codec *codec) { return codec->eventfd; }
uint64_t ck_codec_lane_bytes(const ck_codec *codec) { return codec->lane_bytes; }
int ck_codec_engine_memory(const ck_codec *codec) { return codec->engine_memory; }

void ck_codec_join(ck_codec *codec) {
    for (int i = 0; i < codec->lanes; i++) {
        if (codec->lane[i].started) pthread_join(codec->lane[i].thread, NULL);
        codec->lane[i].started = 0;
    }
}

void ck_codec_free(ck_codec *codec) {
    if (codec->eventfd >= 0) close(codec->eventfd);
    pthread_cond_destroy(&codec->work);
    pthread_cond_destroy(&codec->more);
    pthread_mutex_destroy(&codec->link_mutex);
    pthread_mutex_destroy(&codec->mutex);
    free(codec);
}

void ck_codec_abandon(ck_codec *codec) { close(codec->eventfd); }
