#define _GNU_SOURCE
#include "deferred.h"

#include "futex.h"
#include "probes.h"
#include "samples.h"
#include "stores.h"

#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/prctl.h>

#define STACK_BYTES (256u << 10)
#define THREADS 256
#define SLOTS CKPT_DEFERRED_MOST
#define AWAKE 1       /* threads that wait awake at a time: one is there when a piece comes, the others leave the CPUs alone */
#define PATIENCE 2000 /* turns that somebody waits awake for a share: it takes some ten microseconds */
#define TURNS 32      /* between two looks at the clock */
#define LINE 128      /* bytes that processors move together */

/* A piece. Its fields are written before `posted` is raised (release), and read by who took one of its tickets, which
 * exist from then on (acquire) until `left` is 0. Every share's stores are fenced before it is taken from `left`
 * (release), so that the last (acquire) may tell that all of it is stored. It tells before it sets `left` to 0, which
 * is what everybody waits for who wants the piece stored, and its slot again. */
struct slot {
    _Alignas(LINE) _Atomic uint32_t left; /* futex of who waits for it: shares, and one for the telling */
    _Atomic uint32_t torn;
    unsigned char *to;
    const unsigned char *from;
    size_t bytes, share_bytes;
    struct ckpt_stored stored;
};

static struct {
    unsigned made;
    cpu_set_t cpus;
    int pinned;
    _Atomic uint32_t threads, shares;
    _Atomic uint64_t awake_ns;

    /* Tickets: number n is share n % shares of piece n / shares. Both only go up, but for ckpt_deferred_set. */
    _Alignas(LINE) _Atomic uint64_t posted;
    _Alignas(LINE) _Atomic uint64_t taken;

    /* A thread that goes to sleep leaves `awake`, joins `sleepers`, and looks at `posted` for the last time; who posts
     * raises `posted`, then looks at both: one of them sees the other (all sequentially consistent). */
    _Alignas(LINE) _Atomic uint32_t awake;
    _Atomic uint32_t sleepers;
    _Atomic uint32_t calls; /* futex of the threads that sleep */
    _Atomic uint32_t limits; /* futex of the threads that are not wanted */

    _Alignas(LINE) _Atomic uint32_t outstanding; /* futex of who drains: pieces */
    _Atomic uint32_t waiting; /* for `left` or `outstanding` */
    _Atomic uint32_t torn;

    struct slot slot[SLOTS];
} queue;

static int available(void) { return atomic_load(&queue.taken) < atomic_load(&queue.posted); }

static void piece_is_stored(struct slot *slot) {
    struct ckpt_stored stored = slot->stored;
    stored.torn = (int)atomic_load_explicit(&slot->torn, memory_order_relaxed);
    stored.call(&stored);
    atomic_store(&slot->left, 0);
    uint32_t before = atomic_fetch_sub(&queue.outstanding, 1);
    if (!atomic_load(&queue.waiting)) return;
    ckpt_futex_wake(&slot->left, INT_MAX, 0);
    if (before == 1) ckpt_futex_wake(&queue.outstanding, INT_MAX, 0);
}

static void store_share(uint64_t ticket, uint32_t shares) {
    struct slot *slot = &queue.slot[ticket / shares % SLOTS];
    size_t start = ticket % shares * slot->share_bytes;
    if (start < slot->bytes) {
        size_t bytes = slot->bytes - start < slot->share_bytes ? slot->bytes - start : slot->share_bytes;
        ckpt_probe_storing((unsigned)(ticket / shares));
        ckpt_stores_stream(slot->to + start, slot->from + start, bytes);
        /* Read once more, after all of it was read: who has begun to write there until now is seen, who begins later
         * changes nothing that matters. A full barrier lies between. */
        atomic_fetch_or(&slot->torn, 0);
        if (!ckpt_samples_equal(slot->to + start, slot->from + start, bytes)) {
            atomic_store(&queue.torn, 1);
            atomic_store(&slot->torn, 1);
        }
    }
    if (atomic_fetch_sub_explicit(&slot->left, 1, memory_order_acq_rel) == 2) piece_is_stored(slot);
}

/* Whether there was a ticket below `end`. */
static int help(uint64_t end) {
    uint64_t ticket = atomic_load(&queue.taken);
    do {
        if (ticket >= end || ticket >= atomic_load(&queue.posted)) return 0;
    } while (!atomic_compare_exchange_weak(&queue.taken, &ticket, ticket + 1));
    store_share(ticket, atomic_load(&queue.shares));
    return 1;
}

/* ---- threads ---- */

static int waited_awake(void) {
    int found = 0;
    uint64_t awake = atomic_load_explicit(&queue.awake_ns, memory_order_relaxed);
    if (!awake) return available();
    if (atomic_fetch_add(&queue.awake, 1) < AWAKE)
        for (uint64_t until = ckpt_now_ns() + awake; !found && ckpt_now_ns() < until;)
            for (unsigned i = 0; i < TURNS && !(found = available()); i++) ckpt_pause();
    atomic_fetch_sub(&queue.awake, 1);
    return found;
}

static void await(unsigned number) {
    uint32_t seen = atomic_load(&queue.limits);
    if (number > atomic_load(&queue.threads)) {
        ckpt_futex_wait(&queue.limits, seen, 0, 0);
        return;
    }
    if (waited_awake()) return;
    atomic_fetch_add(&queue.sleepers, 1);
    seen = atomic_load(&queue.calls);
    if (!available() && number <= atomic_load(&queue.threads)) ckpt_futex_wait(&queue.calls, seen, 0, 0);
    atomic_fetch_sub(&queue.sleepers, 1);
}

