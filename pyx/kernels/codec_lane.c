#include "codec_lane.h"

#include <errno.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LINGER_NS 200000 /* how long the first of few jobs waits for more */

void ck_codec_tell(ck_codec *codec) {
    uint64_t one = 1;
    ssize_t written;
    do {
        written = write(codec->eventfd, &one, sizeof one);
    } while (written < 0 && errno == EINTR);
}

int ck_lane_failed(ck_lane *lane, cu_result result, const char *call) {
    if (result == CU_OK) return 0;
    if (lane->failure == CK_FAIL_NONE) {
        lane->failure = CK_FAIL_DRIVER;
        lane->error = result;
        lane->call = call;
    }
    return 1;
}

int ck_lane_refused(ck_lane *lane, nv_status status, int format, const char *call) {
    if (status == NV_SUCCESS) return 0;
    if (lane->failure == CK_FAIL_NONE) {
        lane->failure = CK_FAIL_NVCOMP;
        lane->format = format;
        lane->error = status;
        lane->call = call;
    }
    return 1;
}

void ck_lane_begin(ck_lane *lane) { lane->table_used = lane->table_kept; }
void ck_lane_keep(ck_lane *lane) { lane->table_kept = lane->table_used; }

void *ck_lane_table(ck_lane *lane, size_t bytes, cu_address *device) {
    void *host = lane->host + lane->table_used;
    *device = lane->device + lane->table_used;
    lane->table_used += ck_round(bytes, 256);
    return host;
}

cu_address ck_lane_take(ck_lane *lane, size_t bytes) {
    cu_address taken = lane->arena + lane->arena_used;
    lane->arena_used += ck_round(bytes, 256);
    return taken;
}

int ck_lane_launch(ck_lane *lane, cu_function kernel, unsigned first, unsigned second, void **arguments) {
    return !ck_lane_failed(lane, lane->codec->cuda->launch(kernel, first, second, 1, CK_CODEC_THREADS, 1, 1, 0,
                                                           lane->stream, arguments, NULL),
                           "cuLaunchKernel");
}

static int copy_table(ck_lane *lane, cu_address from, cu_address to, size_t bytes) {
    uint64_t granules = (bytes + 15) / 16; /* a table's room is a multiple of 256 */
    void *arguments[] = {&from, &to, &granules};
    const unsigned blocks = (unsigned)((granules + CK_CODEC_THREADS - 1) / CK_CODEC_THREADS);
    return bytes == 0 || ck_lane_launch(lane, lane->codec->copy_table, blocks, 1, arguments);
}

int ck_lane_upload(ck_lane *lane) {
    const size_t at = lane->table_kept;
    return copy_table(lane, lane->seen + at, lane->device + at, lane->table_used - at);
}

int ck_lane_download(ck_lane *lane, const void *table, size_t bytes) {
    const size_t at = (size_t)((const unsigned char *)table - lane->host);
    return copy_table(lane, lane->device + at, lane->seen + at, bytes);
}

int ck_lane_sums(ck_lane *lane, cu_address ranges, cu_address results, unsigned count) {
    void *arguments[] = {&ranges, &lane->sums, &results};
    return count == 0 || ck_lane_launch(lane, lane->codec->crc_many, CK_MANY_BLOCKS, count, arguments);
}

int ck_lane_pieces(ck_lane *lane, cu_address pieces, size_t count, uint64_t longest) {
    void *arguments[] = {&pieces};
    return count == 0 || ck_lane_launch(lane, lane->codec->copy_pieces, (unsigned)count,
                                        (unsigned)((longest + CK_PIECE_PART - 1) / CK_PIECE_PART), arguments);
}

int ck_lane_planes(ck_lane *lane, cu_function kernel, cu_address jobs, unsigned count) {
    void *arguments[] = {&jobs};
    return count == 0 || ck_lane_launch(lane, kernel, CK_PLANE_BLOCKS, count, arguments);
}

int ck_lane_wait(ck_lane *lane) {
    const ck_cuda *cuda = lane->codec->cuda;
    if (ck_lane_failed(lane, cuda->event_record(lane->mark, lane->stream), "cuEventRecord")) return 0;
    return !ck_lane_failed(lane, cuda->event_synchronize(lane->mark), "cuEventSynchronize");
}

