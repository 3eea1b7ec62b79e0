/* Switches of the capture library's copies that change while a process runs, so that one process can be measured in
 * many ways, and the time that the driver spends in its copies.
 *
 * CKPTPIPE_BENCH_SWITCHES names a file, "key=value;key=value" as in CKPTPIPE_LAUNCH, with the further keys `free`,
 * `workers`, `storers` and `look-back`; it is read when an image is mapped. When the image is given back, its name with ".out" is written: for
 * copies into the image and out of it, how many there were, nanoseconds in all, and in waiting for stores. */
#define _GNU_SOURCE
#include "config.h"
#include "copies.h"
#include "futex.h"
#include "probes.h"
#include "ring.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef CKPT_BENCH_FREE
#define CKPT_BENCH_FREE 0
#endif

static int is_free = CKPT_BENCH_FREE; /* copies cost nothing, and the bytes are lost: what the driver needs at least */

static struct {
    unsigned long long copies, ns, drain_ns;
} spent[2];
static uint64_t entered, drained; /* the driver copies on one thread */

/* What lies between the driver's copies: nanoseconds from one's return to the next one's call, by size, and the
 * buffers that it copies from or to. */
#define MOST_COPIES 65536
#define MOST_BUFFERS 64
static struct {
    uint64_t mapped, first, last;
    uint64_t between[MOST_COPIES];
    unsigned count, buffers;
    const void *buffer[MOST_BUFFERS];
} seen[2];
static const void *ends[2];

/* Where `look-back` is set: whether the buffers of the last copies into the image still hold what was copied from
 * them, at the next copy, and in which order the driver goes through its buffers. */
#define MOST_BACK 32
#define PIECE (2 << 20)
#define EACH 8 /* of so many copies one is followed by a look */
static int look_back;
static struct {
    const void *to, *from;
} back[MOST_BACK];
static unsigned long looked[MOST_BACK], same[MOST_BACK];
static unsigned char order[MOST_COPIES];
static struct ckpt_copies_counts counts_before;
static char early[PIECE]; /* what the other buffer held at the copy before */
static const void *early_of;
static unsigned long early_looked, early_same;

static void look(void) {
    unsigned count = seen[1].count;
    if (!look_back || count < MOST_BACK) return;
    if (early_of && early_of == ends[1]) {
        early_looked++;
        early_same += memcmp(early, early_of, PIECE) == 0;
    }
    early_of = NULL;
    if (count % EACH == EACH / 2 && (const char *)ends[0] - (const char *)back[count % MOST_BACK].to == PIECE)
        memcpy(early, early_of = back[count % MOST_BACK].from, PIECE);
    if (count % EACH) return;
    for (unsigned j = 1; j < MOST_BACK; j++) {
        unsigned i = (count + MOST_BACK + 1 - j) % MOST_BACK;
        const char *next = j == 1 ? ends[0] : back[(i + 1) % MOST_BACK].to;
        if (!back[i].to || next - (const char *)back[i].to != PIECE) continue; /* not a whole piece */
        looked[j]++;
        same[j] += memcmp(back[i].to, back[i].from, PIECE) == 0;
    }
}

static const char *value_of(const char *text, const char *key) {
    for (const char *at = text; at; at = strchr(at, ';') ? strchr(at, ';') + 1 : NULL)
        if (strncmp(at, key, strlen(key)) == 0 && at[strlen(key)] == '=') return at + strlen(key) + 1;
    return "";
}

static unsigned count_of(const char *text, const char *key) { return (unsigned)atoi(value_of(text, key)); }

static int starts(const char *text, const char *with) { return strncmp(text, with, strlen(with)) == 0; }

void ckpt_probe_mapped(void) {
    char text[512] = "";
    const char *path = getenv("CKPTPIPE_BENCH_SWITCHES");
    FILE *file = path ? fopen(path, "re") : NULL;
    memset(spent, 0, sizeof spent);
    memset(seen, 0, sizeof seen);
    seen[1].mapped = seen[0].mapped = ckpt_now_ns();
    if (!file) return;
    if (!fgets(text, sizeof text, file)) text[0] = 0;
    fclose(file);
    struct ckpt_copies_options options = {
        .defer = count_of(text, "defer"),
        .shares = count_of(text, "shares"),
        .store_awake_us = count_of(text, "store-awake-us"),
        .read_ahead = count_of(text, "read-ahead"),
        .fetch_level = count_of(text, "fetch-level"),
        .lane_steps = count_of(text, "lane-steps"),
        .read_streams = starts(value_of(text, "copy-out"), "stream"),
        .aside = atoi(value_of(text, "aside")),
    };
    is_free = atoi(value_of(text, "free"));
    look_back = atoi(value_of(text, "look-back"));
    memset(back, 0, sizeof back);
    memset(looked, 0, sizeof looked);
    memset(same, 0, sizeof same);
    ckpt_copies_drain();
    ckpt_copies_count(&counts_before);
    ckpt_ring_limit(count_of(text, "workers"), count_of(text, "awake-us"));
    ckpt_copies_set(&options, count_of(text, "storers"));
}

