#define _GNU_SOURCE
#include "copies.h"

#include "next.h"
#include "ring.h"
#include "stores.h"

#define PAGE 4096u
#define STEP_BYTES (64u << 10) /* where workers have to be woken, one after another */
#define FETCH_BYTES 4096u      /* fetched between two looks whether there is something better to do */

static struct ckpt_copies_options options = {.block = STEP_BYTES};

void ckpt_copies_set(const struct ckpt_copies_options *wanted) {
    options = *wanted;
    if (!options.block) options.block = STEP_BYTES;
}

struct ends {
    unsigned char *to;
    const unsigned char *from;
    const unsigned char *next;      /* what is to be fetched for the next copies, NULL for nothing */
    size_t piece_bytes, next_bytes; /* of each of them, of all */
    const struct ckpt_copies_sums *sums; /* NULL: none are taken */
    size_t lead;                         /* bytes of the first block that are before the copy */
};

/* The lane's part of each of the next copies, one after another. */
static void fetch_next(const struct ckpt_later *later) {
    const unsigned char *next = later->from, *end = next + later->room;
    for (; next < end; next += later->stride)
        for (size_t done = 0; done < later->bytes && next + done < end; done += FETCH_BYTES) {
            size_t left = later->bytes - done, room = (size_t)(end - next) - done;
            if (left > room) left = room;
            if (ckpt_ring_wanted(later)) return;
            ckpt_stores_fetch(next + done, left < FETCH_BYTES ? left : FETCH_BYTES);
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

static size_t block_at(size_t done, size_t bytes) { return bytes - done < options.block ? bytes - done : options.block; }

static void write_step(void *context, size_t start, size_t bytes, struct ckpt_later *later) {
    const struct ends *ends = context;
    (void)later;
    for (size_t done = 0; done < bytes; done += options.block) {
        size_t at = start + done, block = block_at(done, bytes);
        ckpt_stores_stream(ends->to + at, ends->from + at, block);
        ckpt_stores_demote(ends->from + at, block, options.demote);
    }
}

/* The steps are of whole blocks: `start` counts from the first block's beginning. */
static void write_summed_step(void *context, size_t start, size_t bytes, struct ckpt_later *later) {
    const struct ends *ends = context;
    const struct ckpt_copies_sums *sums = ends->sums;
    (void)later;
    size_t at = start < ends->lead ? ends->lead : start, end = start + bytes;
    while (at < end) {
        size_t edge = (at / sums->block + 1) * sums->block, done = at - ends->lead;
        if (edge > end) edge = end;
        ckpt_stores_stream(ends->to + done, ends->from + done, edge - at);
        sums->take(sums->blocks, sums->start + done, ends->from + done, edge - at);
        ckpt_stores_demote(ends->from + done, edge - at, options.demote);
        at = edge;
    }
}

static void stream_out_step(void *context, size_t start, size_t bytes, struct ckpt_later *later) {
    const struct ends *ends = context;
    ckpt_stores_stream(ends->to + start, ends->from + start, bytes);
    note_next(ends, start, bytes, later);
}

static void plain_out_step(void *context, size_t start, size_t bytes, struct ckpt_later *later) {
    const struct ends *ends = context;
    for (size_t done = 0; done < bytes; done += options.block) {
        size_t at = start + done, block = block_at(done, bytes);
        ckpt_stores_keep(ends->to + at, ends->from + at, block);
        ckpt_stores_demote(ends->to + at, block, options.demote);
    }
    note_next(ends, start, bytes, later);
}

/* One step a lane, unless workers are to be woken: those that come first do more then. */
static void run(ckpt_step *step, struct ends *ends, size_t bytes, size_t unit) {
    unsigned manner = options.aside ? CKPT_RING_ASIDE : CKPT_RING_PLAIN, lanes = ckpt_ring_lanes(manner);
    size_t each = ((bytes + lanes - 1) / lanes + unit - 1) / unit * unit;
    if (ckpt_ring_asleep() || bytes > 64 * STEP_BYTES) each = (STEP_BYTES + unit - 1) / unit * unit;
    ckpt_ring_run(step, ends, bytes, each, 0, manner);
}

void ckpt_copies_write(void *to, const void *from, size_t bytes) {
    struct ends ends = {.to = to, .from = from, .piece_bytes = bytes};
    if (bytes < CKPT_COPIES_BYTES)
        ckpt_next.memcpy(to, from, bytes);
    else
        run(write_step, &ends, bytes, PAGE);
}

void ckpt_copies_write_summed(void *to, const void *from, size_t bytes, const struct ckpt_copies_sums *sums) {
    struct ends ends = {.to = to, .from = from, .piece_bytes = bytes, .sums = sums, .lead = sums->start % sums->block};
    if (bytes < CKPT_COPIES_BYTES)
        write_summed_step(&ends, ends.lead, bytes, NULL);
    else
        run(write_summed_step, &ends, ends.lead + bytes, sums->block);
}

void ckpt_copies_read(void *to, const void *from, size_t bytes, size_t ahead) {
    struct ends ends = {.to = to, .from = from, .piece_bytes = bytes};
    if (bytes < CKPT_COPIES_BYTES) {
        ckpt_next.memcpy(to, from, bytes);
        return;
    }
    if (options.read_ahead && ahead) {
        size_t most = options.read_ahead * bytes;
        ends.next = (const unsigned char *)from + bytes;
        ends.next_bytes = ahead < most ? ahead : most;
    }
    run(options.read_streams ? stream_out_step : plain_out_step, &ends, bytes, PAGE);
}
