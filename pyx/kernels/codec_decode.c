#include "codec_lane.h"

#include <stdlib.h>
#include <string.h>

#define ALIGN 16u          /* of every block that a decoder reads or writes: suits all formats */
#define WAVE_RESERVED 64u  /* blocks whose temporary memory is kept free for a launch */

/* Jobs that are decoded side by side. */
typedef struct {
    ck_codec_job **jobs;
    int count;
    size_t blocks;
} decode_round;

/* The blocks of one format that go to one decoder, in the tables from `first` on. */
typedef struct {
    int format, engine;
    size_t first, count, largest;
} ck_group;

/* What a round's decoding reads and writes; the first are filled here, the last come back. */
typedef struct {
    cu_address *from, *to;
    size_t *stored, *room;
    ck_piece *spread, *after;
    ck_split *merges;
    ck_range *ranges;
    size_t *actual;
    nv_status *statuses;
    uint32_t *engine_actual, *sums;
    cu_address from_at, to_at, stored_at, room_at, spread_at, after_at, merges_at, ranges_at;
    cu_address actual_at, statuses_at, engine_actual_at, sums_at;
    size_t spreads, afters;
    unsigned merged;
    uint64_t spread_longest, after_longest;
} ck_tables;

static int fail(ck_lane *lane, ck_codec_job *job, int failure, const char *why) {
    job->failure = failure;
    job->call = why;
    ck_lane_finish(lane, job);
    return 0;
}

static int engine_bit(int format) {
    return format == CK_FORMAT_DEFLATE  ? CU_ENGINE_DEFLATE
           : format == CK_FORMAT_SNAPPY ? CU_ENGINE_SNAPPY
           : format == CK_FORMAT_LZ4    ? CU_ENGINE_LZ4
                                        : 0;
}

static const char *not_for_engine(const ck_codec *codec, const ck_codec_job *job, const ck_plane *plane) {
    if (!(codec->engine_mask & engine_bit(plane->format)))
        return "the decompression engine of this GPU does not take this format";
    const char *longer = "a block is longer than the decompression engine takes";
    if (plane->block_bytes > codec->engine_longest) return longer;
    for (uint32_t b = 0; b < plane->blocks; b++)
        if (job->lengths[plane->first + b] > codec->engine_longest) return longer;
    return NULL;
}

/* Who decodes each plane. NULL, or why nobody can. */
static const char *choose(const ck_codec *codec, ck_codec_job *job) {
    job->engine = 0;
    job->decoder = CK_DECODER_NONE;
    for (int p = 0; p < job->planes; p++) {
        const ck_plane *plane = &job->plane[p];
        if (plane->format == CK_FORMAT_NONE) continue;
        const char *why = not_for_engine(codec, job, plane);
        if (why == NULL) {
            job->engine |= 1 << p;
            if (job->decoder == CK_DECODER_NONE) job->decoder = CK_DECODER_ENGINE;
            continue;
        }
        if (codec->engine_forced) return why;
        if (codec->nvcomp == NULL || codec->nvcomp->format[plane->format].decompress == NULL)
            return "nvCOMP, which would decode it, is not there";
        job->decoder = CK_DECODER_NVCOMP;
    }
    return NULL;
}

/* Temporary memory of a launch of `blocks` blocks. */
static int temp_of(ck_lane *lane, int format, size_t blocks, size_t largest, size_t *bytes) {
    *bytes = 0;
    if (blocks == 0) return 1;
    const nv_status status = lane->codec->nvcomp->format[format].decompress_temp(
        blocks, largest, ck_formats[format].decompress, bytes, blocks * largest, lane->stream);
    return !ck_lane_refused(lane, status, format, "nvcompBatched…DecompressGetTempSize");
}

/* Blocks whose places are not aligned are decoded into slots and copied from there. */
static int needs_slots(const ck_plane *plane) { return plane->block_bytes % ALIGN != 0 && plane->blocks > 1; }

