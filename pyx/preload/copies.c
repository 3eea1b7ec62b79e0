#define _GNU_SOURCE
#include "copies.h"

#include "futex.h"
#include "next.h"
#include "probes.h"
#include "ring.h"
#include "stores.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#define PAGE 4096u
#define STEP_BYTES (64u << 10) /* where workers have to be woken, one after another */
#define FETCH_BYTES 4096u      /* fetched between two looks whether there is something better to do */
#define PATIENCE 2000

/* A write that is stored behind the driver's back. One at a time: the next copy waits for it, whatever it is.
 *
 * Each lane of the work is either copied by its owner into the owner's buffer, and from there into the image after
 * the work is over for the caller; or by somebody else directly. Each takes one from `unstored` behind its fence
 * (release), so that the last of them (acquire) may say that all of it is stored. It says so before it sets
 * `unstored` to 0, which is what `ckpt_copies_drain` waits for. */
static struct {
    struct ckpt_copies_options options;
    unsigned char *buffers; /* of the workers, one after another */
    size_t buffer_bytes;
    unsigned count;
    pthread_mutex_t turn; /* of writers that are stored behind */
    struct ckpt_stored stored;
    _Alignas(128) _Atomic uint32_t unstored; /* futex of those who drain; lanes, and one for the telling */
    _Atomic uint32_t waiting;
} copies = {.turn = PTHREAD_MUTEX_INITIALIZER};

static size_t lane_bytes(size_t bytes) {
    unsigned lanes = ckpt_ring_lanes(copies.options.aside ? CKPT_RING_ASIDE : CKPT_RING_PLAIN);
    return ((bytes + lanes - 1) / lanes + PAGE - 1) / PAGE * PAGE;
}

void ckpt_copies_start(const struct ckpt_copies_options *options, size_t piece_bytes) {
    copies.options = *options;
    unsigned workers = ckpt_ring_threads() - 1;
    if (copies.buffers || options->write != CKPT_WRITE_BEHIND || !workers) return;
    size_t each = lane_bytes(piece_bytes);
    void *made = ckpt_raw_mmap(NULL, each * workers, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) return; /* then nothing is stored behind */
    madvise(made, each * workers, MADV_HUGEPAGE);
    madvise(made, each * workers, MADV_DONTFORK);
    madvise(made, each * workers, MADV_DONTDUMP);
    madvise(made, each * workers, MADV_POPULATE_WRITE);
    copies.buffer_bytes = each;
    copies.count = workers;
    copies.buffers = made;
}

/* ---- stored behind ---- */

static void lane_is_stored(void) {
    if (atomic_fetch_sub_explicit(&copies.unstored, 1, memory_order_acq_rel) != 2) return;
    copies.stored.call(&copies.stored);
    atomic_store(&copies.unstored, 0);
    if (atomic_load(&copies.waiting)) ckpt_futex_wake(&copies.unstored, 64, 0);
}

void ckpt_copies_drain(void) {
    for (unsigned i = 0; i < PATIENCE; i++) {
        if (!atomic_load(&copies.unstored)) return;
        ckpt_pause();
    }
    uint32_t left;
    atomic_fetch_add(&copies.waiting, 1);
    while ((left = atomic_load(&copies.unstored))) ckpt_futex_wait(&copies.unstored, left, 0, 0);
    atomic_fetch_sub(&copies.waiting, 1);
}

static void store_buffer(const struct ckpt_later *later) {
    ckpt_probe_storing(later->worker);
    ckpt_stores_stream(later->to, later->from, later->bytes);
    lane_is_stored();
}

struct ends {
    unsigned char *to;
    const unsigned char *from;
    const unsigned char *next; /* what is to be fetched for the next copy, NULL for nothing */
    size_t next_bytes;
};

static void behind_step(void *context, size_t start, size_t bytes, struct ckpt_later *later) {
    const struct ends *ends = context;
    if (!later || later->worker > copies.count) {
        ckpt_stores_stream(ends->to + start, ends->from + start, bytes);
        lane_is_stored();
        return;
    }
    unsigned char *buffer = copies.buffers + (later->worker - 1) * copies.buffer_bytes;
    ckpt_stores_keep(buffer, ends->from + start, bytes);
    later->to = ends->to + start;
    later->from = buffer;
    later->bytes = bytes;
    later->call = store_buffer;
}

static void write_behind(struct ends *ends, size_t bytes, size_t lane, const struct ckpt_stored *stored) {
    pthread_mutex_lock(&copies.turn);
    ckpt_copies_drain();
    copies.stored = *stored;
    atomic_store(&copies.unstored, (uint32_t)((bytes + lane - 1) / lane) + 1);
    ckpt_ring_run(behind_step, ends, bytes, lane, 0, copies.options.aside ? CKPT_RING_ASIDE : CKPT_RING_PLAIN);
    pthread_mutex_unlock(&copies.turn);
}

