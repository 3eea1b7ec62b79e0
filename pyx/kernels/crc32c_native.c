/* CRC32C by the CPU's own instructions. */
#include "crc32c.h"

#include <string.h>

static inline uint64_t load64(const unsigned char *data) {
    uint64_t word;
    memcpy(&word, data, 8);
    return word;
}

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#if defined(__clang__)
#define STEP_FEATURES "sse4.2,crc32"
#else
#define STEP_FEATURES "sse4.2" /* GCC: holds crc32 */
#endif
#define STEP_TARGET __attribute__((target(STEP_FEATURES)))
#define STEP8(state, word) ((uint32_t)_mm_crc32_u64((state), (word)))
#define STEP1(state, byte) _mm_crc32_u8((state), (byte))
#define STEP_NAME "sse4.2-3way"

static int step_supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2");
}

#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
#define STEP_TARGET
#define STEP8(state, word) step8((state), (word))
#define STEP1(state, byte) step1((state), (byte))
#define STEP_NAME "armv8"

/* In assembler, because compilers disagree on how a function asks for the crc extension. */
static inline uint32_t step8(uint32_t state, uint64_t word) {
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(state) : "r"(word));
    return state;
}

static inline uint32_t step1(uint32_t state, unsigned char byte) {
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(state) : "r"((uint32_t)byte));
    return state;
}

static int step_supported(void) { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#endif

#ifdef STEP_NAME

/* The instruction takes three cycles and one may start each cycle: three streams side by side fill it. Their
   registers are joined by shifting one over the bytes of the next (a product with a constant, by table). */
#define THREE_WAY(BYTES, TABLE)                                                       \
    for (; nbytes >= 3 * (BYTES); data += 3 * (BYTES), nbytes -= 3 * (BYTES)) {       \
        uint32_t second = 0, third = 0;                                               \
        for (size_t i = 0; i < (BYTES); i += 8) {                                     \
            state = STEP8(state, load64(data + i));                                   \
            second = STEP8(second, load64(data + (BYTES) + i));                       \
            third = STEP8(third, load64(data + 2 * (BYTES) + i));                     \
        }                                                                             \
        state = ck_crc32c_shift(TABLE, state) ^ second;                               \
        state = ck_crc32c_shift(TABLE, state) ^ third;                                \
    }

STEP_TARGET static uint32_t run_three_way(uint32_t state, const unsigned char *data, size_t nbytes) {
    THREE_WAY(CK_CRC_LONG, ck_crc32c_shift_long)
    THREE_WAY(CK_CRC_SHORT, ck_crc32c_shift_short)
    for (; nbytes >= 8; data += 8, nbytes -= 8) state = STEP8(state, load64(data));
    for (; nbytes; data++, nbytes--) state = STEP1(state, *data);
    return state;
}
#endif

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))

/* Folding by carry-less products (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ",
   2009). A 16-byte lane is L * x^64 + H with L its low quadword (bit 0 of a quadword is its highest power). To
   move it D bits on: L * x^(D+64) + H * x^D. A product of two reflected quadwords comes out multiplied by x,
   so the constants are x^(D+63) and x^(D-1), in the upper half of a quadword. */
#define FOLD_TARGET __attribute__((target("avx512f,vpclmulqdq,pclmul," STEP_FEATURES)))

enum { FOLD_2048, FOLD_512, FOLD_384, FOLD_256, FOLD_128, FOLDS };
static const unsigned fold_bits[FOLDS] = {2048, 512, 384, 256, 128};
static uint64_t fold_constant[FOLDS][2];

static int fold_supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq") &&
           __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.2");
}

static void fold_prepare(void) {
    for (int i = 0; i < FOLDS; i++) {
        fold_constant[i][0] = (uint64_t)ck_crc32c_xpow(fold_bits[i] + 63) << 32;
        fold_constant[i][1] = (uint64_t)ck_crc32c_xpow(fold_bits[i] - 1) << 32;
    }
}

FOLD_TARGET static inline __m512i wide_constant(int fold) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)fold_constant[fold]));
}

FOLD_TARGET static inline __m512i fold_wide(__m512i lane, __m512i constant, __m512i onto) {
    __m512i low = _mm512_clmulepi64_epi128(lane, constant, 0x00);
    __m512i high = _mm512_clmulepi64_epi128(lane, constant, 0x11);
    return _mm512_ternarylogic_epi64(low, high, onto, 0x96); /* xor of three */
}

FOLD_TARGET static inline __m128i fold_one(__m128i lane, int fold, __m128i onto) {
    __m128i constant = _mm_loadu_si128((const __m128i *)fold_constant[fold]);
    __m128i low = _mm_clmulepi64_si128(lane, constant, 0x00);
    __m128i high = _mm_clmulepi64_si128(lane, constant, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), onto);
}

FOLD_TARGET static uint32_t run_fold(uint32_t state, const unsigned char *data, size_t nbytes) {
    if (nbytes >= 256) {
        __m512i a = _mm512_loadu_si512(data);
        __m512i b = _mm512_loadu_si512(data + 64);
        __m512i c = _mm512_loadu_si512(data + 128);
        __m512i d = _mm512_loadu_si512(data + 192);
        a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)));
        __m512i constant = wide_constant(FOLD_2048);
        for (data += 256, nbytes -= 256; nbytes >= 256; data += 256, nbytes -= 256) {
            a = fold_wide(a, constant, _mm512_loadu_si512(data));
            b = fold_wide(b, constant, _mm512_loadu_si512(data + 64));
            c = fold_wide(c, constant, _mm512_loadu_si512(data + 128));
            d = fold_wide(d, constant, _mm512_loadu_si512(data + 192));
        }
        constant = wide_constant(FOLD_512);
        b = fold_wide(a, constant, b);
        c = fold_wide(b, constant, c);
        d = fold_wide(c, constant, d);
        for (; nbytes >= 64; data += 64, nbytes -= 64) d = fold_wide(d, constant, _mm512_loadu_si512(data));
        __m128i last = _mm512_extracti32x4_epi32(d, 3);
        last = fold_one(_mm512_castsi512_si128(d), FOLD_384, last);
        last = fold_one(_mm512_extracti32x4_epi32(d, 1), FOLD_256, last);
        last = fold_one(_mm512_extracti32x4_epi32(d, 2), FOLD_128, last);
        state = STEP8(0, (uint64_t)_mm_cvtsi128_si64(last));
        state = STEP8(state, (uint64_t)_mm_extract_epi64(last, 1));
    }
    for (; nbytes >= 8; data += 8, nbytes -= 8) state = STEP8(state, load64(data));
    for (; nbytes; data++, nbytes--) state = STEP1(state, *data);
    return state;
}
#endif

const ck_crc32c_implementation ck_crc32c_native[] = {
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
    {"avx512-vpclmul", fold_supported, fold_prepare, run_fold},
#endif
#ifdef STEP_NAME
    {STEP_NAME, step_supported, NULL, run_three_way},
#endif
    {NULL, NULL, NULL, NULL},
};