/* Whether the engine may write to all of a range. Asked of its first and its last byte. */
static int engine_may(const ck_codec *codec, cu_address address, size_t nbytes) {
    uint64_t first = 0, last = 0;
    return codec->pointer_attribute != NULL &&
           codec->pointer_attribute(&first, CU_POINTER_DECOMPRESS_CAPABLE, address) == CU_OK && first != 0 &&
           codec->pointer_attribute(&last, CU_POINTER_DECOMPRESS_CAPABLE, address + nbytes - 1) == CU_OK && last != 0;
}

/* Whether the blocks of a chunk are decoded right to where it goes. */
static int in_place(const ck_codec *codec, const ck_codec_job *job) {
    return job->planes == 1 && job->plane[0].format != CK_FORMAT_NONE && !needs_slots(&job->plane[0]) &&
           job->device % ALIGN == 0 && (!(job->engine & 1) || engine_may(codec, job->device, job->raw));
}

/* Arena bytes that a job takes, without temporary memory. */
static size_t room_of(const ck_codec *codec, const ck_codec_job *job, size_t *blocks) {
    size_t room = (job->loaded ? 0 : ck_round(job->stored, 256)) + 512;
    *blocks = 0;
    for (int p = 0; p < job->planes; p++) {
        const ck_plane *plane = &job->plane[p];
        if (plane->format == CK_FORMAT_NONE) {
            if (job->planes > 1) continue;
            room += ck_round(plane->raw, 256);
            continue;
        }
        *blocks += plane->blocks;
        room += plane->stored + (size_t)plane->blocks * ALIGN + 512; /* spread out */
        if (in_place(codec, job)) continue;
        room += ck_round(plane->block_bytes, ALIGN) * (size_t)plane->blocks + 256;
        if (needs_slots(plane)) room += ck_round(plane->raw, 256);
    }
    return room;
}

static int gather_round(ck_lane *lane, ck_codec_job **jobs, int count, decode_round *round) {
    size_t used = 0, temp[CK_FORMATS] = {0};
    *round = (decode_round){.jobs = jobs};
    for (; round->count < count; round->count++) {
        const ck_codec_job *job = jobs[round->count];
        size_t blocks, most = 0;
        const size_t room = room_of(lane->codec, job, &blocks);
        for (int p = 0; p < job->planes; p++) {
            const ck_plane *plane = &job->plane[p];
            size_t needed = 0;
            if (plane->format == CK_FORMAT_NONE || job->engine >> p & 1) continue;
            if (!temp_of(lane, plane->format, plane->blocks < WAVE_RESERVED ? plane->blocks : WAVE_RESERVED,
                         plane->block_bytes, &needed))
                return 0;
            if (needed > temp[plane->format]) temp[plane->format] = needed;
        }
        for (int format = 1; format < CK_FORMATS; format++)
            if (temp[format] > most) most = temp[format];
        if (used + room + most + 256 > lane->arena_room ||
            ck_table_bytes((size_t)round->count + 1, round->blocks + blocks) > lane->table_room) {
            if (round->count) return 1;
            lane->failure = CK_FAIL_SCRATCH; /* of this job; the others of the batch are tried without it */
            jobs[0]->need = ck_lane_needed(room + most + 256);
            return 0;
        }
        used += room;
        round->blocks += blocks;
    }
    return 1;
}

/* Stored bytes to the device, where they are not there yet; there they are checksummed. Those that are not what was
   stored are refused. */
static int bring(ck_lane *lane, decode_round *round) {
    const ck_cuda *cuda = lane->codec->cuda;
    cu_address ranges_at, sums_at;
    ck_lane_begin(lane);
    lane->arena_used = 0;
    ck_range *ranges = ck_lane_table(lane, (size_t)round->count * sizeof *ranges, &ranges_at);
    for (int i = 0; i < round->count; i++) {
        ck_codec_job *job = round->jobs[i];
        job->out = job->loaded ? job->loaded : ck_lane_take(lane, job->stored);
        ranges[i] = (ck_range){job->out, job->stored};
        if (!job->loaded && ck_lane_failed(lane, cuda->copy_up(job->out, job->host, job->stored, lane->stream),
                                           "cuMemcpyHtoDAsync"))
            return 0;
    }
    if (!ck_lane_upload(lane)) return 0;
    const uint32_t *sums = ck_lane_table(lane, (size_t)round->count * 8, &sums_at);
    if (!ck_lane_sums(lane, ranges_at, ck_lane_seen(lane, sums), (unsigned)round->count) || !ck_lane_wait(lane))
        return 0;
    int left = 0;
    for (int i = 0; i < round->count; i++) {
        ck_codec_job *job = round->jobs[i];
        job->stored_crc = sums[2 * i];
        if (job->stored_crc != job->expected_crc)
            fail(lane, job, CK_FAIL_STORED, "");
        else
            round->jobs[left++] = job;
    }
    for (int i = left; i < round->count; i++) round->jobs[i] = NULL;
    round->count = left;
    return 1;
}

