/* The formats: what the library answers of sizes and alignments (as nvCOMP 6.0 answered, or near it: measured of
 * the real library), and the codecs that run here. The others answer "not supported" when they are run. */
#define _GNU_SOURCE
#include "codecs.h"
#include "nvcomp.h"

#include <stdlib.h>
#include <string.h>

#define MIB ((size_t)1 << 20)

static size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }
static NvStatus any_options(const NvOptions *options) { return (void)options, NV_SUCCESS; }
static NvStatus level_options(const NvOptions *options) {
    return options->word[0] >= 0 && options->word[0] <= 5 ? NV_SUCCESS : NV_NOT_SUPPORTED;
}
static NvStatus engine_backend(const NvOptions *options) {
    return options->word[0] >= BACKEND_DEFAULT && options->word[0] <= BACKEND_CUDA ? NV_SUCCESS : NV_NOT_SUPPORTED;
}
static NvStatus cuda_backend(const NvOptions *options) {
    return options->word[0] == BACKEND_HARDWARE ? NV_INVALID_VALUE : engine_backend(options);
}
static size_t no_temp(size_t chunks, size_t n, const NvOptions *options) {
    return (void)chunks, (void)n, (void)options, 0;
}

static NvStatus status_of(Decoded decoded) {
    return decoded == DECODED ? NV_SUCCESS : decoded == DECODE_NO_LIBRARY ? NV_INTERNAL : NV_CANNOT_DECOMPRESS;
}

/* Deflate */

static size_t deflate_bound(size_t n, const NvOptions *options) {
    (void)options;
    size_t bytes = round_up(n * 9 / 4 + 32 + n / 1024 * 12, 8);
    return bytes < 64 ? 64 : bytes;
}

static size_t deflate_temp(size_t chunks, size_t n, const NvOptions *options) {
    size_t more = n > 65536; /* chunks of more than 64 KiB cost nearly twice as much a byte */
    switch (options->word[0]) {
    case 0: return 0;
    case 1: return chunks * (32800 + (more ? 9 : 5) * n) + 8;
    case 2:
    case 3: return chunks * (327712 + (more ? 9 : 5) * n) + 8;
    case 4: return chunks * (72 + (more ? 33 : 17) * n) + 8;
    default: return chunks * (72 + (more ? 34 : 18) * n) + 8;
    }
}

static NvStatus deflate_compress(const NvOptions *options, const unsigned char *in, size_t n, unsigned char *out,
                                 size_t room, size_t *written) {
    *written = deflate_encode(options->word[0], in, n, out, room);
    return *written ? NV_SUCCESS : NV_INTERNAL;
}

static NvStatus deflate_decompress(const NvOptions *options, const unsigned char *in, size_t n, unsigned char *out,
                                   size_t room, size_t *written) {
    (void)options;
    return status_of(deflate_decode(in, n, out, room, written));
}

static NvStatus deflate_size(const unsigned char *in, size_t n, size_t *size) {
    Decoded decoded = DECODE_NO_ROOM;
    for (size_t room = 4 * n + 65536; decoded == DECODE_NO_ROOM && room < 1024 * MIB; room *= 4) {
        unsigned char *out = malloc(room);
        if (!out) return NV_INTERNAL;
        decoded = deflate_decode(in, n, out, room, size);
        free(out);
    }
    return status_of(decoded);
}

const NvCodec nv_deflate = {
    .name = "Deflate", .compress = {1, 8, 8}, .decompress = {4, 1, 1}, .longest = (size_t)1 << 31,
    .compress_options = level_options, .decompress_options = engine_backend, .bound = deflate_bound,
    .compress_temp = deflate_temp, .decompress_temp = no_temp, .compress_chunk = deflate_compress,
    .decompress_chunk = deflate_decompress, .size_of = deflate_size,
};

/* LZ4 and Snappy: decoded, not written */

