#include "codec_lane.h"

#include <string.h>

/* Chunks of a batch that are compressed side by side: as many as the lane holds. */
typedef struct {
    ck_codec_job **jobs;
    int count;
    size_t blocks;
    uint32_t wave;    /* blocks a launch */
    size_t temp;      /* bytes of temporary memory that this takes */
    cu_address *from; /* by block, as the device sees it */
    size_t *sizes, *lengths;
    nv_status *statuses;
    cu_address *to;
} encode_round;

/* What was found in the chunk; the GPU has come so far. */
static void read_scan(ck_codec_job *job) {
    job->raw_crc = job->scanned[0];
    job->zero = job->scanned[1] == 0;
}

/* Which planes are tried, where that needs no look at the bytes. Whether it does for any of the chunks. */
static int lay(ck_codec_job **jobs, int count) {
    int looks = 0;
    for (int i = 0; i < count; i++) {
        ck_plan_lay(jobs[i]);
        if (ck_plan_samples(jobs[i]))
            looks = 1;
        else
            ck_plan_try(jobs[i], NULL);
    }
    return looks;
}

/* Checksums, zero tests and samples of all chunks, in one pass each. Enqueued alone, unless samples are needed. */
static int scan(ck_lane *lane, ck_codec_job **jobs, int count) {
    const ck_codec *codec = lane->codec;
    cu_address ranges_at, samples_at, results_at, counts_at = 0;
    ck_lane_begin(lane);
    ck_range *ranges = ck_lane_table(lane, (size_t)count * sizeof *ranges, &ranges_at);
    ck_sample *samples = ck_lane_table(lane, (size_t)count * sizeof *samples, &samples_at);
    unsigned sampled = 0;
    for (int i = 0; i < count; i++) {
        const ck_codec_job *job = jobs[i];
        ranges[i] = (ck_range){job->device, job->raw};
        if (ck_plan_samples(job))
            samples[sampled++] = (ck_sample){job->device, job->raw, (uint64_t)job->plan->planes};
    }
    if (!ck_lane_upload(lane)) return 0;
    const uint32_t *results = ck_lane_table(lane, (size_t)count * 8, &results_at);
    for (int i = 0; i < count; i++) jobs[i]->scanned = results + 2 * i;
    if (!ck_lane_sums(lane, ranges_at, ck_lane_seen(lane, results), (unsigned)count)) return 0;
    if (sampled == 0) {
        ck_lane_keep(lane);
        return 1;
    }
    const uint32_t *counts = ck_lane_table(lane, sampled * (size_t)4096, &counts_at);
    void *arguments[] = {&samples_at, &counts_at};
    if (ck_lane_failed(lane, codec->cuda->memory_fill(counts_at, 0, sampled * (size_t)4096, lane->stream),
                       "cuMemsetD8Async") ||
        !ck_lane_launch(lane, codec->sample, CK_SAMPLE_BLOCKS, sampled, arguments) ||
        !ck_lane_download(lane, counts, sampled * (size_t)4096) || !ck_lane_wait(lane))
        return 0;
    for (int i = 0; i < count; i++) {
        read_scan(jobs[i]);
        if (!ck_plan_samples(jobs[i])) continue;
        ck_plan_try(jobs[i], counts);
        counts += 1024;
    }
    return 1;
}

/* How many of the jobs are done side by side, at least one: the arena and the tables hold them. */
static int gather_round(ck_lane *lane, ck_codec_job **jobs, int count, encode_round *round) {
    const ck_plan *plan = jobs[0]->plan;
    size_t used = 0;
    *round = (encode_round){.jobs = jobs, .wave = 1};
    for (; round->count < count; round->count++) {
        size_t blocks, temp = 0;
        const size_t room = ck_plan_room(plan, jobs[round->count], &blocks);
        const size_t all = round->blocks + blocks;
        const uint32_t wave = all < plan->wave ? (uint32_t)all : plan->wave;
        if (blocks) {
            if (ck_lane_refused(lane, ck_plan_temp(lane->codec, plan, wave, &temp), plan->format,
                                "nvcompBatched…CompressGetTempSize"))
                return 0;
            if (used + room + temp + 256 > lane->arena_room ||
                ck_table_bytes((size_t)round->count + 1, all) > lane->table_room) {
                if (round->count) break;
                lane->failure = CK_FAIL_SCRATCH; /* ck_plan_measure has made sure that this is not so */
                return 0;
            }
            round->wave = wave;
            round->temp = temp;
        }
        used += room;
        round->blocks = all;
    }
    return 1;
}