static void add_after(ck_tables *tables, cu_address from, cu_address to, uint64_t nbytes) {
    tables->after[tables->afters++] = (ck_piece){from, to, nbytes};
    if (nbytes > tables->after_longest) tables->after_longest = nbytes;
}

/* Blocks of one plane: from where they are spread to, into the plane's place or into slots of their own. */
static void lay_blocks(ck_lane *lane, ck_tables *tables, ck_codec_job *job, int p, cu_address from, size_t *at) {
    const ck_plane *plane = &job->plane[p];
    const int slots = needs_slots(plane);
    const size_t step = slots ? ck_round(plane->block_bytes, ALIGN) : plane->block_bytes;
    size_t spread = 0;
    for (uint32_t b = 0; b < plane->blocks; b++) spread += ck_round(job->lengths[plane->first + b], ALIGN);
    cu_address source = ck_lane_take(lane, spread);
    const cu_address target = slots ? ck_lane_take(lane, step * plane->blocks) : job->lay[p];
    job->coded_at[p] = (uint32_t)*at;
    for (uint32_t b = 0; b < plane->blocks; b++, (*at)++) {
        const uint32_t length = job->lengths[plane->first + b];
        const uint64_t done = (uint64_t)b * plane->block_bytes;
        const uint64_t raw = plane->raw - done < plane->block_bytes ? plane->raw - done : plane->block_bytes;
        tables->spread[tables->spreads++] = (ck_piece){from, source, length};
        if (length > tables->spread_longest) tables->spread_longest = length;
        tables->from[*at] = source;
        tables->to[*at] = target + b * step;
        tables->stored[*at] = length;
        tables->room[*at] = raw;
        if (slots) add_after(tables, target + b * step, job->lay[p] + done, raw);
        from += length;
        source += ck_round(length, ALIGN);
    }
}

/* Where each plane of a job will lie: in the destination, in scratch, or where it arrived. */
static void lay_planes(ck_lane *lane, ck_tables *tables, ck_codec_job *job) {
    cu_address from = job->out;
    for (int p = 0; p < job->planes; p++) {
        const ck_plane *plane = &job->plane[p];
        const int raw = plane->format == CK_FORMAT_NONE;
        if (job->planes > 1) {
            job->lay[p] = raw ? from : ck_lane_take(lane, plane->raw);
        } else if (raw) {
            add_after(tables, from, job->device, plane->raw);
        } else if (needs_slots(plane) || in_place(lane->codec, job)) {
            job->lay[0] = job->device;
        } else {
            job->lay[0] = ck_lane_take(lane, plane->raw);
        }
        from += plane->stored;
    }
}

