/* ANS, a coder of the simulation's own: nobody but it reads its streams ("SANS").
 *
 * Elements of 1, 2 or 4 bytes are split into byte planes. A plane is stored, or coded by rANS over bytes with
 * frequencies of 12 bits: table of 256 half words, then the state, then its bytes in the order they are read. */
#define _GNU_SOURCE
#include "nvcomp.h"

#include <stdlib.h>
#include <string.h>

#define MAGIC 0x534e4153u /* "SANS" */
#define SCALE_BITS 12
#define SCALE (1u << SCALE_BITS)
#define LOWEST (1u << 23) /* of the state between two symbols */
#define TABLE_BYTES 512u

typedef struct { uint32_t magic, type, raw_bytes, reserved; } Header;
typedef struct { uint32_t coded, bytes; } PlaneHeader;

static size_t width_of(int type) { return type == NV_FLOAT16 ? 2 : type == NV_FLOAT32 ? 4 : 1; }
static int known(int type) {
    return type == NV_CHAR || type == NV_UCHAR || type == NV_FLOAT8 || type == NV_FLOAT16 || type == NV_FLOAT32;
}

/* Frequencies that sum to SCALE, at least 1 of each byte that occurs. */
static void make_table(const unsigned char *plane, size_t n, uint16_t *table) {
    size_t count[256] = {0};
    uint32_t total = 0;
    int most = 0;
    for (size_t i = 0; i < n; i++) count[plane[i]]++;
    for (int s = 0; s < 256; s++) {
        uint32_t share = (uint32_t)(count[s] * (uint64_t)(SCALE - 256) / n);
        table[s] = (uint16_t)(count[s] ? share + 1 : 0);
        total += table[s];
        if (count[s] > count[most]) most = s;
    }
    table[most] = (uint16_t)(table[most] + SCALE - total);
}

/* 0 when it would take as many bytes as the plane has. */
static size_t encode_plane(const unsigned char *plane, size_t n, unsigned char *out) {
    if (n <= TABLE_BYTES + 16) return 0;
    uint16_t table[256];
    uint32_t start[257] = {0}, state = LOWEST;
    make_table(plane, n, table);
    for (int s = 0; s < 256; s++) start[s + 1] = start[s] + table[s];
    size_t at = n; /* written from the end, as it is read from the front */
    for (size_t i = n; i-- > 0;) {
        unsigned char s = plane[i];
        uint32_t limit = (uint32_t)(((uint64_t)(LOWEST >> SCALE_BITS) << 8) * table[s]);
        for (; state >= limit; state >>= 8) {
            if (at <= TABLE_BYTES + 8) return 0;
            out[--at] = (unsigned char)state;
        }
        state = ((state / table[s]) << SCALE_BITS) + state % table[s] + start[s];
    }
    memmove(out + TABLE_BYTES + 4, out + at, n - at);
    memcpy(out, table, TABLE_BYTES);
    memcpy(out + TABLE_BYTES, &state, 4);
    return TABLE_BYTES + 4 + (n - at);
}

static int decode_plane(const unsigned char *in, size_t bytes, unsigned char *plane, size_t n) {
    uint16_t table[256];
    uint32_t start[257] = {0}, state;
    unsigned char symbol[SCALE];
    if (bytes < TABLE_BYTES + 4) return 0;
    memcpy(table, in, TABLE_BYTES);
    memcpy(&state, in + TABLE_BYTES, 4);
    for (int s = 0; s < 256; s++) {
        start[s + 1] = start[s] + table[s];
        if (start[s + 1] > SCALE) return 0;
        memset(symbol + start[s], s, table[s]);
    }
    if (start[256] != SCALE) return 0;
    size_t at = TABLE_BYTES + 4;
    for (size_t i = 0; i < n; i++) {
        unsigned char s = symbol[state % SCALE];
        plane[i] = s;
        state = table[s] * (state >> SCALE_BITS) + state % SCALE - start[s];
        for (; state < LOWEST; state = state << 8 | in[at++])
            if (at == bytes) return 0;
    }
    return at == bytes && state == LOWEST;
}

static NvStatus compress_options(const NvOptions *options) {
    return options->word[0] == 0 && known(options->word[1]) ? NV_SUCCESS : NV_NOT_SUPPORTED;
}

static NvStatus decompress_options(const NvOptions *options) {
    if (options->word[0] == BACKEND_HARDWARE) return NV_INVALID_VALUE;
    return known(options->word[1]) || options->word[1] == NV_BITS ? NV_SUCCESS : NV_NOT_SUPPORTED;
}