/* Splits planes into scratch and lists every block; then nvCOMP, so many blocks at a time. */
static int compress(ck_lane *lane, encode_round *round) {
    const ck_codec *codec = lane->codec;
    const ck_plan *plan = round->jobs[0]->plan;
    const size_t blocks = round->blocks;
    cu_address from_at, sizes_at, to_at, splits_at, pieces_at, lengths_at, statuses_at;
    ck_lane_begin(lane);
    lane->arena_used = 0;
    round->from = ck_lane_table(lane, blocks * sizeof *round->from, &from_at);
    round->sizes = ck_lane_table(lane, blocks * sizeof *round->sizes, &sizes_at);
    round->to = ck_lane_table(lane, blocks * sizeof *round->to, &to_at);
    ck_split *splits = ck_lane_table(lane, (size_t)round->count * sizeof *splits, &splits_at);
    ck_piece *pieces = ck_lane_table(lane, (size_t)round->count * sizeof *pieces, &pieces_at);
    unsigned split = 0, copied = 0;
    uint64_t longest = 0;
    size_t at = 0;
    for (int i = 0; i < round->count; i++) {
        ck_codec_job *job = round->jobs[i];
        if (job->tried == 0) continue;
        memset(job->lay, 0, sizeof job->lay);
        if (plan->planes > 1) {
            ck_split *entry = &splits[split++];
            *entry = (ck_split){job->device, job->raw, (uint64_t)plan->planes, {0}};
            for (int p = 0; p < plan->planes; p++)
                if (job->tried >> p & 1) entry->plane[p] = job->lay[p] = ck_lane_take(lane, job->plane[p].raw);
        } else if (job->device % plan->input_alignment) {
            job->lay[0] = ck_lane_take(lane, job->raw);
            pieces[copied++] = (ck_piece){job->device, job->lay[0], job->raw};
            if (job->raw > longest) longest = job->raw;
        } else {
            job->lay[0] = job->device;
        }
        for (int p = 0; p < plan->planes; p++) {
            const ck_plane *plane = &job->plane[p];
            if (!(job->tried >> p & 1)) continue;
            job->coded_at[p] = (uint32_t)at;
            const cu_address slots = ck_lane_take(lane, plane->blocks * plan->slot);
            for (uint32_t b = 0; b < plane->blocks; b++, at++) {
                const uint64_t done = (uint64_t)b * plane->block_bytes;
                round->from[at] = job->lay[p] + done;
                round->sizes[at] = plane->raw - done < plane->block_bytes ? plane->raw - done : plane->block_bytes;
                round->to[at] = slots + b * plan->slot;
            }
        }
    }
    const size_t lengths_bytes = ck_round(blocks * sizeof *round->lengths, 256);
    const size_t outputs = lengths_bytes + blocks * sizeof *round->statuses;
    round->lengths = ck_lane_table(lane, lengths_bytes, &lengths_at);
    round->statuses = ck_lane_table(lane, blocks * sizeof *round->statuses, &statuses_at);
    memset(round->lengths, 0xff, outputs); /* what nvCOMP should leave unwritten is no length that is believed */
    if (!ck_lane_upload(lane) || !ck_lane_planes(lane, codec->split, splits_at, split) ||
        !ck_lane_pieces(lane, pieces_at, copied, longest))
        return 0;
    const cu_address temp = ck_lane_take(lane, round->temp);
    for (size_t done = 0; done < blocks; done += round->wave) {
        const size_t wave = blocks - done < round->wave ? blocks - done : round->wave;
        const nv_status status = codec->nvcomp->format[plan->format].compress(
            (const cu_address *)(from_at + 8 * done), (const size_t *)(sizes_at + 8 * done), plan->block_bytes, wave,
            temp, round->temp, (const cu_address *)(to_at + 8 * done),
            (size_t *)(lengths_at + 8 * done), plan->options, (nv_status *)(statuses_at + 4 * done), lane->stream);
        if (ck_lane_refused(lane, status, plan->format, "nvcompBatched…CompressAsync")) return 0;
    }
    return ck_lane_download(lane, round->lengths, outputs) && ck_lane_wait(lane);
}