static void make_tables(ck_lane *lane, decode_round *round, ck_tables *tables, ck_group *groups, int *group_count) {
    const size_t blocks = round->blocks, count = (size_t)round->count;
    memset(tables, 0, sizeof *tables);
    ck_lane_begin(lane);
    tables->from = ck_lane_table(lane, blocks * 8, &tables->from_at);
    tables->stored = ck_lane_table(lane, blocks * 8, &tables->stored_at);
    tables->room = ck_lane_table(lane, blocks * 8, &tables->room_at);
    tables->to = ck_lane_table(lane, blocks * 8, &tables->to_at);
    tables->spread = ck_lane_table(lane, blocks * sizeof *tables->spread, &tables->spread_at);
    tables->after = ck_lane_table(lane, (blocks + CK_PLANES * count) * sizeof *tables->after, &tables->after_at);
    tables->merges = ck_lane_table(lane, count * sizeof *tables->merges, &tables->merges_at);
    tables->ranges = ck_lane_table(lane, count * sizeof *tables->ranges, &tables->ranges_at);
    for (int i = 0; i < round->count; i++) lay_planes(lane, tables, round->jobs[i]);
    size_t at = 0;
    *group_count = 0;
    for (int engine = 0; engine <= 1; engine++) {
        for (int format = 1; format < CK_FORMATS; format++) {
            ck_group group = {format, engine, at, 0, 0};
            for (int i = 0; i < round->count; i++) {
                ck_codec_job *job = round->jobs[i];
                cu_address from = job->out;
                for (int p = 0; p < job->planes; p++) {
                    const ck_plane *plane = &job->plane[p];
                    if (plane->format == format && (job->engine >> p & 1) == engine) {
                        lay_blocks(lane, tables, job, p, from, &at);
                        if (plane->block_bytes > group.largest) group.largest = plane->block_bytes;
                    }
                    from += plane->stored;
                }
            }
            group.count = at - group.first;
            if (group.count) groups[(*group_count)++] = group;
        }
    }
    for (int i = 0; i < round->count; i++) {
        const ck_codec_job *job = round->jobs[i];
        tables->ranges[i] = (ck_range){job->device, job->raw};
        if (job->planes > 1) {
            ck_split merge = {job->device, job->raw, (uint64_t)job->planes, {0}};
            for (int p = 0; p < job->planes; p++) merge.plane[p] = job->lay[p];
            tables->merges[tables->merged++] = merge;
        } else if (job->lay[0] != 0 && job->lay[0] != job->device) {
            add_after(tables, job->lay[0], job->device, job->raw);
        }
    }
}

static int run_nvcomp(ck_lane *lane, const ck_tables *tables, const ck_group *group) {
    const nv_format *format = &lane->codec->nvcomp->format[group->format];
    size_t wave = group->count, temp;
    for (;;) {
        if (!temp_of(lane, group->format, wave, group->largest, &temp)) return 0;
        if (lane->arena_used + temp <= lane->arena_room || wave == 1) break;
        wave = (wave + 1) / 2;
    }
    const cu_address memory = lane->arena + lane->arena_used;
    for (size_t done = 0; done < group->count; done += wave) {
        const size_t at = group->first + done, count = group->count - done < wave ? group->count - done : wave;
        const nv_status status = format->decompress(
            (const cu_address *)(tables->from_at + 8 * at), (const size_t *)(tables->stored_at + 8 * at),
            (const size_t *)(tables->room_at + 8 * at), (size_t *)(tables->actual_at + 8 * at), count, memory, temp,
            (const cu_address *)(tables->to_at + 8 * at), ck_formats[group->format].decompress,
            (nv_status *)(tables->statuses_at + 4 * at), lane->stream);
        if (ck_lane_refused(lane, status, group->format, "nvcompBatched…DecompressAsync")) return 0;
    }
    return 1;
}

static int run_engine(ck_lane *lane, const ck_tables *tables, const ck_group *group) {
    if (group->count > lane->engine_room) {
        ck_engine_job *larger = realloc(lane->engine_jobs, group->count * sizeof *larger);
        if (larger == NULL) {
            lane->failure = CK_FAIL_MEMORY;
            return 0;
        }
        lane->engine_jobs = larger;
        lane->engine_room = group->count;
    }
    for (size_t i = 0; i < group->count; i++) {
        const size_t at = group->first + i;
        lane->engine_jobs[i] = (ck_engine_job){.source_bytes = tables->stored[at],
                                               .room = tables->room[at],
                                               .actual = tables->engine_actual_at + 4 * at,
                                               .from = tables->from[at],
                                               .to = tables->to[at],
                                               .algorithm = engine_bit(group->format)};
    }
    size_t wrong = 0;
    return !ck_lane_failed(
        lane, lane->codec->batch_decompress(lane->engine_jobs, group->count, 0, &wrong, lane->stream),
        "cuMemBatchDecompressAsync");
}

