#include "deflate.h"

#include <stdlib.h>
#include <string.h>

/* Literals and the end-of-block symbol; no lengths, no distances. */
#define SYMBOLS 257
#define END 256
/* Four codes and the seven bits that a store may leave over fit into 64 bits. RFC 1951 allows 15. */
#define LONGEST 14
#define CODE_LENGTH_SYMBOLS 19
#define LONGEST_LENGTH_CODE 7
/* Two distance codes of one bit, as zlib writes them where there are no matches: some decoders want a full tree. */
#define DISTANCES 2
#define STORED_MOST 65535u

typedef struct {
    uint32_t count;
    uint16_t symbol;
} weighted;

typedef struct {
    uint8_t lengths[SYMBOLS + DISTANCES]; /* of literals and end of block, then of the distances */
    uint8_t runs[SYMBOLS + DISTANCES];    /* the lengths as code-length symbols */
    uint8_t extras[SYMBOLS + DISTANCES];  /* what follows each of these */
    int run_count;
    uint8_t run_lengths[CODE_LENGTH_SYMBOLS];
    int run_lengths_sent;
    uint64_t bits; /* of the whole stream */
} plan;

static const uint8_t ORDER[CODE_LENGTH_SYMBOLS] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};

static int by_count(const void *a, const void *b) {
    const weighted *left = a, *right = b;
    if (left->count != right->count) return left->count < right->count ? -1 : 1;
    return (int)left->symbol - (int)right->symbol;
}

/* Lengths of a complete prefix code of at most longest bits: Huffman's, with the deepest leaves lifted where it is
   deeper (each leaf beyond the limit is put on the limit, then leaves above go down one until Kraft's sum is 1). */
static void code_lengths(const uint32_t *counts, int symbols, int longest, uint8_t *lengths) {
    weighted leaves[SYMBOLS];
    uint32_t weight[2 * SYMBOLS];
    uint16_t parent[2 * SYMBOLS];
    uint8_t depth[2 * SYMBOLS];
    int used = 0;
    memset(lengths, 0, (size_t)symbols);
    for (int symbol = 0; symbol < symbols; symbol++)
        if (counts[symbol]) leaves[used++] = (weighted){counts[symbol], (uint16_t)symbol};
    /* A code of one symbol still takes one bit; the code must be complete, so another symbol gets the other one. */
    for (int symbol = 0; used < 2; symbol++)
        if (!counts[symbol]) leaves[used++] = (weighted){1, (uint16_t)symbol};
    qsort(leaves, (size_t)used, sizeof *leaves, by_count);

    /* Two queues: leaves by weight, and inner nodes, which come out by weight. */
    for (int i = 0; i < used; i++) weight[i] = leaves[i].count;
    int leaf = 0, inner = used, nodes = used;
    while (nodes < 2 * used - 1) {
        uint32_t sum = 0;
        for (int child = 0; child < 2; child++) {
            int take = leaf < used && (inner >= nodes || weight[leaf] <= weight[inner]) ? leaf++ : inner++;
            sum += weight[take];
            parent[take] = (uint16_t)nodes;
        }
        weight[nodes++] = sum;
    }
    uint32_t of_length[64] = {0};
    depth[nodes - 1] = 0;
    for (int node = nodes - 2; node >= 0; node--) {
        depth[node] = (uint8_t)(depth[parent[node]] + 1);
        if (node < used) of_length[depth[node] > longest ? longest : depth[node]]++;
    }
    uint64_t kraft = 0;
    for (int length = 1; length <= longest; length++) kraft += (uint64_t)of_length[length] << (longest - length);
    while (kraft > 1ull << longest) {
        int length = longest - 1;
        while (!of_length[length]) length--;
        /* A leaf at length becomes a node over itself and one leaf from the limit. */
        of_length[length]--;
        of_length[length + 1] += 2;
        of_length[longest]--;
        kraft--;
    }
    /* The rarest symbols get the longest codes. */
    int at = 0;
    for (int length = longest; length > 0; length--)
        for (uint32_t i = 0; i < of_length[length]; i++) lengths[leaves[at++].symbol] = (uint8_t)length;
}