/* What nvCOMP made of a chunk's blocks. 0: the job has failed. */
static int read_lengths(const encode_round *round, ck_codec_job *job) {
    const ck_plan *plan = job->plan;
    for (int p = 0; p < plan->planes; p++) {
        const ck_plane *plane = &job->plane[p];
        if (!(job->tried >> p & 1)) continue;
        for (uint32_t b = 0; b < plane->blocks; b++) {
            const size_t at = job->coded_at[p] + b, length = round->lengths[at];
            const nv_status status = round->statuses[at];
            if (status == NV_CANNOT_COMPRESS) { /* it does not shrink */
                job->tried &= ~(1 << p);
                break;
            }
            if (status != NV_SUCCESS || length == 0 || length > plan->slot) {
                job->failure = CK_FAIL_NVCOMP;
                job->format = plan->format;
                job->error = status;
                job->call = "nvcompBatched…CompressAsync";
                job->at_plane = (uint32_t)p;
                job->at_block = b;
                return 0;
            }
            job->lengths[plane->first + b] = (uint32_t)length;
        }
    }
    return 1;
}

/* The stored planes one behind the other: coded blocks are gathered, raw planes come straight from the chunk. They are
   ready to be copied at lane->packed, and checksummed after that. */
static int pack(ck_lane *lane, encode_round *round, const uint32_t **sums) {
    const ck_codec *codec = lane->codec;
    cu_address pieces_at, splits_at, ranges_at, sums_at;
    /* The addresses of the blocks' slots, in the table that is made anew, are those of the arena. */
    ck_piece *pieces;
    ck_split *splits;
    ck_range *ranges;
    size_t piece = 0;
    unsigned split = 0, stored = 0;
    uint64_t longest = 0;
    cu_address slots[CK_BATCH][CK_PLANES];
    for (int i = 0; i < round->count; i++)
        for (int p = 0; p < CK_PLANES; p++)
            if (round->jobs[i]->planes && round->jobs[i]->plane[p].format != CK_FORMAT_NONE &&
                p < round->jobs[i]->planes)
                slots[i][p] = round->to[round->jobs[i]->coded_at[p]];
    ck_lane_begin(lane);
    pieces = ck_lane_table(lane, round->blocks * sizeof *pieces, &pieces_at);
    splits = ck_lane_table(lane, (size_t)round->count * sizeof *splits, &splits_at);
    ranges = ck_lane_table(lane, (size_t)round->count * sizeof *ranges, &ranges_at);
    for (int i = 0; i < round->count; i++) {
        ck_codec_job *job = round->jobs[i];
        if (job->planes == 0) continue;
        job->out = ck_lane_take(lane, job->stored);
        ranges[stored++] = (ck_range){job->out, job->stored};
        ck_split raw = {job->device, job->raw, (uint64_t)job->planes, {0}};
        int any_raw = 0;
        cu_address to = job->out;
        for (int p = 0; p < job->planes; p++) {
            const ck_plane *plane = &job->plane[p];
            if (plane->format == CK_FORMAT_NONE) {
                raw.plane[p] = to;
                any_raw = 1;
                to += plane->stored;
                continue;
            }
            for (uint32_t b = 0; b < plane->blocks; b++) {
                const uint32_t length = job->lengths[plane->first + b];
                pieces[piece++] = (ck_piece){slots[i][p] + b * job->plan->slot, to, length};
                if (length > longest) longest = length;
                to += length;
            }
        }
        if (any_raw) splits[split++] = raw;
    }
    *sums = ck_lane_table(lane, (size_t)round->count * 8, &sums_at);
    const cu_stream usual = lane->stream; /* has come to its end: the lengths are here */
    lane->stream = lane->urgent;
    const int good = ck_lane_upload(lane) && ck_lane_pieces(lane, pieces_at, piece, longest) &&
                     ck_lane_planes(lane, codec->split, splits_at, split) &&
                     !ck_lane_failed(lane, codec->cuda->event_record(lane->packed, lane->stream), "cuEventRecord");
    lane->stream = usual;
    return good &&
           !ck_lane_failed(lane, codec->cuda->stream_wait(lane->stream, lane->packed, 0), "cuStreamWaitEvent") &&
           ck_lane_sums(lane, ranges_at, ck_lane_seen(lane, *sums), stored);
}

/* Chunks whose arrival is told of at once, which wakes threads: a few, and not more than half of the batch, so that
   their slots are filled again while the others are copied. */
static int together(const ck_codec *codec, int count) {
    const int half = count / 2, most = half < codec->together ? half : codec->together;
    return most < 1 ? 1 : most;
}

