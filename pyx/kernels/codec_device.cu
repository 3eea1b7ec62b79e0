/* What a GPU codec does to chunks beside the codec itself: checksums, samples, byte planes, packing. Many ranges a
 * launch (CUDA C++ after crc32c_device.cu, whose names it uses; and C for the test on a CPU).
 *
 * The second dimension of a grid, or for pieces the first, is the index of the range; what is left spreads one
 * range over blocks. Every address may have any alignment; what lies at multiples of 16 goes 16 bytes a thread.
 */

#define MANY_BLOCKS 32u         /* that checksum one range: a row is 128 KiB */
#define PLANE_BLOCKS 64u        /* that split or merge one chunk */
#define SAMPLE_BLOCKS 16u       /* that sample one chunk, each SAMPLE_PIECES pieces */
#define SAMPLE_PIECES 16u
#define SAMPLE_PIECE_BYTES 1024u
#define PIECE_PART 65536ull     /* bytes of a piece that one block copies */
#define X_MANY_ROW X_128K
#define MANY_ROW_GRANULES ((unsigned long long)THREADS * MANY_BLOCKS)

typedef unsigned long long codec_word;
typedef struct { codec_word data, nbytes; } codec_range;
typedef struct { codec_word data, nbytes, planes; } codec_sample;
/* whole: the chunk; plane[p]: where plane p lies, 0 for one that is not wanted (split alone) */
typedef struct { codec_word whole, nbytes, planes, plane[4]; } codec_planes;
typedef struct { codec_word from, to, nbytes; } codec_piece;

#ifdef __CUDACC__
#define BLOCK_SECOND blockIdx.y
#define GRID_FIRST gridDim.x
#define ADD_SHARED(word) atomicAdd(&(word), 1u)
#define ADD_GLOBAL(word, value) atomicAdd(&(word), (value))
#define PICK(low, high, selector) __byte_perm((low), (high), (selector))
#define FUNNEL(low, high, shift) __funnelshift_r((low), (high), (shift))
#else
extern unsigned emulated_second, emulated_first_count;
#define BLOCK_SECOND emulated_second
#define GRID_FIRST emulated_first_count
#define ADD_SHARED(word) (++(word))
#define ADD_GLOBAL(word, value) ((word) += (value))
static inline crc_word PICK(crc_word low, crc_word high, crc_word selector) {
    const codec_word both = (codec_word)high << 32 | low;
    crc_word result = 0;
    for (unsigned i = 0; i < 4; i++) result |= (crc_word)(both >> (8 * ((selector >> (4 * i)) & 7)) & 0xff) << (8 * i);
    return result;
}
static inline crc_word FUNNEL(crc_word low, crc_word high, unsigned shift) {
    return (crc_word)(((codec_word)high << 32 | low) >> (shift & 31));
}
#endif

/* CRC32C and zero test of ranges[y], each by MANY_BLOCKS blocks. scratch: 2 * MANY_BLOCKS + 1 words a range, the last
   of each 0 before the first launch and left 0. results: {CRC32C, 0 only if all bytes are} a range. */
ENTRY ckptpipe_crc_many(const codec_range *ranges, crc_word *scratch, volatile crc_word *results) {
    SHARED crc_word basis[32];
    SHARED crc_word table[4 * 256];
    SHARED crc_word states[THREADS];
    SHARED volatile crc_word nonzero, last;
    const codec_range range = ranges[BLOCK_SECOND];
    const unsigned char *data = (const unsigned char *)range.data;
    const codec_word nbytes = range.nbytes;
    crc_word *mine = scratch + (2 * MANY_BLOCKS + 1) * BLOCK_SECOND;
    const unsigned head = (unsigned)(range.data % GRANULE);
    const unsigned char *base = data - head;
    const codec_word span = head + nbytes;
    const codec_word granules = nbytes < SHORT_BYTES ? 0 : span / GRANULE;
    const unsigned tail = (unsigned)(span % GRANULE);
    const codec_word padding = (MANY_ROW_GRANULES - granules % MANY_ROW_GRANULES) % MANY_ROW_GRANULES;
    const codec_word rows = (granules + padding) / MANY_ROW_GRANULES;

    MAKE_TABLE(X_MANY_ROW)
    SUM_ROWS(MANY_ROW_GRANULES)
    JOIN_BLOCK(states)
    EACH_THREAD(t) {
        if (t == 0) {
            ((volatile crc_word *)mine)[BLOCK_INDEX] = states[0];
            ((volatile crc_word *)mine)[MANY_BLOCKS + BLOCK_INDEX] = nonzero;
            PUBLISH;
            last = LAST_OF(mine + 2 * MANY_BLOCKS, MANY_BLOCKS);
        }
    }
    BARRIER;
    if (!last) return;
    PUBLISH;
    EACH_THREAD(t) {
        states[t] = t < MANY_BLOCKS ? ((volatile crc_word *)mine)[t] : 0;
        if (t < MANY_BLOCKS && ((volatile crc_word *)mine)[MANY_BLOCKS + t]) nonzero = 1;
    }
    BARRIER;
    JOIN(states, 0, X_4K)
    JOIN(states, 1, X_8K)
    JOIN(states, 2, X_16K)
    JOIN(states, 3, X_32K)
    JOIN(states, 4, X_64K)
    EACH_THREAD(t) {
        if (t == 0) {
            const unsigned after = nbytes < SHORT_BYTES ? (unsigned)nbytes : tail;
            crc_word any = nonzero;
            for (unsigned i = 0; i < after; i++) any |= data[nbytes - after + i];
            results[2 * BLOCK_SECOND] = finish(states[0], data, nbytes, tail);
            results[2 * BLOCK_SECOND + 1] = any;
        }
    }
}

