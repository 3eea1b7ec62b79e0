#include "planes.h"
#include "dispatch.h"

#include <string.h>

/* Each function does whole steps and returns the elements it has done; the rest is done byte by byte. */
typedef struct {
    const char *name;
    int (*supported)(void);
    size_t (*split2)(unsigned char *const *planes, const unsigned char *source, size_t elements);
    size_t (*split4)(unsigned char *const *planes, const unsigned char *source, size_t elements);
    size_t (*merge2)(unsigned char *destination, const unsigned char *const *planes, size_t elements);
    size_t (*merge4)(unsigned char *destination, const unsigned char *const *planes, size_t elements);
} implementation;

static int always(void) { return 1; }

/* Simple enough for a compiler to use what vectors it has. */
static size_t split2_plain(unsigned char *const *planes, const unsigned char *source, size_t elements) {
    unsigned char *restrict a = planes[0], *restrict b = planes[1];
    for (size_t i = 0; i < elements; i++) {
        a[i] = source[2 * i];
        b[i] = source[2 * i + 1];
    }
    return elements;
}

static size_t split4_plain(unsigned char *const *planes, const unsigned char *source, size_t elements) {
    unsigned char *restrict a = planes[0], *restrict b = planes[1];
    unsigned char *restrict c = planes[2], *restrict d = planes[3];
    for (size_t i = 0; i < elements; i++) {
        a[i] = source[4 * i];
        b[i] = source[4 * i + 1];
        c[i] = source[4 * i + 2];
        d[i] = source[4 * i + 3];
    }
    return elements;
}

static size_t merge2_plain(unsigned char *restrict destination, const unsigned char *const *planes, size_t elements) {
    const unsigned char *a = planes[0], *b = planes[1];
    for (size_t i = 0; i < elements; i++) {
        destination[2 * i] = a[i];
        destination[2 * i + 1] = b[i];
    }
    return elements;
}

static size_t merge4_plain(unsigned char *restrict destination, const unsigned char *const *planes, size_t elements) {
    const unsigned char *a = planes[0], *b = planes[1], *c = planes[2], *d = planes[3];
    for (size_t i = 0; i < elements; i++) {
        destination[4 * i] = a[i];
        destination[4 * i + 1] = b[i];
        destination[4 * i + 2] = c[i];
        destination[4 * i + 3] = d[i];
    }
    return elements;
}

#if defined(__x86_64__)
#include <immintrin.h>

/* Split: of 16-bit words the low bytes are masked and packed, the high bytes shifted and packed. For elements of
   four bytes this is done twice: first positions {0, 2} and {1, 3} are parted, then each pair. */

#define LOAD(address) _mm_loadu_si128((const __m128i *)(address))
#define STORE(address, value) _mm_storeu_si128((__m128i *)(address), value)

static inline __m128i even128(__m128i a, __m128i b) {
    __m128i mask = _mm_set1_epi16(0xff);
    return _mm_packus_epi16(_mm_and_si128(a, mask), _mm_and_si128(b, mask));
}

static inline __m128i odd128(__m128i a, __m128i b) {
    return _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8));
}

static size_t split2_sse2(unsigned char *const *planes, const unsigned char *source, size_t elements) {
    size_t i = 0;
    for (; i + 16 <= elements; i += 16) {
        __m128i a = LOAD(source + 2 * i), b = LOAD(source + 2 * i + 16);
        STORE(planes[0] + i, even128(a, b));
        STORE(planes[1] + i, odd128(a, b));
    }
    return i;
}

static size_t split4_sse2(unsigned char *const *planes, const unsigned char *source, size_t elements) {
    size_t i = 0;
    for (; i + 16 <= elements; i += 16) {
        __m128i a = LOAD(source + 4 * i), b = LOAD(source + 4 * i + 16);
        __m128i c = LOAD(source + 4 * i + 32), d = LOAD(source + 4 * i + 48);
        __m128i even1 = even128(a, b), even2 = even128(c, d), odd1 = odd128(a, b), odd2 = odd128(c, d);
        STORE(planes[0] + i, even128(even1, even2));
        STORE(planes[1] + i, even128(odd1, odd2));
        STORE(planes[2] + i, odd128(even1, even2));
        STORE(planes[3] + i, odd128(odd1, odd2));
    }
    return i;
}

static size_t merge2_sse2(unsigned char *destination, const unsigned char *const *planes, size_t elements) {
    size_t i = 0;
    for (; i + 16 <= elements; i += 16) {
        __m128i a = LOAD(planes[0] + i), b = LOAD(planes[1] + i);
        STORE(destination + 2 * i, _mm_unpacklo_epi8(a, b));
        STORE(destination + 2 * i + 16, _mm_unpackhi_epi8(a, b));
    }
    return i;
}

static size_t merge4_sse2(unsigned char *destination, const unsigned char *const *planes, size_t elements) {
    size_t i = 0;
    for (; i + 16 <= elements; i += 16) {
        __m128i a = LOAD(planes[0] + i), b = LOAD(planes[1] + i), c = LOAD(planes[2] + i), d = LOAD(planes[3] + i);
        __m128i even1 = _mm_unpacklo_epi8(a, c), even2 = _mm_unpackhi_epi8(a, c);
        __m128i odd1 = _mm_unpacklo_epi8(b, d), odd2 = _mm_unpackhi_epi8(b, d);
        STORE(destination + 4 * i, _mm_unpacklo_epi8(even1, odd1));
        STORE(destination + 4 * i + 16, _mm_unpackhi_epi8(even1, odd1));
        STORE(destination + 4 * i + 32, _mm_unpacklo_epi8(even2, odd2));
        STORE(destination + 4 * i + 48, _mm_unpackhi_epi8(even2, odd2));
    }
    return i;
}