/* The jobs' memory is the loop's again: it must not be looked at afterwards. */
void ck_lane_finish_all(ck_lane *lane, ck_codec_job **jobs, int count) {
    ck_codec *codec = lane->codec;
    if (count == 0) return;
    pthread_mutex_lock(&codec->mutex);
    const int first = codec->done_first == NULL;
    for (int i = 0; i < count; i++) {
        jobs[i]->next = NULL;
        if (codec->done_first == NULL)
            codec->done_first = jobs[i];
        else
            codec->done_last->next = jobs[i];
        codec->done_last = jobs[i];
        jobs[i] = NULL;
    }
    codec->running -= count;
    pthread_mutex_unlock(&codec->mutex);
    if (first) ck_codec_tell(codec);
}

void ck_lane_finish(ck_lane *lane, ck_codec_job *job) { ck_lane_finish_all(lane, &job, 1); }

void ck_lane_give_back(ck_lane *lane, ck_codec_job **jobs, int fits, int count) {
    ck_codec *codec = lane->codec;
    ck_plan *plan = (ck_plan *)jobs[0]->plan;
    pthread_mutex_lock(&codec->mutex);
    if (fits < count)
        plan->fits = fits;
    else if (fits == plan->fits)
        plan->fits++; /* perhaps more do now */
    for (int i = count - 1; i >= fits; i--) {
        if (codec->first == NULL) codec->last = jobs[i];
        jobs[i]->next = codec->first;
        codec->first = jobs[i];
        jobs[i] = NULL;
    }
    codec->waiting += count - fits;
    codec->running -= count - fits;
    if (fits < count) pthread_cond_signal(codec->lingering ? &codec->more : &codec->work);
    pthread_mutex_unlock(&codec->mutex);
}

static ck_codec_job *take_first(ck_codec *codec) {
    ck_codec_job *job = codec->first;
    codec->first = job->next;
    codec->waiting--;
    codec->running++;
    return job;
}

/* Jobs that are worth the launches of a batch: any while nothing runs, else ever more until there are enough. */
static int worth(const ck_codec *codec) {
    const ck_plan *plan = codec->first->plan; /* nobody takes it but who asks */
    int most = codec->enough;
    if (plan != NULL && plan->fits && plan->fits < most) most = plan->fits;
    return 3 * codec->running < most ? 3 * codec->running : most;
}

/* Under the mutex: waits a moment for so many jobs. */
static void linger(ck_codec *codec) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += LINGER_NS;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    codec->lingering = 1;
    while (codec->waiting < worth(codec) && !codec->stop)
        if (pthread_cond_timedwait(&codec->more, &codec->mutex, &until) != 0) break;
    codec->lingering = 0;
}

/* Jobs of one kind and plan, not more than this lane's share of all there are. 0: the end. */
static int next_batch(ck_codec *codec, ck_codec_job **jobs) {
    pthread_mutex_lock(&codec->mutex);
    for (;;) {
        if (codec->first == NULL && codec->stop) {
            pthread_cond_broadcast(&codec->work);
            pthread_mutex_unlock(&codec->mutex);
            return 0;
        }
        if (codec->first != NULL && !codec->lingering) break;
        pthread_cond_wait(&codec->work, &codec->mutex);
    }
    if (codec->waiting < worth(codec) && !codec->stop) linger(codec);
    int most = (codec->waiting + codec->running + codec->lanes - 1) / codec->lanes, count = 0;
    if (most < worth(codec)) most = worth(codec);
    if (most > CK_BATCH) most = CK_BATCH;
    const ck_plan *plan = codec->first->plan;
    if (plan != NULL && plan->fits && most > plan->fits) most = plan->fits;
    while (count < most && codec->first != NULL) {
        const ck_codec_job *next = codec->first;
        if (count && (next->kind != jobs[0]->kind || next->plan != jobs[0]->plan)) break;
        jobs[count++] = take_first(codec);
    }
    codec->batches++;
    if (codec->first != NULL || codec->stop) pthread_cond_signal(&codec->work);
    pthread_mutex_unlock(&codec->mutex);
    return count;
}

/* Whatever the caller's stream still does to the memory comes first. */
static void follow_borrowed(ck_lane *lane) {
    const ck_cuda *cuda = lane->codec->cuda;
    if (lane->codec->borrowed == NULL) return;
    if (ck_lane_failed(lane, cuda->event_record(lane->before, lane->codec->borrowed), "cuEventRecord")) return;
    ck_lane_failed(lane, cuda->stream_wait(lane->stream, lane->before, 0), "cuStreamWaitEvent");
}