/* Where the chunks end that are told of together with chunk i. */
static int end_of(const encode_round *round, int i, int step) {
    const int end = (i / step + 1) * step;
    return end < round->count ? end : round->count;
}

/* Copies over the link, behind those of the lanes that came before; an event after the last in each stream of every
   `step` of them. */
static int enqueue(ck_lane *lane, const encode_round *round, int coded, int step) {
    ck_codec *codec = lane->codec;
    const ck_cuda *cuda = codec->cuda;
    int good = 1;
    pthread_mutex_lock(&codec->link_mutex);
    for (int k = 0; good && coded && k < codec->links; k++)
        good = !ck_lane_failed(lane, cuda->stream_wait(codec->link[k], lane->packed, 0), "cuStreamWaitEvent");
    for (int i = 0; good && i < round->count; i++) {
        const ck_codec_job *job = round->jobs[i];
        const cu_stream link = codec->link[codec->turn++ % (unsigned)codec->links];
        if (!__atomic_load_n(&job->cancelled, __ATOMIC_RELAXED))
            good = !ck_lane_failed(lane, cuda->copy_down(job->host, job->planes ? job->out : job->device, job->stored,
                                                         link),
                                   "cuMemcpyDtoHAsync");
        if (good && i + codec->links >= end_of(round, i, step))
            good = !ck_lane_failed(lane, cuda->event_record(lane->copied[i], link), "cuEventRecord");
    }
    pthread_mutex_unlock(&codec->link_mutex);
    return good;
}

/* Copies all chunks to the host; a few at a time are finished as soon as they have arrived. */
static int fetch(ck_lane *lane, encode_round *round, int coded, const uint32_t *sums) {
    const ck_codec *codec = lane->codec;
    const int step = together(codec, round->count);
    if (!enqueue(lane, round, coded, step) || (coded && !ck_lane_wait(lane))) return 0;
    for (int i = 0; i < round->count; i++) {
        ck_codec_job *job = round->jobs[i];
        job->stored_crc = job->raw_crc;
        if (job->planes == 0) continue;
        job->stored_crc = sums[0];
        sums += 2;
    }
    for (int done = 0, end; done < round->count; done = end) {
        end = end_of(round, done, step);
        for (int i = end - codec->links > done ? end - codec->links : done; i < end; i++)
            if (ck_lane_failed(lane, codec->cuda->event_synchronize(lane->copied[i]), "cuEventSynchronize")) return 0;
        ck_lane_finish_all(lane, round->jobs + done, end - done);
    }
    return 1;
}

/* Finishes those that are zeros, or that failed; the others move together. How many of these there are. */
static int sift(ck_lane *lane, ck_codec_job **jobs, int count) {
    int left = 0;
    for (int i = 0; i < count; i++) {
        ck_codec_job *job = jobs[i];
        jobs[i] = NULL;
        if (job->zero) {
            job->failure = CK_FAIL_NONE;
            job->stored = 0;
        }
        if (job->zero || job->failure != CK_FAIL_NONE)
            ck_lane_finish(lane, job);
        else
            jobs[left++] = job;
    }
    return left;
}

/* With the scan, which compression follows without a wait, unless samples were needed. */
void ck_encode(ck_lane *lane, ck_codec_job **jobs, int count) {
    const uint32_t *sums = NULL;
    const int looks = lay(jobs, count);
    encode_round round;
    int coded = 0;
    if (looks) {
        if (!scan(lane, jobs, count)) return;
        count = sift(lane, jobs, count);
        if (count == 0) return;
    }
    if (!gather_round(lane, jobs, count, &round)) return;
    ck_lane_give_back(lane, jobs, round.count, count);
    if (!looks && !scan(lane, jobs, round.count)) return;
    if (round.blocks && !compress(lane, &round)) return;
    if (!looks && round.blocks == 0 && !ck_lane_wait(lane)) return;
    for (int i = 0; i < round.count; i++) {
        ck_codec_job *job = jobs[i];
        if (!looks) read_scan(job);
        if (!job->zero && (job->tried == 0 || read_lengths(&round, job))) {
            ck_plan_settle(job);
            coded += job->planes != 0;
        }
    }
    round.count = sift(lane, jobs, round.count);
    if (round.count && (coded == 0 || pack(lane, &round, &sums))) fetch(lane, &round, coded, sums);
}