/* How often each byte value occurs in a sample of jobs[y] (at least SAMPLE_PIECE_BYTES long), apart by position modulo
   `planes` (1, 2, 4): counts[y][plane][value], 4 * 256 words a job, 0 before. SAMPLE_BLOCKS blocks a job. */
ENTRY ckptpipe_sample_bytes(const codec_sample *jobs, crc_word *counts) {
    SHARED crc_word found[4 * 256];
    const codec_sample job = jobs[BLOCK_SECOND];
    const unsigned char *data = (const unsigned char *)job.data;
    const codec_word room = job.nbytes - SAMPLE_PIECE_BYTES;
    EACH_THREAD(t) {
        UNROLL for (unsigned plane = 0; plane < 4; plane++) found[256 * plane + t] = 0;
    }
    BARRIER;
    EACH_THREAD(t) {
        for (unsigned i = 0; i < SAMPLE_PIECES; i++) {
            const codec_word piece = (codec_word)BLOCK_INDEX * SAMPLE_PIECES + i;
            const codec_word at = (room * piece / (SAMPLE_BLOCKS * SAMPLE_PIECES - 1)) & ~3ull;
            UNROLL for (unsigned k = 0; k < 4; k++) {
                const unsigned plane = k & (unsigned)(job.planes - 1);
                ADD_SHARED(found[256 * plane + data[at + 4 * t + k]]);
            }
        }
    }
    BARRIER;
    EACH_THREAD(t) {
        crc_word *mine = counts + (codec_word)1024 * BLOCK_SECOND;
        for (unsigned plane = 0; plane < (unsigned)job.planes; plane++)
            if (found[256 * plane + t]) ADD_GLOBAL(mine[256 * plane + t], found[256 * plane + t]);
    }
}

DEVICE unsigned planes_aligned(const codec_planes *job) {
    codec_word all = job->whole;
    for (unsigned p = 0; p < job->planes; p++) all |= job->plane[p];
    return all % GRANULE == 0;
}

/* 16 bytes of one plane out of 16 * K of the chunk. */
DEVICE crc_granule pick2(const crc_granule *whole, crc_word selector) {
    crc_granule made = {PICK(whole[0].x, whole[0].y, selector), PICK(whole[0].z, whole[0].w, selector),
                        PICK(whole[1].x, whole[1].y, selector), PICK(whole[1].z, whole[1].w, selector)};
    return made;
}

DEVICE crc_word pick4(crc_granule four, unsigned plane) {
    const crc_word selector = plane | (plane + 4) << 4;
    return PICK(PICK(four.x, four.y, selector), PICK(four.z, four.w, selector), 0x5410);
}

DEVICE void split_unit(const codec_planes *job, codec_word unit) {
    const crc_granule *whole = (const crc_granule *)job->whole + unit * job->planes;
    if (job->planes == 2) {
        crc_granule held[2];
        held[0] = whole[0];
        held[1] = whole[1];
        if (job->plane[0]) ((crc_granule *)job->plane[0])[unit] = pick2(held, 0x6420);
        if (job->plane[1]) ((crc_granule *)job->plane[1])[unit] = pick2(held, 0x7531);
        return;
    }
    crc_granule held[4];
    UNROLL for (unsigned i = 0; i < 4; i++) held[i] = whole[i];
    UNROLL for (unsigned p = 0; p < 4; p++) {
        if (!job->plane[p]) continue;
        crc_granule made = {pick4(held[0], p), pick4(held[1], p), pick4(held[2], p), pick4(held[3], p)};
        ((crc_granule *)job->plane[p])[unit] = made;
    }
}

/* Byte i of plane p is byte i * planes + p of the chunk. PLANE_BLOCKS blocks a job. */
ENTRY ckptpipe_split_planes(const codec_planes *jobs) {
    const codec_planes job = jobs[BLOCK_SECOND];
    const codec_word step = (codec_word)GRID_FIRST * THREADS;
    const codec_word units = planes_aligned(&job) ? job.nbytes / (GRANULE * job.planes) : 0;
    EACH_THREAD(t) {
        const codec_word first = (codec_word)BLOCK_INDEX * THREADS + t;
        for (codec_word unit = first; unit < units; unit += step) split_unit(&job, unit);
        for (unsigned p = 0; p < job.planes; p++) {
            const codec_word length = (job.nbytes - p + job.planes - 1) / job.planes;
            if (!job.plane[p]) continue;
            for (codec_word i = units * GRANULE + first; i < length; i += step)
                ((unsigned char *)job.plane[p])[i] = ((const unsigned char *)job.whole)[i * job.planes + p];
        }
    }
}

