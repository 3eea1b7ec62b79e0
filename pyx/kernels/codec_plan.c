#include "codec_lane.h"

#include <math.h>

#define WAVE_MOST 4096u
#define TABLES_LEAST ((size_t)512 << 10)
#define TABLES_MOST ((size_t)8 << 20)

static uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

uint32_t ck_plan_blocks(const ck_plan *plan, uint32_t raw) {
    return raw / plan->block_bytes + 2 * CK_PLANES; /* each plane may end with a short one */
}

size_t ck_table_bytes(size_t chunks, size_t blocks) { return chunks * 4864 + blocks * 128 + 8192; }

size_t ck_lane_tables(size_t lane_bytes) {
    const size_t share = lane_bytes / 32;
    return ck_round(share < TABLES_LEAST ? TABLES_LEAST : share > TABLES_MOST ? TABLES_MOST : share, 256);
}

size_t ck_lane_needed(size_t arena_bytes) {
    const size_t fixed = ck_round(CK_SUM_BYTES, 256) + arena_bytes;
    size_t lane = fixed;
    while (fixed + ck_lane_tables(lane) > lane) lane = ck_round(fixed + ck_lane_tables(lane), 4096);
    return lane;
}

int ck_plan_temp(const ck_codec *codec, const ck_plan *plan, size_t blocks, size_t *bytes) {
    const nv_format *format = &codec->nvcomp->format[plan->format];
    *bytes = 0;
    return format->compress_temp(blocks, plan->block_bytes, plan->options, bytes, blocks * plan->block_bytes, NULL);
}

/* Arena bytes that a chunk takes when the planes in `tried` are compressed, and how many blocks these have. */
size_t ck_plan_room(const ck_plan *plan, const ck_codec_job *job, size_t *blocks) {
    size_t room = 0;
    *blocks = 0;
    if (job->tried == 0) return 0;
    for (int p = 0; p < plan->planes; p++) {
        if (!(job->tried >> p & 1)) continue;
        *blocks += job->plane[p].blocks;
        if (plan->planes > 1 || job->device % plan->input_alignment) room += ck_round(job->plane[p].raw, 256);
    }
    return room + *blocks * plan->slot + ck_round(job->raw, 256) + 256;
}

/* With the context current. */
int ck_plan_measure(const ck_codec *codec, ck_plan *plan, int *error, const char **call) {
    const nv_format *format = &codec->nvcomp->format[plan->format];
    const ck_lane *lane = &codec->lane[0];
    nv_alignments needed = {1, 1, 1};
    size_t limit = 0, temp = 0, blocks;
    *call = "nvcompBatched…CompressGetRequiredAlignments";
    *error = format->compress_alignments(plan->options, &needed);
    if (*error != NV_SUCCESS || needed.output > 256 || needed.temp > 256) return CK_FAIL_NVCOMP;
    *call = "nvcompBatched…CompressGetMaxOutputChunkSize";
    *error = format->compress_limit(plan->block_bytes, plan->options, &limit);
    if (*error != NV_SUCCESS) return CK_FAIL_NVCOMP;
    plan->input_alignment = needed.input ? needed.input : 1;
    plan->slot = ck_round(limit, 256);

    ck_codec_job whole = {.plan = plan, .raw = codec->chunk_bytes, .device = 1, .tried = (1 << plan->planes) - 1};
    ck_plan_lay(&whole);
    const size_t room = ck_plan_room(plan, &whole, &blocks);
    for (plan->wave = WAVE_MOST;; plan->wave /= 2) {
        *call = "nvcompBatched…CompressGetTempSize";
        *error = ck_plan_temp(codec, plan, plan->wave, &temp);
        if (*error != NV_SUCCESS) return CK_FAIL_NVCOMP;
        if (plan->wave == 1 || (temp <= lane->arena_room / 2 && room + temp + 256 <= lane->arena_room)) break;
    }
    plan->need = ck_lane_needed(room + temp + 256);
    if (room + temp + 256 > lane->arena_room || ck_table_bytes(1, blocks) > lane->table_room) return CK_FAIL_SCRATCH;
    return CK_FAIL_NONE;
}

void ck_plan_lay(ck_codec_job *job) {
    const ck_plan *plan = job->plan;
    const uint32_t planes = (uint32_t)plan->planes;
    uint32_t first = 0;
    for (uint32_t p = 0; p < planes; p++) {
        ck_plane *plane = &job->plane[p];
        plane->format = plan->format;
        plane->level = plan->level;
        plane->raw = (job->raw + planes - 1 - p) / planes;
        plane->block_bytes = least(plan->block_bytes, plane->raw);
        plane->blocks = plane->raw == 0 ? 0 : (plane->raw + plane->block_bytes - 1) / plane->block_bytes;
        plane->first = first;
        first += plane->blocks;
    }
}

static int worth_it(const ck_codec_job *job) {
    return job->raw >= CK_SAMPLE_LEAST * (uint32_t)job->plan->planes;
}

int ck_plan_samples(const ck_codec_job *job) { return worth_it(job) && job->plan->tried_below <= 8.0; }

/* Shannon's entropy of the bytes that were counted, in bits a byte. */
static double entropy(const uint32_t *counts) {
    double total = 0, sum = 0;
    for (int i = 0; i < 256; i++) {
        if (counts[i] == 0) continue;
        total += counts[i];
        sum += counts[i] * log2(counts[i]);
    }
    return total > 0 ? log2(total) - sum / total : 8.0;
}

void ck_plan_try(ck_codec_job *job, const uint32_t *counts) {
    const ck_plan *plan = job->plan;
    double expected = 0;
    job->tried = 0;
    if (!worth_it(job)) return;
    for (int p = 0; p < plan->planes; p++) {
        job->bits[p] = counts == NULL ? 0 : entropy(counts + 256 * p);
        if (job->bits[p] < plan->tried_below) job->tried |= 1 << p;
        expected += job->plane[p].raw * (job->tried >> p & 1 ? job->bits[p] / 8 : 1.0);
    }
    /* A codec that knows frequencies alone does not come below the entropy. */
    if (ck_formats[plan->format].entropy_only >> plan->level & 1 && expected > 0.955 * job->raw) job->tried = 0;
}

/* The lengths of all tried blocks are in job->lengths: which planes stay coded, and whether the chunk does. */
void ck_plan_settle(ck_codec_job *job) {
    const ck_plan *plan = job->plan;
    uint64_t stored = 0;
    int coded = 0;
    for (int p = 0; p < plan->planes; p++) {
        ck_plane *plane = &job->plane[p];
        uint64_t length = 0;
        if (job->tried >> p & 1)
            for (uint32_t b = 0; b < plane->blocks; b++) length += job->lengths[plane->first + b];
        if (job->tried >> p & 1 && length <= plane->raw * 0.95) {
            plane->stored = (uint32_t)length;
            coded++;
        } else {
            plane->format = CK_FORMAT_NONE;
            plane->level = 0;
            plane->block_bytes = plane->blocks = 0;
            plane->stored = plane->raw;
        }
        stored += plane->stored;
    }
    if (coded == 0 || stored > job->raw * 0.95 || ck_round(stored, 4096) >= ck_round(job->raw, 4096)) {
        job->planes = job->transform = 0;
        job->stored = job->raw;
        return;
    }
    job->planes = plan->planes;
    job->transform = plan->transform;
    job->stored = (uint32_t)stored;
}
