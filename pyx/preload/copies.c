#define _GNU_SOURCE
#include "copies.h"

#include "next.h"
#include "ring.h"
#include "rotation.h"
#include "stores.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#define PAGE 4096u
#define STEP_BYTES (64u << 10) /* where workers have to be woken, one after another */
#define FETCH_BYTES 4096u      /* fetched between two looks whether there is something better to do */
#define COMPARE_BYTES (64u << 10)

static struct {
    struct ckpt_copies_options options;
    pthread_mutex_t turn; /* of writers, and of those who drain */
    pthread_t writer;     /* whose copies `rotation` has */
    struct ckpt_rotation rotation;
    uint64_t deferred;
} copies = {.turn = PTHREAD_MUTEX_INITIALIZER};
_Atomic int ckpt_copies_learning;

void ckpt_copies_start(const struct ckpt_copies_options *options, const cpu_set_t *cpus) {
    unsigned threads = ckpt_ring_threads() - 1;
    if (options->defer) ckpt_deferred_start(threads, cpus);
    ckpt_copies_set(options, 0);
}

void ckpt_copies_set(const struct ckpt_copies_options *options, unsigned threads) {
    pthread_mutex_lock(&copies.turn);
    copies.options = *options;
    unsigned most = CKPT_DEFERRED_MOST - 1;
    unsigned defer = ckpt_deferred_threads() ? options->defer : 0;
    if (defer > most) defer = most;
    ckpt_rotation_restart(&copies.rotation);
    copies.rotation.wanted = defer ? defer + 1 : 0; /* what lies between two calls belongs to neither of them */
    ckpt_deferred_set(&(struct ckpt_deferred_options){threads, options->shares, options->store_awake_us});
    pthread_mutex_unlock(&copies.turn);
}

/* ---- shared out, complete at the return ---- */

struct ends {
    unsigned char *to;
    const unsigned char *from;
    const unsigned char *next; /* what is to be fetched for the next copies, NULL for nothing */
    size_t piece_bytes, next_bytes; /* of each of them, of all */
};

/* The lane's part of each of the next copies, one after another. */
static void fetch_next(const struct ckpt_later *later) {
    const unsigned char *next = later->from, *end = next + later->room;
    for (; next < end; next += later->stride)
        for (size_t done = 0; done < later->bytes && next + done < end; done += FETCH_BYTES) {
            size_t left = later->bytes - done, room = (size_t)(end - next) - done;
            if (left > room) left = room;
            if (ckpt_ring_wanted(later)) return;
            ckpt_stores_fetch(next + done, left < FETCH_BYTES ? left : FETCH_BYTES, copies.options.fetch_level);
        }
}

static void note_next(const struct ends *ends, size_t start, size_t bytes, struct ckpt_later *later) {
    if (!later || !ends->next || start >= ends->next_bytes) return;
    if (later->call) {
        later->bytes += bytes; /* a lane of several steps */
        return;
    }
    later->from = ends->next + start;
    later->bytes = bytes;
    later->stride = ends->piece_bytes;
    later->room = ends->next_bytes - start;
    later->call = fetch_next;
}

static void stream_step(void *context, size_t start, size_t bytes, struct ckpt_later *later) {
    const struct ends *ends = context;
    ckpt_stores_stream(ends->to + start, ends->from + start, bytes);
    note_next(ends, start, bytes, later);
}

static void keep_step(void *context, size_t start, size_t bytes, struct ckpt_later *later) {
    const struct ends *ends = context;
    ckpt_stores_keep(ends->to + start, ends->from + start, bytes);
    note_next(ends, start, bytes, later);
}

static unsigned manner(void) { return copies.options.aside ? CKPT_RING_ASIDE : CKPT_RING_PLAIN; }

/* A lane has as many steps as were asked for, unless workers are to be woken: those that come first do more then. */
static size_t step_bytes(size_t bytes) {
    unsigned steps = ckpt_ring_lanes(manner()) * (copies.options.lane_steps ? copies.options.lane_steps : 1);
    if (ckpt_ring_asleep() || bytes > 64 * STEP_BYTES) return STEP_BYTES;
    return ((bytes + steps - 1) / steps + PAGE - 1) / PAGE * PAGE;
}

