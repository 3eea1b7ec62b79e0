/* CRC32C and zero test of a range of device memory, in one pass (CUDA C++, and C for the test on a CPU).
 *
 * The range is seen as granules of 16 bytes, with as many zero granules before it as make whole rows of
 * BLOCKS * THREADS granules: zeros before a message change no remainder. Thread t of the whole grid takes
 * granule t of every row, so loads are coalesced, and going on by one row is always the product with
 * x^(8 * ROW_BYTES) mod P, which is linear: four table look-ups a word, from shared memory, four words side by
 * side. What the threads hold is then joined in pairs, over distances that are powers of two and do not depend
 * on the length, so that each level multiplies by a constant of its own.
 *
 * A register holds a polynomial with bit 31 as x^0. Granules start at multiples of 16 of the address; what lies
 * before the range in the first of them counts as zero and is not read. The last 0 to 15 bytes follow one by
 * one. Ranges under SHORT_BYTES are done by one thread.
 */

typedef unsigned int crc_word;

#define THREADS 256u
#define BLOCKS 256u
#define GRANULE 16u
#define ROW_GRANULES ((unsigned long long)THREADS * BLOCKS)
#define POLYNOMIAL 0x82f63b78u
#define SHORT_BYTES 64u

/* x^(8 n) mod P for n bytes */
#define X_4 0x82f63b78u
#define X_16 0x18b8ea18u
#define X_32 0x510ac59au
#define X_64 0xb82be955u
#define X_128 0xb8fdb1e7u
#define X_256 0x88e56f72u
#define X_512 0x74c360a4u
#define X_1K 0xe4172b16u
#define X_2K 0x0d65762au
#define X_4K 0x35d73a62u
#define X_8K 0x28461564u
#define X_16K 0xbf455269u
#define X_32K 0xe2ea32dcu
#define X_64K 0xfe7740e6u
#define X_128K 0xf946610bu
#define X_256K 0x3c204f8fu
#define X_512K 0x538586e3u
#define X_ROW 0x59726915u /* 1 MiB */

#ifdef __CUDACC__
typedef uint4 crc_granule;
#define ENTRY extern "C" __global__ void __launch_bounds__(THREADS)
#define DEVICE __device__ __forceinline__
#define SHARED __shared__
#define UNROLL _Pragma("unroll")
#define BLOCK_INDEX blockIdx.x
/* The body runs once in each thread of a block; BARRIER comes after it. On a CPU it is a loop. */
#define EACH_THREAD(t) for (unsigned t = threadIdx.x, again = 1; again; again = 0)
#define BARRIER __syncthreads()
#define PUBLISH __threadfence()
#define PUBLISH_TO_HOST __threadfence_system()
#define LAST_OF(counter, count) (atomicInc((counter), (count) - 1) == (count) - 1)
#else
typedef struct { crc_word x, y, z, w; } crc_granule;
extern unsigned emulated_block;
#define ENTRY void
#define DEVICE static inline
#define SHARED
#define UNROLL
#define BLOCK_INDEX emulated_block
#define EACH_THREAD(t) for (unsigned t = 0; t < THREADS; t++)
#define BARRIER ((void)0)
#define PUBLISH ((void)0)
#define PUBLISH_TO_HOST ((void)0)
#define LAST_OF(counter, count) (*(counter) == (count) - 1 ? (*(counter) = 0, 1) : (++*(counter), 0))
#endif

DEVICE crc_word times_x(crc_word value) { return (value >> 1) ^ (POLYNOMIAL & (0u - (value & 1u))); }

/* value * factor mod P. Where the factor is a literal, its multiples are literals too. */
DEVICE crc_word product(crc_word value, crc_word factor) {
    crc_word result = 0;
    UNROLL for (int power = 0; power < 32; power++) {
        result ^= factor & (0u - ((value >> (31 - power)) & 1u));
        factor = times_x(factor);
    }
    return result;
}

DEVICE crc_word next_byte(crc_word state, unsigned char byte) {
    state ^= byte;
    UNROLL for (int bit = 0; bit < 8; bit++) state = times_x(state);
    return state;
}