static size_t bound(size_t n, const NvOptions *options) {
    size_t bytes = (1056 + n * (options->word[1] == NV_FLOAT16 ? 9 : 11) / 8 + 15) / 16 * 16;
    return bytes < 3616 ? 3616 : bytes;
}

static size_t no_temp(size_t chunks, size_t n, const NvOptions *options) {
    return (void)chunks, (void)n, (void)options, 0;
}

static NvStatus compress_chunk(const NvOptions *options, const unsigned char *in, size_t n, unsigned char *out,
                               size_t room, size_t *written) {
    size_t width = width_of(options->word[1]), count = n / width, at = sizeof(Header);
    if (n % width) return NV_WRONG_INPUT_LENGTH;
    if (room < sizeof(Header) + width * sizeof(PlaneHeader) + n) return NV_OUTPUT_TOO_SMALL;
    unsigned char *plane = malloc(count + 1);
    if (!plane) return NV_INTERNAL;
    Header header = {MAGIC, (uint32_t)options->word[1], (uint32_t)n, 0};
    memcpy(out, &header, sizeof header);
    for (size_t k = 0; k < width; k++) {
        for (size_t i = 0; i < count; i++) plane[i] = in[i * width + k];
        unsigned char *body = out + at + sizeof(PlaneHeader);
        size_t coded = encode_plane(plane, count, body);
        if (!coded) memcpy(body, plane, count);
        PlaneHeader part = {coded != 0, (uint32_t)(coded ? coded : count)};
        memcpy(out + at, &part, sizeof part);
        at += sizeof part + part.bytes;
    }
    free(plane);
    *written = at;
    return NV_SUCCESS;
}

static NvStatus read_header(const unsigned char *in, size_t n, Header *header) {
    if (n < sizeof *header) return NV_CANNOT_DECOMPRESS;
    memcpy(header, in, sizeof *header);
    if (header->magic != MAGIC || !known((int)header->type) || header->raw_bytes % width_of((int)header->type))
        return NV_CANNOT_DECOMPRESS;
    return NV_SUCCESS;
}

static NvStatus decompress_chunk(const NvOptions *options, const unsigned char *in, size_t n, unsigned char *out,
                                 size_t room, size_t *written) {
    Header header;
    NvStatus status = read_header(in, n, &header);
    if (status != NV_SUCCESS) return status;
    int wanted = options->word[1] == NV_UCHAR ? NV_CHAR : options->word[1];
    int found = header.type == NV_UCHAR ? NV_CHAR : (int)header.type;
    if ((wanted != NV_BITS && wanted != found) || header.raw_bytes > room) return NV_CANNOT_DECOMPRESS;
    size_t width = width_of(found), count = header.raw_bytes / width, at = sizeof header;
    unsigned char *plane = malloc(count + 1);
    if (!plane) return NV_INTERNAL;
    for (size_t k = 0; k < width && status == NV_SUCCESS; k++) {
        PlaneHeader part = {0, 0};
        status = NV_CANNOT_DECOMPRESS;
        if (n - at < sizeof part) break;
        memcpy(&part, in + at, sizeof part);
        at += sizeof part;
        if (part.bytes > n - at || (!part.coded && part.bytes != count)) break;
        if (!part.coded) memcpy(plane, in + at, count);
        else if (!decode_plane(in + at, part.bytes, plane, count)) break;
        for (size_t i = 0; i < count; i++) out[i * width + k] = plane[i];
        at += part.bytes;
        status = NV_SUCCESS;
    }
    free(plane);
    *written = header.raw_bytes;
    return status == NV_SUCCESS && at != n ? NV_CANNOT_DECOMPRESS : status;
}

static NvStatus size_of(const unsigned char *in, size_t n, size_t *size) {
    Header header;
    NvStatus status = read_header(in, n, &header);
    if (status == NV_SUCCESS) *size = header.raw_bytes;
    return status;
}

const NvCodec nv_ans = {
    .name = "ANS", .compress = {16, 16, 1}, .decompress = {16, 16, 1}, .longest = (size_t)1 << 24,
    .compress_options = compress_options, .decompress_options = decompress_options, .bound = bound,
    .compress_temp = no_temp, .decompress_temp = no_temp, .compress_chunk = compress_chunk,
    .decompress_chunk = decompress_chunk, .size_of = size_of,
};