static size_t lz4_bound(size_t n, const NvOptions *options) { return (void)options, round_up(n + n / 255 + 7, 8); }
static size_t lz4_temp(size_t chunks, size_t n, const NvOptions *options) {
    return (void)n, (void)options, 32768 * chunks;
}
static NvStatus lz4_decompress(const NvOptions *options, const unsigned char *in, size_t n, unsigned char *out,
                               size_t room, size_t *written) {
    (void)options;
    return status_of(lz4_decode(in, n, out, room, written));
}
const NvCodec nv_lz4 = {
    .name = "LZ4", .compress = {1, 1, 2}, .decompress = {1, 1, 1}, .longest = 16 * MIB,
    .compress_options = any_options, .decompress_options = engine_backend, .bound = lz4_bound,
    .compress_temp = lz4_temp, .decompress_temp = no_temp, .decompress_chunk = lz4_decompress,
};

static size_t snappy_bound(size_t n, const NvOptions *options) { return (void)options, 32 + n + n / 6; }
static NvStatus snappy_decompress(const NvOptions *options, const unsigned char *in, size_t n, unsigned char *out,
                                  size_t room, size_t *written) {
    (void)options;
    return status_of(snappy_decode(in, n, out, room, written));
}
const NvCodec nv_snappy = {
    .name = "Snappy", .compress = {1, 1, 1}, .decompress = {1, 1, 1}, .longest = 16 * MIB,
    .compress_options = any_options, .decompress_options = engine_backend, .bound = snappy_bound,
    .compress_temp = no_temp, .decompress_temp = no_temp, .decompress_chunk = snappy_decompress,
};

/* What the simulation only answers of. */

static size_t gdeflate_bound(size_t n, const NvOptions *options) { return (void)options, 288 + 2 * n; }
const NvCodec nv_gdeflate = {
    .name = "GDeflate", .compress = {1, 4, 8}, .decompress = {4, 1, 1}, .longest = (size_t)1 << 31,
    .compress_options = level_options, .decompress_options = cuda_backend, .bound = gdeflate_bound,
    .compress_temp = no_temp, .decompress_temp = no_temp,
};

static size_t bitcomp_bound(size_t n, const NvOptions *options) {
    (void)options;
    return n <= 8192 ? (n ? 8232 : 32) : round_up(n + n / 16384 * 16, 8) + 32;
}
static size_t bitcomp_temp(size_t chunks, size_t n, const NvOptions *options) {
    return (void)chunks, (void)n, (void)options, 20;
}
const NvCodec nv_bitcomp = {
    .name = "Bitcomp", .compress = {1, 8, 1}, .decompress = {8, 8, 4}, .longest = 16 * MIB,
    .compress_options = any_options, .decompress_options = cuda_backend, .bound = bitcomp_bound,
    .compress_temp = no_temp, .decompress_temp = bitcomp_temp,
};

static size_t zstd_bound(size_t n, const NvOptions *options) { return (void)options, n + n / 21504 + 16; }
static size_t zstd_temp(size_t chunks, size_t n, const NvOptions *options) {
    return (void)options, chunks * (7000 + 3 * (n < 2 * MIB ? n : 2 * MIB));
}
const NvCodec nv_zstd = {
    .name = "Zstd", .compress = {4, 1, 1}, .decompress = {1, 1, 8}, .longest = ((size_t)1 << 31) - 1,
    .compress_options = any_options, .decompress_options = cuda_backend, .bound = zstd_bound,
    .compress_temp = zstd_temp, .decompress_temp = zstd_temp,
};

const NvCodec nv_gzip = {
    .name = "Gzip", .compress = {1, 8, 8}, .decompress = {8, 1, 1}, .longest = (size_t)0x7fffffff << 15,
    .compress_options = level_options, .decompress_options = engine_backend, .bound = deflate_bound,
    .compress_temp = deflate_temp, .decompress_temp = no_temp,
};

const NvCodec nv_cascaded = {
    .name = "Cascaded", .compress = {8, 8, 8}, .decompress = {8, 8, 8}, .longest = 16 * MIB,
    .compress_options = any_options, .decompress_options = cuda_backend, .bound = gdeflate_bound,
    .compress_temp = no_temp, .decompress_temp = no_temp,
};
