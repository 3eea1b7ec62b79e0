#include "copy.h"
#include "dispatch.h"

#include "crc32c.h"

#include <string.h>

/* Below this many bytes the destination had better stay in the cache. */
#define STREAM_FROM (128u << 10)
/* One block stays in the first-level cache between checksum, zero test and copy. Short, so that the stores of
   one drain while the next is read. */
#define PASS_BLOCK (4u << 10)
/* Bytes that a streaming copy asks for ahead of its reads; beyond the end it is a hint that nobody hears. */
#define AHEAD 1024

typedef struct {
    const char *name;
    int (*supported)(void);
    /* nbytes is a multiple of 64, destination is aligned to 64; followed by a fence. */
    void (*stream)(unsigned char *destination, const unsigned char *source, size_t nbytes);
    int (*zero)(const unsigned char *data, size_t nbytes); /* nbytes is a multiple of 256 */
} implementation;

static int always(void) { return 1; }

static void stream_plain(unsigned char *destination, const unsigned char *source, size_t nbytes) {
    memcpy(destination, source, nbytes);
}

static int zero_plain(const unsigned char *data, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i += 256) {
        uint64_t any = 0;
        for (size_t j = 0; j < 256; j += 8) {
            uint64_t word;
            memcpy(&word, data + i + j, 8);
            any |= word;
        }
        if (any) return 0;
    }
    return 1;
}

#if defined(__x86_64__)
#include <immintrin.h>
#define FENCE() _mm_sfence()
#define FETCH(address) _mm_prefetch((const char *)(address), _MM_HINT_T0)

static void stream_sse2(unsigned char *destination, const unsigned char *source, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i += 64) {
        const __m128i *from = (const __m128i *)(source + i);
        __m128i *to = (__m128i *)(destination + i);
        FETCH(source + i + AHEAD);
        __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
    }
}

static int zero_sse2(const unsigned char *data, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i += 256) {
        __m128i any = _mm_setzero_si128();
        for (size_t j = 0; j < 256; j += 16)
            any = _mm_or_si128(any, _mm_loadu_si128((const __m128i *)(data + i + j)));
        if (_mm_movemask_epi8(_mm_cmpeq_epi8(any, _mm_setzero_si128())) != 0xffff) return 0;
    }
    return 1;
}

#define AVX2 __attribute__((target("avx2")))

static int supports_avx2(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2");
}

AVX2 static void stream_avx2(unsigned char *destination, const unsigned char *source, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i += 64) {
        FETCH(source + i + AHEAD);
        __m256i a = _mm256_loadu_si256((const __m256i *)(source + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(source + i + 32));
        _mm256_stream_si256((__m256i *)(destination + i), a);
        _mm256_stream_si256((__m256i *)(destination + i + 32), b);
    }
}

AVX2 static int zero_avx2(const unsigned char *data, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i += 256) {
        __m256i any = _mm256_setzero_si256();
        for (size_t j = 0; j < 256; j += 32)
            any = _mm256_or_si256(any, _mm256_loadu_si256((const __m256i *)(data + i + j)));
        if (!_mm256_testz_si256(any, any)) return 0;
    }
    return 1;
}

#define AVX512 __attribute__((target("avx512f")))

static int supports_avx512(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f");
}

AVX512 static void stream_avx512(unsigned char *destination, const unsigned char *source, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i += 64) {
        FETCH(source + i + AHEAD);
        _mm512_stream_si512((__m512i *)(destination + i), _mm512_loadu_si512(source + i));
    }
}

AVX512 static int zero_avx512(const unsigned char *data, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i += 256) {
        __m512i a = _mm512_or_si512(_mm512_loadu_si512(data + i), _mm512_loadu_si512(data + i + 64));
        __m512i b = _mm512_or_si512(_mm512_loadu_si512(data + i + 128), _mm512_loadu_si512(data + i + 192));
        __m512i any = _mm512_or_si512(a, b);
        if (_mm512_test_epi64_mask(any, any)) return 0;
    }
    return 1;
}

#else
#define FENCE() ((void)0)
#endif

static const implementation implementations[] = {
#if defined(__x86_64__)
    {"avx512", supports_avx512, stream_avx512, zero_avx512},
    {"avx2", supports_avx2, stream_avx2, zero_avx2},
    {"sse2", always, stream_sse2, zero_sse2},
#endif
    {"plain", always, stream_plain, zero_plain},
};
CK_DISPATCH(ck_copy)

/* Bytes up to the next multiple of 64 of the destination. */
static inline size_t head_bytes(const void *destination, size_t nbytes) {
    size_t head = (size_t)(-(uintptr_t)destination & 63);
    return head < nbytes ? head : nbytes;
}

void ck_copy(void *destination, const void *source, size_t nbytes) {
    unsigned char *to = destination;
    const unsigned char *from = source;
    if (nbytes < STREAM_FROM) {
        if (nbytes) memcpy(to, from, nbytes);
        return;
    }
    size_t head = head_bytes(to, nbytes);
    memcpy(to, from, head);
    size_t body = (nbytes - head) & ~(size_t)63;
    current->stream(to + head, from + head, body);
    memcpy(to + head + body, from + head + body, nbytes - head - body);
    FENCE();
}

int ck_is_zero(const void *data, size_t nbytes) {
    const unsigned char *bytes = data;
    size_t body = nbytes & ~(size_t)255;
    if (body && !current->zero(bytes, body)) return 0;
    unsigned char any = 0;
    for (size_t i = body; i < nbytes; i++) any |= bytes[i];
    return any == 0;
}

uint32_t ck_pass(void *destination, const void *source, size_t nbytes, uint32_t value, int *zero) {
    unsigned char *to = destination;
    const unsigned char *from = source;
    int all_zero = 1;
    int streaming = to != NULL && nbytes >= STREAM_FROM;
    uint32_t state = ~value;
    while (nbytes) {
        /* The first block ends where the destination is aligned; every later one starts there. */
        size_t block = nbytes < PASS_BLOCK ? nbytes : PASS_BLOCK;
        size_t head = streaming ? head_bytes(to, block) : 0;
        if (head) block = head;
        state = ck_crc32c_state(state, from, block);
        if (all_zero) all_zero = ck_is_zero(from, block);
        if (to != NULL) {
            size_t body = streaming && !head ? block & ~(size_t)63 : 0;
            if (body) current->stream(to, from, body);
            if (body < block) memcpy(to + body, from + body, block - body);
            to += block;
        }
        from += block;
        nbytes -= block;
    }
    if (streaming) FENCE();
    *zero = all_zero;
    return ~state;
}

int ck_next_data(const unsigned char *data, size_t nbytes, size_t granularity, size_t offset, size_t *start,
                 size_t *end) {
    while (offset < nbytes) {
        size_t block = nbytes - offset < granularity ? nbytes - offset : granularity;
        if (!ck_is_zero(data + offset, block)) break;
        offset += block;
    }
    if (offset >= nbytes) return 0;
    *start = offset;
    while (offset < nbytes) {
        size_t block = nbytes - offset < granularity ? nbytes - offset : granularity;
        if (ck_is_zero(data + offset, block)) break;
        offset += block;
    }
    *end = offset;
    return 1;
}