/* ---- complete at the return ---- */

static void fetch(const struct ckpt_later *later, void (*each)(const void *, size_t)) {
    const unsigned char *at = later->from;
    for (size_t done = 0; done < later->bytes && !ckpt_ring_wanted(later); done += FETCH_BYTES) {
        size_t left = later->bytes - done;
        each(at + done, left < FETCH_BYTES ? left : FETCH_BYTES);
    }
}

static void fetch_to_read(const struct ckpt_later *later) { fetch(later, ckpt_stores_fetch); }
static void fetch_to_write(const struct ckpt_later *later) { fetch(later, ckpt_stores_own); }

static void note_next(const struct ends *ends, size_t start, size_t bytes, struct ckpt_later *later,
                      void (*call)(const struct ckpt_later *)) {
    if (!later || !ends->next || start >= ends->next_bytes) return;
    if (later->call && (const unsigned char *)later->from + later->bytes == ends->next + start) {
        later->bytes += bytes; /* a lane of several steps */
    } else {
        later->from = ends->next + start;
        later->bytes = bytes;
    }
    size_t end = (size_t)((const unsigned char *)later->from - ends->next) + later->bytes;
    if (end > ends->next_bytes) later->bytes -= end - ends->next_bytes;
    later->call = call;
}

static void stream_step(void *context, size_t start, size_t bytes, struct ckpt_later *later) {
    const struct ends *ends = context;
    ckpt_stores_stream(ends->to + start, ends->from + start, bytes);
    note_next(ends, start, bytes, later, fetch_to_read);
}

static void keep_step(void *context, size_t start, size_t bytes, struct ckpt_later *later) {
    const struct ends *ends = context;
    ckpt_stores_keep(ends->to + start, ends->from + start, bytes);
    note_next(ends, start, bytes, later, fetch_to_read);
}

static void own_step(void *context, size_t start, size_t bytes, struct ckpt_later *later) {
    const struct ends *ends = context;
    ckpt_stores_keep(ends->to + start, ends->from + start, bytes);
    note_next(ends, start, bytes, later, fetch_to_write);
}

static void run(ckpt_step *step, struct ends *ends, size_t bytes) {
    unsigned manner = copies.options.aside ? CKPT_RING_ASIDE : CKPT_RING_PLAIN;
    /* One step a lane, unless workers are to be woken: those that come first do more then. */
    size_t each = ckpt_ring_asleep() || bytes > 64 * STEP_BYTES ? STEP_BYTES : lane_bytes(bytes);
    ckpt_ring_run(step, ends, bytes, each, 0, manner);
}

void ckpt_copies_write(void *to, const void *from, size_t bytes, int usual, size_t room,
                       const struct ckpt_stored *stored) {
    struct ends ends = {to, from, NULL, 0};
    if (bytes >= CKPT_COPIES_BYTES && usual && copies.options.write == CKPT_WRITE_BEHIND && copies.buffers &&
        lane_bytes(bytes) <= copies.buffer_bytes) {
        write_behind(&ends, bytes, lane_bytes(bytes), stored);
        return;
    }
    if (bytes < CKPT_COPIES_BYTES) {
        ckpt_next.memcpy(to, from, bytes);
    } else if (usual && copies.options.write == CKPT_WRITE_OWN) {
        ends.next = (const unsigned char *)to + bytes;
        ends.next_bytes = room < bytes ? room : bytes;
        run(own_step, &ends, bytes);
    } else {
        run(stream_step, &ends, bytes);
    }
    stored->call(stored);
}

void ckpt_copies_read(void *to, const void *from, size_t bytes, size_t ahead) {
    struct ends ends = {to, from, NULL, 0};
    if (bytes < CKPT_COPIES_BYTES) {
        ckpt_next.memcpy(to, from, bytes);
        return;
    }
    if (copies.options.read_ahead && ahead) {
        ends.next = (const unsigned char *)from + bytes;
        ends.next_bytes = ahead < bytes ? ahead : bytes;
    }
    run(copies.options.read_streams ? stream_step : keep_step, &ends, bytes);
}

void ckpt_copies_forget(void) {
    pthread_mutex_init(&copies.turn, NULL);
    copies.buffers = NULL; /* it did not come along */
    copies.buffer_bytes = copies.count = 0;
    atomic_store(&copies.unstored, 0);
    atomic_store(&copies.waiting, 0);
}
