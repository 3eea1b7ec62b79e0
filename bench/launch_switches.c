/* Switches of the capture library's copies that change while a process runs, so that one process can be measured in
 * many ways, and what lies between the driver's copies.
 *
 * CKPTPIPE_BENCH_SWITCHES names a file, "key=value;key=value" as in CKPTPIPE_LAUNCH, with the further keys `free` and
 * `workers`; it is read when an image is mapped. When the image is given back, its name with ".out" is written: for
 * copies into the image and out of it, how many there were and nanoseconds in all; then lines for people. */
#define _GNU_SOURCE
#include "config.h"
#include "copies.h"
#include "futex.h"
#include "probes.h"
#include "ring.h"
#include "stores.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef CKPT_BENCH_FREE
#define CKPT_BENCH_FREE 0
#endif
#define MOST_COPIES 65536
#define MOST_BUFFERS 64

static int is_free = CKPT_BENCH_FREE; /* copies cost nothing, and the bytes are lost: what the driver needs at least */
static unsigned demotion;
static uint64_t mapped;

/* Copies into an image [1] and out of it [0]; the driver copies on one thread. */
static struct {
    unsigned long long copies, ns;
    uint64_t first, last;           /* when the first began, when the last ended */
    uint64_t between[MOST_COPIES];  /* nanoseconds from one's return to the next one's call */
    const void *buffer[MOST_BUFFERS]; /* of the driver's */
    unsigned gaps, buffers;
} seen[2];
static const void *ends[2];
static uint64_t entered;

static const char *value_of(const char *text, const char *key) {
    for (const char *at = text; at; at = strchr(at, ';') ? strchr(at, ';') + 1 : NULL)
        if (strncmp(at, key, strlen(key)) == 0 && at[strlen(key)] == '=') return at + strlen(key) + 1;
    return "";
}

static unsigned count_of(const char *text, const char *key) { return (unsigned)atoi(value_of(text, key)); }

void ckpt_probe_mapped(void) {
    char text[512] = "";
    const char *path = getenv("CKPTPIPE_BENCH_SWITCHES");
    FILE *file = path ? fopen(path, "re") : NULL;
    memset(seen, 0, sizeof seen);
    mapped = ckpt_now_ns();
    if (!file) return;
    if (!fgets(text, sizeof text, file)) text[0] = 0;
    fclose(file);
    is_free = atoi(value_of(text, "free"));
    demotion = count_of(text, "demote");
    ckpt_ring_limit(count_of(text, "workers"), count_of(text, "awake-us"));
    const char *awake = value_of(text, "window-awake-us");
    ckpt_ring_set_spare(&(struct ckpt_ring_spare){
        .lanes = count_of(text, "window-lanes"),
        .awake_us = *awake ? atoi(awake) : -1,
    });
    ckpt_copies_set(&(struct ckpt_copies_options){
        .demote = demotion,
        .block = count_of(text, "block"),
        .read_streams = strncmp(value_of(text, "copy-out"), "stream", 6) == 0,
        .read_ahead = count_of(text, "read-ahead"),
        .aside = atoi(value_of(text, "aside")),
    });
}

static int by_size(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static void tell_gaps(FILE *file, int in) {
    unsigned count = seen[in].gaps;
    uint64_t *between = seen[in].between, all = 0;
    if (!count) return;
    qsort(between, count, sizeof *between, by_size);
    for (unsigned i = 0; i < count; i++) all += between[i];
    fprintf(file, "%s: before the first %.1f ms, first to last %.1f ms, after the last %.1f ms; between %.1f ms, ",
            in ? "in" : "out", (double)(seen[in].first - mapped) / 1e6,
            (double)(seen[in].last - seen[in].first) / 1e6, (double)(ckpt_now_ns() - seen[in].last) / 1e6,
            (double)all / 1e6);
    static const unsigned percent[] = {10, 50, 90, 99};
    for (unsigned k = 0; k < sizeof percent / sizeof percent[0]; k++)
        fprintf(file, "%u %% %.1f us, ", percent[k], (double)between[count * (uint64_t)percent[k] / 100] / 1e3);
    fprintf(file, "%u buffers\n", seen[in].buffers);
}

void ckpt_probe_returned(void) {
    char name[600];
    const char *path = getenv("CKPTPIPE_BENCH_SWITCHES");
    if (!path) return;
    snprintf(name, sizeof name, "%s.out", path);
    FILE *file = fopen(name, "we");
    if (!file) return;
    for (int in = 1; in >= 0; in--) fprintf(file, "%llu %llu\n", seen[in].copies, seen[in].ns);
    for (int in = 1; in >= 0; in--) tell_gaps(file, in);
    fprintf(file, "lines are sent off by %s\n", ckpt_stores_demotes_by(demotion));
    fclose(file);
}

void ckpt_probe_copy(const void *destination, const void *source) {
    ends[0] = destination;
    ends[1] = source;
    entered = ckpt_now_ns();
}

void ckpt_probe_copied(int in) {
    uint64_t now = ckpt_now_ns();
    seen[in].copies++;
    seen[in].ns += now - entered;
    if (!seen[in].first)
        seen[in].first = entered;
    else if (seen[in].gaps < MOST_COPIES)
        seen[in].between[seen[in].gaps++] = entered - seen[in].last;
    seen[in].last = now;
    unsigned i = 0;
    while (i < seen[in].buffers && seen[in].buffer[i] != ends[in]) i++;
    if (i == seen[in].buffers && i < MOST_BUFFERS) seen[in].buffer[seen[in].buffers++] = ends[in];
}

size_t ckpt_probe_bytes(size_t bytes) { return is_free ? 0 : bytes; }
