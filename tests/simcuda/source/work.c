/* What a stream's thread does with one piece of work, and the link that copies cross. */
#define _GNU_SOURCE
#include "sim.h"

#include <errno.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

/* Waits as long as `bytes` take on that GPU's link, behind what others sent. Bytes move after it: a buffer that
 * is read too early, or changed too early, shows. */
CUresult link_pass(int index, int direction, uint64_t bytes) {
    World *world = sim.world;
    Gpu *gpu = &world->gpu[index];
    uint64_t end = 0;
    int64_t used = 0;
    while (!sim.stopping) {
        uint32_t epoch = atomic_load(&world->link_epoch);
        int64_t rate = atomic_load(&gpu->rate[direction]);
        if (rate == 0) {
            atomic_fetch_add(&gpu->moved[direction], bytes);
            return CUDA_SUCCESS;
        }
        uint64_t now = monotonic_ns();
        if (rate > 0 && rate != used) { /* first time, or the rate was changed on the way */
            world_lock(world);
            uint64_t start = gpu->busy_until[direction] > now && !used ? gpu->busy_until[direction] : now;
            end = start + (uint64_t)((double)bytes / (double)rate * 1e9);
            gpu->busy_until[direction] = end;
            world_unlock(world);
            used = rate;
        }
        if (rate > 0 && now >= end) {
            atomic_fetch_add(&gpu->moved[direction], bytes);
            return CUDA_SUCCESS;
        }
        uint64_t wait = rate > 0 && end - now < WAIT_NS ? end - now : WAIT_NS;
        futex_wait(&world->link_epoch, epoch, wait);
    }
    return CUDA_ERROR_DEINITIALIZED;
}

/* Through the kernel, so that host memory that went away is an error and no crash. */
static CUresult host_move(unsigned char *device, uint64_t host, uint64_t bytes, int to_host) {
    while (bytes) {
        struct iovec local = {device, bytes}, remote = {(void *)host, bytes};
        ssize_t moved = to_host ? process_vm_writev(getpid(), &local, 1, &remote, 1, 0)
                                : process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
        if (moved < 0 && (errno == EPERM || errno == ENOSYS)) { /* a container forbids it */
            memcpy(to_host ? (void *)host : device, to_host ? device : (void *)host, bytes);
            return CUDA_SUCCESS;
        }
        if (moved <= 0) return CUDA_ERROR_ILLEGAL_ADDRESS;
        device += moved;
        host += (uint64_t)moved;
        bytes -= (uint64_t)moved;
    }
    return CUDA_SUCCESS;
}

static CUresult copy(const Work *work) {
    int from_device = memory_is_device(work->source), to_device = memory_is_device(work->destination), gpu;
    uint64_t source = work->source, destination = work->destination, left = work->bytes, run = left;
    if (!from_device && !to_device) {
        memmove((void *)destination, (void *)source, left);
        return CUDA_SUCCESS;
    }
    if (from_device != to_device) {
        if (!memory_bytes(from_device ? source : destination, left, &run, &gpu)) return CUDA_ERROR_ILLEGAL_ADDRESS;
        CUresult result = link_pass(gpu, from_device ? DEVICE_TO_HOST : HOST_TO_DEVICE, left);
        if (result != CUDA_SUCCESS) return result;
    }
    while (left) {
        unsigned char *from = NULL, *to = NULL;
        run = left;
        if (from_device && !(from = memory_bytes(source, run, &run, &gpu))) return CUDA_ERROR_ILLEGAL_ADDRESS;
        if (to_device && !(to = memory_bytes(destination, run, &run, &gpu))) return CUDA_ERROR_ILLEGAL_ADDRESS;
        CUresult result = CUDA_SUCCESS;
        if (from && to) memmove(to, from, run);
        else result = host_move(from ? from : to, from ? destination : source, run, from != NULL);
        if (result != CUDA_SUCCESS) return result;
        source += run;
        destination += run;
        left -= run;
    }
    return CUDA_SUCCESS;
}

static CUresult set(const Work *work) {
    uint64_t at = work->destination, left = work->bytes * (uint64_t)work->width, run;
    int gpu;
    while (left) {
        unsigned char *to = memory_bytes(at, left, &run, &gpu);
        if (!to) return CUDA_ERROR_ILLEGAL_ADDRESS;
        if (work->width == 1) memset(to, (int)work->value, run);
        else
            for (uint64_t i = 0; i < run; i += (uint64_t)work->width) memcpy(to + i, &work->value, (size_t)work->width);
        at += run;
        left -= run;
    }
    return CUDA_SUCCESS;
}

/* What a kernel, a library's work or the decompression engine met on the GPU is the whole context's from then on. */
static CUresult on_gpu(Stream *stream, CUresult result) {
    if (result != CUDA_SUCCESS && !stream->context->error) stream->context->error = result;
    return result;
}

static CUresult ordered_fault(Stream *stream, const Work *work) {
    if (work->fault < 0) return CUDA_SUCCESS;
    CUresult error = fault_act(sim.world, work->fault, sim.pid, 0);
    if (error != CUDA_SUCCESS && work->scope == SCOPE_CONTEXT) stream->context->error = error;
    return error;
}

CUresult work_run(Stream *stream, Work *work) {
    CUresult chunk = CUDA_SUCCESS, result = CUDA_SUCCESS, failed;
    sim_worker_ordinal = stream->context->ordinal;
    if (work->scope == SCOPE_CHUNK && work->kind == WORK_LIBRARY) {
        chunk = work->fault < 0 ? CUDA_SUCCESS : fault_act(sim.world, work->fault, sim.pid, 0);
        work->fault = -1;
    }
    failed = ordered_fault(stream, work);
    if (!failed) failed = stream->error;
    switch (work->kind) {
    case WORK_RECORD:
        pthread_mutex_lock(&sim.mutex);
        if (work->event->done < work->generation) {
            work->event->done = work->generation;
            work->event->time = monotonic_ns();
            work->event->error = failed;
        }
        pthread_mutex_unlock(&sim.mutex);
        return failed;
    case WORK_WAIT_EVENT:
        pthread_mutex_lock(&sim.mutex);
        while (work->event->done < work->generation && !sim.stopping) process_wait();
        result = work->event->error;
        pthread_mutex_unlock(&sim.mutex);
        return failed ? failed : result;
    case WORK_WAIT_STREAM:
        pthread_mutex_lock(&sim.mutex);
        while (work->other->completed < work->generation && !sim.stopping) process_wait();
        pthread_mutex_unlock(&sim.mutex);
        return failed;
    case WORK_CALLBACK: /* told of an error, where a host function is not called any more */
        work->callback(stream, failed, work->user_data);
        return failed;
    }
    if (failed || sim.stopping) return failed ? failed : CUDA_ERROR_DEINITIALIZED;
    switch (work->kind) {
    case WORK_COPY: return copy(work);
    case WORK_SET: return set(work);
    case WORK_HOST: work->function(work->user_data); return CUDA_SUCCESS;
    case WORK_KERNEL: return on_gpu(stream, work->kernel->run(work->launch));
    case WORK_LIBRARY: return on_gpu(stream, work->run(work->memory, chunk));
    case WORK_DECOMPRESS: return on_gpu(stream, decompress_run(work->memory));
    case WORK_FREE: memory_free(work->destination); return CUDA_SUCCESS;
    }
    return CUDA_ERROR_UNKNOWN;
}