static _Atomic unsigned numbered;

static void *storer(void *unused) {
    unsigned number = atomic_fetch_add(&numbered, 1) + 1;
    prctl(PR_SET_NAME, "ckptpipe-store", 0, 0, 0);
    if (queue.pinned) pthread_setaffinity_np(pthread_self(), sizeof queue.cpus, &queue.cpus);
    for (;;)
        if (number > atomic_load_explicit(&queue.threads, memory_order_relaxed) || !help(UINT64_MAX)) await(number);
    return unused;
}

unsigned ckpt_deferred_start(unsigned threads, const cpu_set_t *cpus) {
    if (queue.made || !threads) return queue.made;
    if (threads > THREADS) threads = THREADS;
    if (cpus) {
        queue.cpus = *cpus;
        queue.pinned = 1;
    }
    atomic_store(&queue.threads, threads);
    if (!atomic_load(&queue.shares)) atomic_store(&queue.shares, 1);
    atomic_store(&numbered, 0);
    sigset_t all, before;
    pthread_attr_t attributes;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    while (queue.made < threads && !pthread_create(&thread, &attributes, storer, NULL)) queue.made++;
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return queue.made;
}

void ckpt_deferred_set(const struct ckpt_deferred_options *options) {
    unsigned threads = options->threads && options->threads < queue.made ? options->threads : queue.made;
    atomic_store(&queue.posted, 0); /* first: nobody takes a ticket that is not there */
    atomic_store(&queue.taken, 0);
    atomic_store(&queue.shares, options->shares ? options->shares : 1);
    atomic_store(&queue.awake_ns, options->awake_us * 1000ull);
    atomic_store(&queue.threads, threads);
    atomic_fetch_add(&queue.limits, 1);
    ckpt_futex_wake(&queue.limits, INT_MAX, 0);
    atomic_fetch_add(&queue.calls, 1);
    ckpt_futex_wake(&queue.calls, INT_MAX, 0);
}

unsigned ckpt_deferred_threads(void) { return queue.made; }

/* ---- who posts, and who waits ---- */

void ckpt_deferred_post(void *to, const void *from, size_t bytes, const struct ckpt_stored *stored) {
    uint32_t shares = atomic_load(&queue.shares);
    uint64_t posted = atomic_load_explicit(&queue.posted, memory_order_relaxed);
    struct slot *slot = &queue.slot[posted / shares % SLOTS];
    slot->to = to;
    slot->from = from;
    slot->bytes = bytes;
    slot->share_bytes = ((bytes + shares - 1) / shares + LINE - 1) / LINE * LINE;
    slot->stored = *stored;
    atomic_store_explicit(&slot->torn, 0, memory_order_relaxed);
    atomic_store_explicit(&slot->left, shares + 1, memory_order_relaxed);
    atomic_fetch_add(&queue.outstanding, 1);
    atomic_store(&queue.posted, posted + shares);
    uint32_t sleepers = atomic_load(&queue.sleepers), awake = atomic_load(&queue.awake);
    uint64_t taken = atomic_load(&queue.taken), untaken = posted + shares > taken ? posted + shares - taken : 0;
    if (!sleepers || untaken <= awake) return;
    atomic_fetch_add(&queue.calls, 1);
    ckpt_futex_wake(&queue.calls, (int)(untaken - awake < shares ? untaken - awake : shares), 0);
}

/* Waits awake for a moment, then asleep, for a word to become 0. */
static void wait_for(_Atomic uint32_t *word, uint64_t end) {
    for (unsigned i = 0; i < PATIENCE; i++) {
        if (!atomic_load(word)) return;
        if (!help(end)) ckpt_pause();
    }
    while (atomic_load(word) && help(UINT64_MAX)) continue; /* the threads get no CPU */
    uint32_t left;
    atomic_fetch_add(&queue.waiting, 1);
    while ((left = atomic_load(word))) ckpt_futex_wait(word, left, 0, 0);
    atomic_fetch_sub(&queue.waiting, 1);
}

void ckpt_deferred_wait(unsigned most) {
    uint32_t shares = atomic_load(&queue.shares);
    uint64_t pieces = atomic_load_explicit(&queue.posted, memory_order_relaxed) / shares;
    if (pieces <= most) return;
    /* All before this one were waited for by the calls before, unless `most` fell. */
    uint64_t first = pieces > SLOTS ? pieces - SLOTS : 0;
    for (uint64_t piece = first; piece < pieces - most; piece++)
        wait_for(&queue.slot[piece % SLOTS].left, (piece + 1) * shares);
}

void ckpt_deferred_drain(void) { wait_for(&queue.outstanding, UINT64_MAX); }

int ckpt_deferred_torn(void) { return (int)atomic_load_explicit(&queue.torn, memory_order_relaxed); }

void ckpt_deferred_forget(void) {
    queue.made = 0;
    queue.pinned = 0;
    atomic_store(&queue.threads, 0);
    atomic_store(&queue.posted, 0);
    atomic_store(&queue.taken, 0);
    atomic_store(&queue.awake, 0);
    atomic_store(&queue.sleepers, 0);
    atomic_store(&queue.outstanding, 0);
    atomic_store(&queue.waiting, 0);
    for (unsigned i = 0; i < SLOTS; i++) atomic_store(&queue.slot[i].left, 0);
}