static void run_batch(ck_lane *lane, ck_codec_job **jobs, int count) {
    const ck_cuda *cuda = lane->codec->cuda;
    int left = 0;
    for (int i = 0; i < count; i++) {
        if (__atomic_load_n(&jobs[i]->cancelled, __ATOMIC_RELAXED))
            ck_lane_finish(lane, jobs[i]);
        else
            jobs[left++] = jobs[i];
    }
    if (left == 0) return;
    lane->failure = CK_FAIL_NONE;
    lane->table_kept = 0;
    follow_borrowed(lane);
    if (lane->failure == CK_FAIL_NONE) {
        if (jobs[0]->kind == CK_JOB_ENCODE)
            ck_encode(lane, jobs, left);
        else
            ck_decode(lane, jobs, left);
    }
    if (lane->failure == CK_FAIL_NONE) return;
    /* An error does not prove that nothing was enqueued, and memory that the GPU may still write to must not be
       given back: the streams are waited for. The jobs that are not finished are those that are left. */
    cuda->stream_synchronize(lane->stream);
    cuda->stream_synchronize(lane->urgent);
    for (int k = 0; k < lane->codec->links; k++) cuda->stream_synchronize(lane->codec->link[k]);
    for (int i = 0; i < left; i++) {
        if (jobs[i] == NULL) continue;
        jobs[i]->failure = lane->failure;
        jobs[i]->format = lane->format;
        jobs[i]->error = lane->error;
        jobs[i]->call = lane->call;
        ck_lane_finish(lane, jobs[i]);
    }
}

void *ck_lane_run(void *argument) {
    ck_lane *lane = argument;
    ck_codec *codec = lane->codec;
    ck_codec_job *jobs[CK_BATCH];
    codec->cuda->context_set(codec->context);
    for (int count; (count = next_batch(codec, jobs)) > 0;) run_batch(lane, jobs, count);
    pthread_mutex_lock(&codec->mutex);
    const int last = --codec->alive == 0;
    pthread_mutex_unlock(&codec->mutex);
    if (last) ck_codec_release(codec);
    codec->cuda->context_set(NULL);
    if (last) {
        pthread_mutex_lock(&codec->mutex);
        codec->ended = 1;
        pthread_mutex_unlock(&codec->mutex);
        ck_codec_tell(codec);
    }
    return NULL;
}

void ck_codec_submit(ck_codec *codec, ck_codec_job *job) {
    pthread_mutex_lock(&codec->mutex);
    job->next = NULL;
    if (codec->first == NULL)
        codec->first = job;
    else
        codec->last->next = job;
    codec->last = job;
    codec->waiting++;
    if (!codec->lingering)
        pthread_cond_signal(&codec->work);
    else if (codec->waiting >= worth(codec))
        pthread_cond_signal(&codec->more);
    pthread_mutex_unlock(&codec->mutex);
}

ck_codec_job *ck_codec_reap(ck_codec *codec) {
    uint64_t count;
    ssize_t got;
    do {
        got = read(codec->eventfd, &count, sizeof count);
    } while (got < 0 && errno == EINTR);
    pthread_mutex_lock(&codec->mutex);
    ck_codec_job *done = codec->done_first;
    codec->done_first = NULL;
    pthread_mutex_unlock(&codec->mutex);
    return done;
}

int ck_codec_running(ck_codec *codec) {
    pthread_mutex_lock(&codec->mutex);
    const int running = codec->running;
    pthread_mutex_unlock(&codec->mutex);
    return running;
}

uint64_t ck_codec_batches(ck_codec *codec) {
    pthread_mutex_lock(&codec->mutex);
    const uint64_t batches = codec->batches;
    pthread_mutex_unlock(&codec->mutex);
    return batches;
}

void ck_codec_stop(ck_codec *codec) {
    pthread_mutex_lock(&codec->mutex);
    codec->stop = 1;
    pthread_cond_broadcast(&codec->work);
    pthread_cond_broadcast(&codec->more);
    pthread_mutex_unlock(&codec->mutex);
}

int ck_codec_ended(ck_codec *codec) {
    pthread_mutex_lock(&codec->mutex);
    const int ended = codec->ended;
    pthread_mutex_unlock(&codec->mutex);
    return ended;
}
