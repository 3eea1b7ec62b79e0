/* Twins of the device codec's kernels (pyx/kernels/codec_device.cu): checksums of many ranges, samples, byte planes,
 * pieces. One launch is about many ranges; their number is the second dimension of the grid, of pieces the first. */
#define _GNU_SOURCE
#include "kernels.h"

#include <stdlib.h>
#include <string.h>

typedef struct { uint64_t data, bytes; } Range;
typedef struct { uint64_t data, bytes, planes; } Sample;
typedef struct { uint64_t whole, bytes, planes, plane[4]; } Planes;
typedef struct { uint64_t from, to, bytes; } Piece;
enum { MANY_BLOCKS = 32, SAMPLE_BLOCKS = 16, SAMPLE_PIECES = 16, SAMPLE_BYTES = 1024, PIECE_PART = 65536 };

/* Entry `i` of the table that a parameter points to. */
static CUresult entry(const Launch *launch, int parameter, unsigned i, void *to, uint64_t size) {
    return device_read(to, launch_value(launch, parameter) + i * size, size);
}

static CUresult sum_range(const Range *range, uint32_t result[2]) {
    uint32_t state = 0xffffffffu, any = 0;
    uint64_t at = range->data, left = range->bytes, run;
    while (left) {
        const unsigned char *bytes = reach(at, left, &run);
        if (!bytes) return CUDA_ERROR_ILLEGAL_ADDRESS;
        state = crc32c_more(state, bytes, run);
        if (!any && (bytes[0] || memcmp(bytes, bytes + 1, run - 1) != 0)) any = 1;
        at += run;
        left -= run;
    }
    result[0] = ~state;
    result[1] = any;
    return CUDA_SUCCESS;
}

/* (ranges, scratch, results): results[i] = {CRC32C, 0 only if every byte is 0}. The last word of a range's scratch must
 * be 0 and stays so. */
static CUresult crc_many(const Launch *launch) {
    if (launch->grid[0] != MANY_BLOCKS) return CUDA_ERROR_LAUNCH_FAILED;
    for (unsigned i = 0; i < launch->grid[1]; i++) {
        Range range;
        uint32_t counter, result[2];
        const uint64_t counter_at = launch_value(launch, 1) + 4 * ((2 * MANY_BLOCKS + 1) * i + 2 * MANY_BLOCKS);
        CUresult error = entry(launch, 0, i, &range, sizeof range);
        if (!error) error = device_read(&counter, counter_at, 4);
        if (!error && counter) return CUDA_ERROR_LAUNCH_FAILED;
        if (!error) error = sum_range(&range, result);
        if (!error) error = device_write(launch_value(launch, 2) + 8 * i, result, 8);
        if (error) return error;
    }
    return CUDA_SUCCESS;
}

/* (jobs, counts): adds how often each byte value occurs in a sample, apart by position. */
static CUresult sample_bytes(const Launch *launch) {
    if (launch->grid[0] != SAMPLE_BLOCKS) return CUDA_ERROR_LAUNCH_FAILED;
    for (unsigned i = 0; i < launch->grid[1]; i++) {
        Sample job;
        uint32_t counts[4 * 256];
        const uint64_t counts_at = launch_value(launch, 1) + sizeof counts * i;
        CUresult error = entry(launch, 0, i, &job, sizeof job);
        if (!error) error = device_read(counts, counts_at, sizeof counts);
        for (uint64_t piece = 0; !error && piece < SAMPLE_BLOCKS * SAMPLE_PIECES; piece++) {
            unsigned char bytes[SAMPLE_BYTES];
            const uint64_t at = ((job.bytes - SAMPLE_BYTES) * piece / (SAMPLE_BLOCKS * SAMPLE_PIECES - 1)) & ~3ull;
            error = device_read(bytes, job.data + at, SAMPLE_BYTES);
            for (unsigned k = 0; !error && k < SAMPLE_BYTES; k++) counts[256 * (k & (job.planes - 1)) + bytes[k]]++;
        }
        if (!error) error = device_write(counts_at, counts, sizeof counts);
        if (error) return error;
    }
    return CUDA_SUCCESS;
}

/* A plane's bytes and the chunk's, both through memory of the host: they may lie anywhere. */
static CUresult move_planes(const Planes *job, int merge) {
    unsigned char *whole = malloc(job->bytes), *plane = malloc(job->bytes);
    CUresult error = whole && plane ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    if (!error && !merge) error = device_read(whole, job->whole, job->bytes);
    for (uint64_t p = 0; !error && p < job->planes; p++) {
        const uint64_t length = (job->bytes - p + job->planes - 1) / job->planes;
        if (merge) error = device_read(plane, job->plane[p], length);
        else if (!job->plane[p]) continue;
        for (uint64_t i = 0; !error && i < length; i++) {
            if (merge) whole[i * job->planes + p] = plane[i];
            else plane[i] = whole[i * job->planes + p];
        }
        if (!error && !merge) error = device_write(job->plane[p], plane, length);
    }
    if (!error && merge) error = device_write(job->whole, whole, job->bytes);
    free(whole);
    free(plane);
    return error;
}

static CUresult all_planes(const Launch *launch, int merge) {
    for (unsigned i = 0; i < launch->grid[1]; i++) {
        Planes job;
        CUresult error = entry(launch, 0, i, &job, sizeof job);
        if (!error) error = move_planes(&job, merge);
        if (error) return error;
    }
    return CUDA_SUCCESS;
}

/* (jobs): byte i of plane p is byte i * planes + p of the whole; a plane at address 0 is not wanted. */
static CUresult split_planes(const Launch *launch) { return all_planes(launch, 0); }

/* (jobs): the inverse. */
static CUresult merge_planes(const Launch *launch) { return all_planes(launch, 1); }

/* (pieces): a copy each, of at most grid[1] parts. */
static CUresult copy_pieces(const Launch *launch) {
    for (unsigned i = 0; i < launch->grid[0]; i++) {
        Piece piece;
        CUresult error = entry(launch, 0, i, &piece, sizeof piece);
        if (error) return error;
        const uint64_t covered = (uint64_t)launch->grid[1] * PIECE_PART;
        const uint64_t bytes = piece.bytes < covered ? piece.bytes : covered;
        unsigned char *copy = malloc(bytes ? bytes : 1);
        if (!copy) return CUDA_ERROR_OUT_OF_MEMORY;
        error = device_read(copy, piece.from, bytes);
        if (!error) error = device_write(piece.to, copy, bytes);
        free(copy);
        if (error) return error;
    }
    return CUDA_SUCCESS;
}

/* (from, to, granules): 16 bytes each. */
static CUresult copy_table(const Launch *launch) {
    const uint64_t granules = launch_value(launch, 2), bytes = 16 * granules;
    if ((uint64_t)launch->grid[0] * launch->block[0] < granules) return CUDA_ERROR_LAUNCH_FAILED;
    unsigned char *copy = malloc(bytes ? bytes : 1);
    if (!copy) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult error = device_read(copy, launch_value(launch, 0), bytes);
    if (!error) error = device_write(launch_value(launch, 1), copy, bytes);
    free(copy);
    return error;
}

const Kernel codec_kernels[] = {
    {"ckptpipe_crc_many", {8, 8, 8}, crc_many},
    {"ckptpipe_sample_bytes", {8, 8}, sample_bytes},
    {"ckptpipe_split_planes", {8}, split_planes},
    {"ckptpipe_merge_planes", {8}, merge_planes},
    {"ckptpipe_copy_pieces", {8}, copy_pieces},
    {"ckptpipe_copy_table", {8, 8, 8}, copy_table},
    {.name = NULL},
};