static inline uint32_t reversed(uint32_t code, int length) {
    uint32_t mirrored = 0;
    for (int i = 0; i < length; i++) mirrored |= (code >> i & 1) << (length - 1 - i);
    return mirrored;
}

/* Codes in the order that RFC 1951, 3.2.2, fixes, bits mirrored as they are sent: length << 16 | code. */
static void assign_codes(const uint8_t *lengths, int symbols, uint32_t *codes) {
    uint32_t of_length[16] = {0}, next[16] = {0};
    for (int symbol = 0; symbol < symbols; symbol++) of_length[lengths[symbol]]++;
    of_length[0] = 0;
    for (int length = 1; length < 16; length++) next[length] = (next[length - 1] + of_length[length - 1]) << 1;
    for (int symbol = 0; symbol < symbols; symbol++) {
        int length = lengths[symbol];
        codes[symbol] = length ? (uint32_t)length << 16 | reversed(next[length]++, length) : 0;
    }
}

/* The lengths as runs (3.2.7): 16 repeats the last 3 to 6 times, 17 and 18 are 3 to 10 and 11 to 138 zeros. */
static void run_lengths(plan *made) {
    int total = SYMBOLS + DISTANCES, count = 0;
    for (int at = 0; at < total;) {
        uint8_t length = made->lengths[at];
        int run = 1;
        while (at + run < total && made->lengths[at + run] == length) run++;
        at += run;
        if (length) {
            made->runs[count++] = length;
            run--;
        }
        while (run >= 3) {
            int most = length ? 6 : 138;
            int part = run < most ? run : most;
            made->runs[count] = length ? 16 : part <= 10 ? 17 : 18;
            made->extras[count++] = (uint8_t)(part - (length || part <= 10 ? 3 : 11));
            run -= part;
        }
        while (run-- > 0) made->runs[count++] = length;
    }
    made->run_count = count;
}

static int extra_bits(int symbol) { return symbol == 16 ? 2 : symbol == 17 ? 3 : symbol == 18 ? 7 : 0; }

static void count_literals(const unsigned char *source, size_t nbytes, uint32_t *counts) {
    uint32_t tables[4][256];
    memset(tables, 0, sizeof tables);
    size_t i = 0;
    for (; i + 8 <= nbytes; i += 8) {
        uint64_t word;
        memcpy(&word, source + i, 8);
        for (int j = 0; j < 8; j++) tables[j & 3][word >> (8 * j) & 255]++;
    }
    for (; i < nbytes; i++) tables[0][source[i]]++;
    for (int byte = 0; byte < 256; byte++)
        counts[byte] = tables[0][byte] + tables[1][byte] + tables[2][byte] + tables[3][byte];
    counts[END] = 1;
}

static void make_plan(const unsigned char *source, size_t nbytes, plan *made) {
    uint32_t counts[SYMBOLS], run_counts[CODE_LENGTH_SYMBOLS] = {0};
    count_literals(source, nbytes, counts);
    code_lengths(counts, SYMBOLS, LONGEST, made->lengths);
    memset(made->lengths + SYMBOLS, 1, DISTANCES);
    run_lengths(made);
    for (int i = 0; i < made->run_count; i++) run_counts[made->runs[i]]++;
    code_lengths(run_counts, CODE_LENGTH_SYMBOLS, LONGEST_LENGTH_CODE, made->run_lengths);
    made->run_lengths_sent = CODE_LENGTH_SYMBOLS;
    while (made->run_lengths_sent > 4 && !made->run_lengths[ORDER[made->run_lengths_sent - 1]]) made->run_lengths_sent--;
    made->bits = 3 + 5 + 5 + 4 + 3 * (uint64_t)made->run_lengths_sent;
    for (int i = 0; i < made->run_count; i++) made->bits += made->run_lengths[made->runs[i]] + extra_bits(made->runs[i]);
    for (int symbol = 0; symbol < SYMBOLS; symbol++) made->bits += (uint64_t)counts[symbol] * made->lengths[symbol];
}