DEVICE void merge_unit(const codec_planes *job, codec_word unit) {
    crc_granule *whole = (crc_granule *)job->whole + unit * job->planes;
    if (job->planes == 2) {
        const crc_granule low = ((const crc_granule *)job->plane[0])[unit];
        const crc_granule high = ((const crc_granule *)job->plane[1])[unit];
        crc_granule first = {PICK(low.x, high.x, 0x5140), PICK(low.x, high.x, 0x7362), PICK(low.y, high.y, 0x5140),
                             PICK(low.y, high.y, 0x7362)};
        crc_granule second = {PICK(low.z, high.z, 0x5140), PICK(low.z, high.z, 0x7362), PICK(low.w, high.w, 0x5140),
                              PICK(low.w, high.w, 0x7362)};
        whole[0] = first;
        whole[1] = second;
        return;
    }
    crc_word held[4][4];
    UNROLL for (unsigned p = 0; p < 4; p++) {
        const crc_granule plane = ((const crc_granule *)job->plane[p])[unit];
        held[p][0] = plane.x;
        held[p][1] = plane.y;
        held[p][2] = plane.z;
        held[p][3] = plane.w;
    }
    UNROLL for (unsigned i = 0; i < 4; i++) {
        const crc_word even = PICK(held[0][i], held[1][i], 0x5140), odd = PICK(held[2][i], held[3][i], 0x5140);
        const crc_word even2 = PICK(held[0][i], held[1][i], 0x7362), odd2 = PICK(held[2][i], held[3][i], 0x7362);
        crc_granule made = {PICK(even, odd, 0x5410), PICK(even, odd, 0x7632), PICK(even2, odd2, 0x5410),
                            PICK(even2, odd2, 0x7632)};
        whole[i] = made;
    }
}

/* The inverse: the chunk from all of its planes. PLANE_BLOCKS blocks a job. */
ENTRY ckptpipe_merge_planes(const codec_planes *jobs) {
    const codec_planes job = jobs[BLOCK_SECOND];
    const codec_word step = (codec_word)GRID_FIRST * THREADS;
    const codec_word units = planes_aligned(&job) ? job.nbytes / (GRANULE * job.planes) : 0;
    EACH_THREAD(t) {
        const codec_word first = (codec_word)BLOCK_INDEX * THREADS + t;
        for (codec_word unit = first; unit < units; unit += step) merge_unit(&job, unit);
        for (codec_word i = units * GRANULE * job.planes + first; i < job.nbytes; i += step)
            ((unsigned char *)job.whole)[i] = ((const unsigned char *)job.plane[i % job.planes])[i / job.planes];
    }
}

/* Copies a table between the host's memory and the device's, both at multiples of 16: what travels so does not wait
   behind the data that the copy engines move. */
ENTRY ckptpipe_copy_table(const crc_granule *from, crc_granule *to, codec_word granules) {
    EACH_THREAD(t) {
        const codec_word i = (codec_word)BLOCK_INDEX * THREADS + t;
        if (i < granules) to[i] = from[i];
    }
}

/* Copies pieces[x]; part y of PIECE_PART bytes of each. Pieces do not overlap. */
ENTRY ckptpipe_copy_pieces(const codec_piece *pieces) {
    const codec_piece piece = pieces[BLOCK_INDEX];
    const codec_word begin = (codec_word)BLOCK_SECOND * PIECE_PART;
    if (begin >= piece.nbytes) return;
    const codec_word left = piece.nbytes - begin;
    const codec_word nbytes = left < PIECE_PART ? left : PIECE_PART;
    const unsigned char *from = (const unsigned char *)(piece.from + begin);
    unsigned char *to = (unsigned char *)(piece.to + begin);
    codec_word head = (0 - (piece.to + begin)) % GRANULE;
    if (head > nbytes) head = nbytes;
    const codec_word granules = (nbytes - head) / GRANULE;
    const codec_word done = head + granules * GRANULE;
    const codec_word source = piece.from + begin + head;
    const unsigned shift = 8 * (unsigned)(source % 4);
    const crc_word *words = (const crc_word *)(source - source % 4);
    crc_granule *out = (crc_granule *)(to + head);
    EACH_THREAD(t) {
        if (t < head) to[t] = from[t];
        if (source % GRANULE == 0) {
            for (codec_word i = t; i < granules; i += THREADS) out[i] = ((const crc_granule *)source)[i];
        } else if (shift == 0) {
            for (codec_word i = t; i < granules; i += THREADS) {
                crc_granule made = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
                out[i] = made;
            }
        } else {
            for (codec_word i = t; i < granules; i += THREADS) {
                const crc_word a = words[4 * i], b = words[4 * i + 1], c = words[4 * i + 2], d = words[4 * i + 3],
                               e = words[4 * i + 4];
                crc_granule made = {FUNNEL(a, b, shift), FUNNEL(b, c, shift), FUNNEL(c, d, shift), FUNNEL(d, e, shift)};
                out[i] = made;
            }
        }
        if (t < nbytes - done) to[done + t] = from[done + t];
    }
}