/* The same in 32 bytes. Packing and unpacking work within halves of 16 bytes, so the middle quarters change places. */

#define AVX2 __attribute__((target("avx2")))
#define LOAD256(address) _mm256_loadu_si256((const __m256i *)(address))
#define STORE256(address, value) _mm256_storeu_si256((__m256i *)(address), value)

static int supports_avx2(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2");
}

AVX2 static inline __m256i even256(__m256i a, __m256i b) {
    __m256i mask = _mm256_set1_epi16(0xff);
    return _mm256_permute4x64_epi64(_mm256_packus_epi16(_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)), 0xd8);
}

AVX2 static inline __m256i odd256(__m256i a, __m256i b) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8)), 0xd8);
}

AVX2 static size_t split2_avx2(unsigned char *const *planes, const unsigned char *source, size_t elements) {
    size_t i = 0;
    for (; i + 32 <= elements; i += 32) {
        __m256i a = LOAD256(source + 2 * i), b = LOAD256(source + 2 * i + 32);
        STORE256(planes[0] + i, even256(a, b));
        STORE256(planes[1] + i, odd256(a, b));
    }
    return i;
}

AVX2 static size_t split4_avx2(unsigned char *const *planes, const unsigned char *source, size_t elements) {
    size_t i = 0;
    for (; i + 32 <= elements; i += 32) {
        __m256i a = LOAD256(source + 4 * i), b = LOAD256(source + 4 * i + 32);
        __m256i c = LOAD256(source + 4 * i + 64), d = LOAD256(source + 4 * i + 96);
        __m256i even1 = even256(a, b), even2 = even256(c, d), odd1 = odd256(a, b), odd2 = odd256(c, d);
        STORE256(planes[0] + i, even256(even1, even2));
        STORE256(planes[1] + i, even256(odd1, odd2));
        STORE256(planes[2] + i, odd256(even1, even2));
        STORE256(planes[3] + i, odd256(odd1, odd2));
    }
    return i;
}

AVX2 static size_t merge2_avx2(unsigned char *destination, const unsigned char *const *planes, size_t elements) {
    size_t i = 0;
    for (; i + 32 <= elements; i += 32) {
        __m256i a = _mm256_permute4x64_epi64(LOAD256(planes[0] + i), 0xd8);
        __m256i b = _mm256_permute4x64_epi64(LOAD256(planes[1] + i), 0xd8);
        STORE256(destination + 2 * i, _mm256_unpacklo_epi8(a, b));
        STORE256(destination + 2 * i + 32, _mm256_unpackhi_epi8(a, b));
    }
    return i;
}

AVX2 static size_t merge4_avx2(unsigned char *destination, const unsigned char *const *planes, size_t elements) {
    size_t i = 0;
    for (; i + 32 <= elements; i += 32) {
        __m256i a = _mm256_permute4x64_epi64(LOAD256(planes[0] + i), 0xd8);
        __m256i b = _mm256_permute4x64_epi64(LOAD256(planes[1] + i), 0xd8);
        __m256i c = _mm256_permute4x64_epi64(LOAD256(planes[2] + i), 0xd8);
        __m256i d = _mm256_permute4x64_epi64(LOAD256(planes[3] + i), 0xd8);
        __m256i even1 = _mm256_permute4x64_epi64(_mm256_unpacklo_epi8(a, c), 0xd8);
        __m256i even2 = _mm256_permute4x64_epi64(_mm256_unpackhi_epi8(a, c), 0xd8);
        __m256i odd1 = _mm256_permute4x64_epi64(_mm256_unpacklo_epi8(b, d), 0xd8);
        __m256i odd2 = _mm256_permute4x64_epi64(_mm256_unpackhi_epi8(b, d), 0xd8);
        STORE256(destination + 4 * i, _mm256_unpacklo_epi8(even1, odd1));
        STORE256(destination + 4 * i + 32, _mm256_unpackhi_epi8(even1, odd1));
        STORE256(destination + 4 * i + 64, _mm256_unpacklo_epi8(even2, odd2));
        STORE256(destination + 4 * i + 96, _mm256_unpackhi_epi8(even2, odd2));
    }
    return i;
}
#endif

static const implementation implementations[] = {
#if defined(__x86_64__)
    {"avx2", supports_avx2, split2_avx2, split4_avx2, merge2_avx2, merge4_avx2},
    {"sse2", always, split2_sse2, split4_sse2, merge2_sse2, merge4_sse2},
#endif
    {"plain", always, split2_plain, split4_plain, merge2_plain, merge4_plain},
};
CK_DISPATCH(ck_planes)

void ck_planes_split(unsigned char *const *planes, const unsigned char *source, size_t nbytes, int width) {
    size_t elements = nbytes / (size_t)width;
    size_t done = width == 2 ? current->split2(planes, source, elements) : current->split4(planes, source, elements);
    for (size_t at = done * (size_t)width; at < nbytes; at++) planes[at % (size_t)width][at / (size_t)width] = source[at];
}

void ck_planes_merge(unsigned char *destination, const unsigned char *const *planes, size_t nbytes, int width) {
    size_t elements = nbytes / (size_t)width;
    size_t done =
        width == 2 ? current->merge2(destination, planes, elements) : current->merge4(destination, planes, elements);
    for (size_t at = done * (size_t)width; at < nbytes; at++)
        destination[at] = planes[at % (size_t)width][at / (size_t)width];
}