static size_t stored_size(size_t nbytes) {
    size_t blocks = nbytes ? (nbytes + STORED_MOST - 1) / STORED_MOST : 1;
    return nbytes + 5 * blocks;
}

static size_t store(const unsigned char *source, size_t nbytes, unsigned char *destination) {
    unsigned char *to = destination;
    do {
        size_t part = nbytes < STORED_MOST ? nbytes : STORED_MOST;
        nbytes -= part;
        *to++ = nbytes == 0; /* BFINAL; BTYPE 0, and the rest of the byte is skipped */
        *to++ = (unsigned char)part;
        *to++ = (unsigned char)(part >> 8);
        *to++ = (unsigned char)~part;
        *to++ = (unsigned char)(~part >> 8);
        if (part) memcpy(to, source, part);
        to += part;
        source += part;
    } while (nbytes);
    return (size_t)(to - destination);
}

typedef struct {
    uint64_t bits;
    int count;
    unsigned char *to;
} writer;

/* Byte by byte: never past the last byte of the stream. */
static inline void put(writer *out, uint32_t value, int count) {
    out->bits |= (uint64_t)value << out->count;
    out->count += count;
    while (out->count >= 8) {
        *out->to++ = (unsigned char)out->bits;
        out->bits >>= 8;
        out->count -= 8;
    }
}

static void put_header(writer *out, const plan *made) {
    uint32_t codes[CODE_LENGTH_SYMBOLS];
    assign_codes(made->run_lengths, CODE_LENGTH_SYMBOLS, codes);
    put(out, 1 | 2 << 1, 3); /* BFINAL, BTYPE 2: Huffman codes that are sent */
    put(out, SYMBOLS - 257, 5);
    put(out, DISTANCES - 1, 5);
    put(out, (uint32_t)made->run_lengths_sent - 4, 4);
    for (int i = 0; i < made->run_lengths_sent; i++) put(out, made->run_lengths[ORDER[i]], 3);
    for (int i = 0; i < made->run_count; i++) {
        put(out, codes[made->runs[i]] & 0xffff, made->run_lengths[made->runs[i]]);
        put(out, made->extras[i], extra_bits(made->runs[i]));
    }
}

size_t ck_deflate_literals_size(const unsigned char *source, size_t nbytes) {
    plan made;
    memset(&made, 0, sizeof made);
    make_plan(source, nbytes, &made);
    size_t coded = (size_t)((made.bits + 7) / 8), stored = stored_size(nbytes);
    return coded < stored ? coded : stored;
}

size_t ck_deflate_literals(const unsigned char *source, size_t nbytes, unsigned char *destination, size_t room) {
    plan made;
    memset(&made, 0, sizeof made);
    make_plan(source, nbytes, &made);
    size_t coded = (size_t)((made.bits + 7) / 8), stored = stored_size(nbytes);
    if (stored <= coded) return stored <= room ? store(source, nbytes, destination) : 0;
    if (coded > room) return 0;
    uint32_t codes[SYMBOLS];
    assign_codes(made.lengths, SYMBOLS, codes);
    writer out = {0, 0, destination};
    put_header(&out, &made);
    const unsigned char *limit = destination + room;
    size_t i = 0;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    uint64_t bits = out.bits;
    int count = out.count; /* at most 7 */
    for (; i + 4 <= nbytes && limit - out.to >= 8; i += 4) {
        for (int j = 0; j < 4; j++) {
            uint32_t code = codes[source[i + j]];
            bits |= (uint64_t)(code & 0xffff) << count;
            count += code >> 16;
        }
        memcpy(out.to, &bits, 8);
        out.to += count >> 3;
        bits >>= count & ~7; /* count is at most 7 + 4 * LONGEST, which is 63 */
        count &= 7;
    }
    out.bits = bits;
    out.count = count;
#endif
    for (; i < nbytes; i++) put(&out, codes[source[i]] & 0xffff, (int)(codes[source[i]] >> 16));
    put(&out, codes[END] & 0xffff, (int)(codes[END] >> 16));
    if (out.count) *out.to++ = (unsigned char)out.bits;
    return (size_t)(out.to - destination);
}