/* On by one row: state * x^(8 * ROW_BYTES). */
DEVICE crc_word next_row(const crc_word *table, crc_word state) {
    return table[state & 0xff] ^ table[256 + ((state >> 8) & 0xff)] ^ table[512 + ((state >> 16) & 0xff)] ^
           table[768 + (state >> 24)];
}

/* A granule that the range begins in, or that holds one of its first four bytes: those are inverted (the
   register's initial value), and what lies before the range is zero. */
DEVICE crc_granule edge_granule(const unsigned char *base, unsigned long long index, unsigned head, crc_word *any) {
    crc_word words[4] = {0, 0, 0, 0};
    for (unsigned i = 0; i < GRANULE; i++) {
        unsigned long long at = index * GRANULE + i;
        if (at < head) continue;
        crc_word byte = base[at];
        *any |= byte;
        if (at < head + 4) byte ^= 0xff;
        words[i / 4] |= byte << (8 * (i % 4));
    }
    crc_granule granule = {words[0], words[1], words[2], words[3]};
    return granule;
}

DEVICE crc_granule load_granule(const unsigned char *base, unsigned long long index, unsigned head, crc_word *any) {
    if (index < 2) return edge_granule(base, index, head, any);
    crc_granule granule = ((const crc_granule *)base)[index];
    *any |= granule.x | granule.y | granule.z | granule.w;
    return granule;
}

/* One level of joining: the left of each pair is `bytes` before the right one. */
#define JOIN(states, level, factor)                                                                       \
    EACH_THREAD(t) {                                                                                      \
        if (t < (THREADS >> ((level) + 1))) {                                                             \
            unsigned left = (2 * t) << (level), right = (2 * t + 1) << (level);                           \
            states[left] = product(states[left], factor) ^ states[right];                                 \
        }                                                                                                 \
    }                                                                                                     \
    BARRIER;

/* The eight levels that join what the threads of a block found. */
#define JOIN_BLOCK(states) \
    JOIN(states, 0, X_16)  \
    JOIN(states, 1, X_32)  \
    JOIN(states, 2, X_64)  \
    JOIN(states, 3, X_128) \
    JOIN(states, 4, X_256) \
    JOIN(states, 5, X_512) \
    JOIN(states, 6, X_1K)  \
    JOIN(states, 7, X_2K)

/* What is the same in all kernels that checksum, in terms of their variables (basis, table, states, nonzero; base, head,
   padding, rows). First the tables that go on by one row: x^(8 * its bytes) is `factor`. */
#define MAKE_TABLE(factor)                                                                                           \
    EACH_THREAD(t) {                                                                                                 \
        if (t < 32) {                                                                                                \
            crc_word value = (factor);                                                                               \
            for (unsigned bit = 31; bit > t; bit--) value = times_x(value);                                          \
            basis[t] = value;                                                                                        \
        }                                                                                                            \
        if (t == 0) nonzero = 0;                                                                                     \
    }                                                                                                                \
    BARRIER;                                                                                                         \
    EACH_THREAD(t) {                                                                                                 \
        UNROLL for (unsigned byte = 0; byte < 4; byte++) {                                                           \
            crc_word value = 0;                                                                                      \
            UNROLL for (unsigned bit = 0; bit < 8; bit++) value ^= basis[8 * byte + bit] & (0u - ((t >> bit) & 1u)); \
            table[256 * byte + t] = value;                                                                           \
        }                                                                                                            \
    }                                                                                                                \
    BARRIER;