static int by_size(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

void ckpt_probe_returned(void) {
    char name[600];
    const char *path = getenv("CKPTPIPE_BENCH_SWITCHES");
    if (!path) return;
    snprintf(name, sizeof name, "%s.out", path);
    FILE *file = fopen(name, "we");
    if (!file) return;
    for (int in = 1; in >= 0; in--)
        fprintf(file, "%llu %llu %llu\n", spent[in].copies, spent[in].ns, spent[in].drain_ns);
    for (int in = 1; in >= 0; in--) {
        unsigned count = seen[in].count;
        uint64_t *between = seen[in].between, all = 0, rare = 0;
        qsort(between, count, sizeof *between, by_size);
        for (unsigned i = 0; i < count; i++) all += between[i];
        for (unsigned i = 0; i < count; i++) rare += between[i] > 300000 ? between[i] : 0;
        if (!count) continue;
        fprintf(file, "%s: before the first %.1f ms, first to last %.1f ms, after the last %.1f ms, between %.1f ms (over 0.3 ms: %.1f), 10/50/90/99 %%: %.1f %.1f %.1f %.1f us; %u buffers\n",
                in ? "in" : "out", (seen[in].first - seen[in].mapped) / 1e6, (seen[in].last - seen[in].first) / 1e6,
                (ckpt_now_ns() - seen[in].last) / 1e6, all / 1e6, rare / 1e6, between[count / 10] / 1e3,
                between[count / 2] / 1e3, between[count / 10 * 9] / 1e3, between[count / 100 * 99] / 1e3, seen[in].buffers);
    }
    struct ckpt_copies_counts counts;
    ckpt_copies_count(&counts);
    fprintf(file, "deferred: %llu pieces, of %u buffers, %u proven; learned anew %llu times%s%s\n",
            (unsigned long long)(counts.deferred - counts_before.deferred), counts.most_buffers, counts.most_proven,
            (unsigned long long)(counts.restarts - counts_before.restarts), counts.refused ? "; REFUSED" : "",
            ckpt_deferred_torn() ? "; TORN" : "");
    if (look_back) {
        fprintf(file, "%lu of %lu buffers held their piece at the copy before already\n", early_same, early_looked);
        fprintf(file, "buffers that still held their piece, by copies since:");
        for (unsigned j = 1; j < MOST_BACK; j++) fprintf(file, " %u:%lu/%lu", j, same[j], looked[j]);
        fprintf(file, "; order");
        for (unsigned i = 0; i < seen[1].count; i++) {
            if (i >= 90 && (i < 2000 || i >= 2060) && i + 60 < seen[1].count) continue;
            fprintf(file, " %u", order[i]);
        }
        fprintf(file, "\n");
    }
    fclose(file);
}

void ckpt_probe_copy(const void *destination, const void *source) {
    ends[0] = destination;
    ends[1] = source;
    look();
    entered = ckpt_now_ns();
}

void ckpt_probe_drained(void) { drained = ckpt_now_ns(); }

void ckpt_probe_copied(int in) {
    spent[in].copies++;
    spent[in].ns += ckpt_now_ns() - entered;
    spent[in].drain_ns += drained - entered;
    if (!seen[in].first) seen[in].first = entered;
    else if (seen[in].count < MOST_COPIES) seen[in].between[seen[in].count++] = entered - seen[in].last;
    seen[in].last = ckpt_now_ns();
    unsigned i = 0;
    while (i < seen[in].buffers && seen[in].buffer[i] != ends[in]) i++;
    if (i == seen[in].buffers && i < MOST_BUFFERS) seen[in].buffer[seen[in].buffers++] = ends[in];
    if (!in) return;
    order[seen[1].count] = (unsigned char)i;
    back[seen[1].count % MOST_BACK].to = ends[0];
    back[seen[1].count % MOST_BACK].from = ends[1];
}

size_t ckpt_probe_bytes(size_t bytes) { return is_free ? 0 : bytes; }

void ckpt_probe_storing(unsigned worker) { (void)worker; }