/* Each block was decoded to exactly as many bytes as it must have. */
static int decoded(ck_codec_job *job, const ck_tables *tables) {
    for (int p = 0; p < job->planes; p++) {
        const ck_plane *plane = &job->plane[p];
        for (uint32_t b = 0; b < plane->blocks; b++) {
            const size_t at = job->coded_at[p] + b;
            const int engine = job->engine >> p & 1;
            const nv_status status = engine ? NV_SUCCESS : tables->statuses[at];
            const size_t actual = engine ? tables->engine_actual[at] : tables->actual[at];
            if (status == NV_SUCCESS && actual == tables->room[at]) continue;
            job->error = status;
            job->at_plane = (uint32_t)p;
            job->at_block = b;
            job->found = actual > UINT32_MAX ? UINT32_MAX : (uint32_t)actual;
            job->wanted = (uint32_t)tables->room[at];
            return 0;
        }
    }
    return 1;
}

static int decode(ck_lane *lane, decode_round *round) {
    const ck_codec *codec = lane->codec;
    ck_tables tables;
    ck_group groups[2 * CK_FORMATS];
    int group_count;
    make_tables(lane, round, &tables, groups, &group_count);
    if (!ck_lane_upload(lane)) return 0;
    const size_t outputs_at = lane->table_used;
    tables.actual = ck_lane_table(lane, round->blocks * 8, &tables.actual_at);
    tables.statuses = ck_lane_table(lane, round->blocks * 4, &tables.statuses_at);
    tables.engine_actual = ck_lane_table(lane, round->blocks * 4, &tables.engine_actual_at);
    const size_t outputs = lane->table_used - outputs_at;
    tables.sums = ck_lane_table(lane, (size_t)round->count * 8, &tables.sums_at);
    /* What a decoder should leave unwritten is then no size that could be believed. */
    if (ck_lane_failed(lane, codec->cuda->memory_fill(lane->device + outputs_at, 0xff, outputs, lane->stream),
                       "cuMemsetD8Async") ||
        !ck_lane_pieces(lane, tables.spread_at, tables.spreads, tables.spread_longest))
        return 0;
    for (int g = 0; g < group_count; g++)
        if (!(groups[g].engine ? run_engine : run_nvcomp)(lane, &tables, &groups[g])) return 0;
    if (!ck_lane_pieces(lane, tables.after_at, tables.afters, tables.after_longest) ||
        !ck_lane_planes(lane, codec->merge, tables.merges_at, tables.merged) ||
        !ck_lane_sums(lane, tables.ranges_at, ck_lane_seen(lane, tables.sums), (unsigned)round->count) ||
        !ck_lane_download(lane, lane->host + outputs_at, outputs) || !ck_lane_wait(lane))
        return 0;
    for (int i = 0; i < round->count; i++) {
        ck_codec_job *job = round->jobs[i];
        job->raw_crc = tables.sums[2 * i];
        if (decoded(job, &tables)) continue;
        job->failure = CK_FAIL_BLOCK;
        job->call = "";
    }
    ck_lane_finish_all(lane, round->jobs, round->count);
    return 1;
}

void ck_decode(ck_lane *lane, ck_codec_job **jobs, int count) {
    int left = 0;
    for (int i = 0; i < count; i++) {
        ck_codec_job *job = jobs[i];
        const char *why = choose(lane->codec, job);
        memset(job->lay, 0, sizeof job->lay);
        jobs[i] = NULL;
        if (why != NULL)
            fail(lane, job, CK_FAIL_DECODER, why);
        else
            jobs[left++] = job;
    }
    for (int done = 0; done < left;) {
        decode_round round;
        if (!gather_round(lane, jobs + done, left - done, &round)) {
            if (lane->failure != CK_FAIL_SCRATCH) return;
            lane->failure = CK_FAIL_NONE;
            ck_codec_job *job = jobs[done];
            jobs[done++] = NULL;
            fail(lane, job, CK_FAIL_SCRATCH, "");
            continue;
        }
        const int step = round.count;
        if (!bring(lane, &round)) return;
        if (round.count && !decode(lane, &round)) return;
        done += step;
    }
}