/* Then each thread's column of rows of `granules` granules; the next granule is on its way while tables are read. */
#define SUM_ROWS(granules)                                                              \
    EACH_THREAD(t) {                                                                    \
        const unsigned long long place = (unsigned long long)BLOCK_INDEX * THREADS + t; \
        unsigned long long row = place < padding ? 1 : 0;                               \
        crc_word a = 0, b = 0, c = 0, d = 0, any = 0;                                   \
        if (row < rows) {                                                               \
            unsigned long long index = row * (granules) + place - padding;              \
            crc_granule next = load_granule(base, index, head, &any);                   \
            for (;;) {                                                                  \
                crc_granule granule = next;                                             \
                const int more = ++row < rows;                                          \
                index += (granules);                                                    \
                if (more) next = load_granule(base, index, head, &any);                 \
                a = next_row(table, a) ^ granule.x;                                     \
                b = next_row(table, b) ^ granule.y;                                     \
                c = next_row(table, c) ^ granule.z;                                     \
                d = next_row(table, d) ^ granule.w;                                     \
                if (!more) break;                                                       \
            }                                                                           \
        }                                                                               \
        states[t] = product(product(product(a, X_4) ^ b, X_4) ^ c, X_4) ^ d;            \
        if (any) nonzero = 1;                                                           \
    }                                                                                   \
    BARRIER;

/* The register after all whole granules, then the bytes that follow them. */
DEVICE crc_word finish(crc_word state, const unsigned char *data, unsigned long long nbytes, unsigned tail) {
    if (nbytes < SHORT_BYTES) {
        state = 0xffffffffu;
        tail = (unsigned)nbytes;
    } else {
        state = product(state, X_4);
    }
    for (unsigned i = 0; i < tail; i++) state = next_byte(state, data[nbytes - tail + i]);
    return ~state;
}

/* Launched with BLOCKS blocks of THREADS threads. scratch: 2 * BLOCKS + 1 words, the last one 0 before the first
   launch and left 0 by every launch; launches that share it must not overlap. result: {CRC32C, zero only if all
   bytes are}, may lie in mapped host memory. */
ENTRY ckptpipe_crc32c_zero(const unsigned char *data, unsigned long long nbytes, crc_word *scratch,
                           volatile crc_word *result) {
    SHARED crc_word basis[32];
    SHARED crc_word table[4 * 256];
    SHARED crc_word states[THREADS];
    SHARED volatile crc_word nonzero, last;
    const unsigned head = (unsigned)((unsigned long long)data % GRANULE);
    const unsigned char *base = data - head;
    const unsigned long long span = head + nbytes;
    const unsigned long long granules = nbytes < SHORT_BYTES ? 0 : span / GRANULE;
    const unsigned tail = (unsigned)(span % GRANULE);
    const unsigned long long padding = (ROW_GRANULES - granules % ROW_GRANULES) % ROW_GRANULES;
    const unsigned long long rows = (granules + padding) / ROW_GRANULES;

    MAKE_TABLE(X_ROW)
    SUM_ROWS(ROW_GRANULES)
    JOIN_BLOCK(states)

    EACH_THREAD(t) {
        if (t == 0) {
            ((volatile crc_word *)scratch)[BLOCK_INDEX] = states[0];
            ((volatile crc_word *)scratch)[BLOCKS + BLOCK_INDEX] = nonzero;
            PUBLISH;
            last = LAST_OF(scratch + 2 * BLOCKS, BLOCKS);
        }
    }
    BARRIER;
    if (!last) return;
    /* The block that is last joins what all have found. */
    PUBLISH;
    EACH_THREAD(t) {
        states[t] = ((volatile crc_word *)scratch)[t];
        if (((volatile crc_word *)scratch)[BLOCKS + t]) nonzero = 1;
    }
    BARRIER;
    JOIN(states, 0, X_4K)
    JOIN(states, 1, X_8K)
    JOIN(states, 2, X_16K)
    JOIN(states, 3, X_32K)
    JOIN(states, 4, X_64K)
    JOIN(states, 5, X_128K)
    JOIN(states, 6, X_256K)
    JOIN(states, 7, X_512K)
    EACH_THREAD(t) {
        if (t == 0) {
            const unsigned after = nbytes < SHORT_BYTES ? (unsigned)nbytes : tail;
            crc_word any = nonzero;
            for (unsigned i = 0; i < after; i++) any |= data[nbytes - after + i];
            result[0] = finish(states[0], data, nbytes, tail);
            result[1] = any;
            PUBLISH_TO_HOST;
        }
    }
}