static void run(ckpt_step *step, struct ends *ends, size_t bytes) {
    ckpt_ring_run(step, ends, bytes, step_bytes(bytes), 0, manner());
}

void ckpt_copies_read(void *to, const void *from, size_t bytes, size_t ahead) {
    struct ends ends = {to, from, NULL, bytes, 0};
    if (bytes < CKPT_COPIES_BYTES) {
        ckpt_next.memcpy(to, from, bytes);
        return;
    }
    if (copies.options.read_ahead && ahead) {
        size_t most = copies.options.read_ahead * bytes;
        ends.next = (const unsigned char *)from + bytes;
        ends.next_bytes = ahead < most ? ahead : most;
    }
    run(copies.options.read_streams ? stream_step : keep_step, &ends, bytes);
}

static void write_now(void *to, const void *from, size_t bytes, const struct ckpt_stored *stored) {
    struct ends ends = {to, from, NULL, bytes, 0};
    if (bytes < CKPT_COPIES_BYTES)
        ckpt_next.memcpy(to, from, bytes);
    else
        run(stream_step, &ends, bytes);
    stored->call(stored);
}

/* ---- deferred ---- */

struct compared {
    const unsigned char *a, *b;
    _Atomic int differs;
};

static void compare_step(void *context, size_t start, size_t bytes, struct ckpt_later *later) {
    struct compared *compared = context;
    (void)later;
    if (!atomic_load_explicit(&compared->differs, memory_order_relaxed) &&
        memcmp(compared->a + start, compared->b + start, bytes) != 0)
        atomic_store(&compared->differs, 1);
}

static int same(const void *a, const void *b, size_t bytes) {
    struct compared compared = {a, b, 0};
    ckpt_ring_run(compare_step, &compared, bytes, COMPARE_BYTES, 0, CKPT_RING_PLAIN);
    return !atomic_load(&compared.differs);
}

static void begin_anew(void) {
    ckpt_deferred_drain();
    ckpt_rotation_restart(&copies.rotation);
    atomic_store(&ckpt_copies_learning, 0);
}

int ckpt_copies_write(void *to, const void *from, size_t bytes, int usual, int last,
                      const struct ckpt_stored *stored) {
    pthread_mutex_lock(&copies.turn);
    pthread_t self = pthread_self();
    if (atomic_load(&ckpt_copies_learning) && (!usual || !bytes || !pthread_equal(self, copies.writer))) begin_anew();
    if (ckpt_deferred_torn()) copies.rotation.refused = 1;
    int deferred = 0;
    if (usual && bytes && copies.rotation.wanted && !copies.rotation.refused) {
        copies.writer = self;
        atomic_store(&ckpt_copies_learning, 1);
        deferred = ckpt_rotation_next(&copies.rotation, to, from, bytes, same);
    }
    if (deferred) {
        copies.deferred++;
        ckpt_deferred_post(to, from, bytes, stored);
        ckpt_deferred_wait(last ? 0 : copies.rotation.depth - 1);
    } else {
        ckpt_deferred_drain(); /* something, if this is not the piece that was expected */
        write_now(to, from, bytes, stored);
    }
    if (last) begin_anew();
    pthread_mutex_unlock(&copies.turn);
    return deferred;
}

void ckpt_copies_drain(void) {
    if (!atomic_load(&ckpt_copies_learning)) return;
    pthread_mutex_lock(&copies.turn);
    begin_anew();
    pthread_mutex_unlock(&copies.turn);
}

void ckpt_copies_count(struct ckpt_copies_counts *counts) {
    pthread_mutex_lock(&copies.turn);
    *counts = (struct ckpt_copies_counts){copies.deferred, copies.rotation.restarts, copies.rotation.most_buffers,
                                          copies.rotation.most_proven, copies.rotation.refused};
    pthread_mutex_unlock(&copies.turn);
}

void ckpt_copies_forget(void) {
    pthread_mutex_init(&copies.turn, NULL);
    memset(&copies.rotation, 0, sizeof copies.rotation);
    atomic_store(&ckpt_copies_learning, 0);
    ckpt_deferred_forget();
}
