#include "stores.h"

#include "next.h" /* not memcpy: where symbols take its place, that would lead back here */

#include <stdint.h>
#include <string.h>

#define LINE 64u

/* `bytes` is a multiple of 64 and the destination is aligned to 64. */
typedef void copy_lines(unsigned char *to, const unsigned char *from, size_t bytes);

static void copy_plain(unsigned char *to, const unsigned char *from, size_t bytes) {
    ckpt_next.memcpy(to, from, bytes);
}

static struct demotion {
    const char *name;
    void (*lines)(const unsigned char *at, size_t lines);
} demotions[3];

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#define AHEAD 1024 /* bytes that are fetched before they are read; past the end it is a hint that nobody hears */
#define FETCH(address) _mm_prefetch((const char *)(address), _MM_HINT_NTA)
#define FENCE() _mm_sfence()

/* One copy of lines for each way to store them. */
#define COPY_SSE2(NAME, STORE)                                                              \
    static void NAME(unsigned char *to, const unsigned char *from, size_t bytes) {          \
        for (size_t i = 0; i < bytes; i += LINE) {                                          \
            const __m128i *source = (const __m128i *)(from + i);                            \
            __m128i *target = (__m128i *)(to + i);                                          \
            FETCH(from + i + AHEAD);                                                        \
            __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);           \
            __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);       \
            STORE(target, a);                                                               \
            STORE(target + 1, b);                                                           \
            STORE(target + 2, c);                                                           \
            STORE(target + 3, d);                                                           \
        }                                                                                   \
    }

#define COPY_AVX512(NAME, STORE)                                                            \
    __attribute__((target("avx512f"))) static void NAME(unsigned char *to, const unsigned char *from, size_t bytes) { \
        for (size_t i = 0; i < bytes; i += LINE) {                                          \
            FETCH(from + i + AHEAD);                                                        \
            STORE((__m512i *)(to + i), _mm512_loadu_si512(from + i));                       \
        }                                                                                   \
    }

COPY_SSE2(stream_sse2, _mm_stream_si128)

__attribute__((target("avx2"))) static void stream_avx2(unsigned char *to, const unsigned char *from, size_t bytes) {
    for (size_t i = 0; i < bytes; i += LINE) {
        FETCH(from + i + AHEAD);
        __m256i a = _mm256_loadu_si256((const __m256i *)(from + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(from + i + 32));
        _mm256_stream_si256((__m256i *)(to + i), a);
        _mm256_stream_si256((__m256i *)(to + i + 32), b);
    }
}

COPY_AVX512(stream_avx512, _mm512_stream_si512)

/* Not memcpy: of this much, the C library's stores past the caches, too. */
COPY_SSE2(keep_sse2, _mm_store_si128)
COPY_AVX512(keep_avx512, _mm512_store_si512)

/* Lines that leave. The bytes of the instructions, since older assemblers do not know them; both may be given any address
 * in the line, and neither waits for anything. */
static void demote_lines(const unsigned char *at, size_t lines) {
    for (size_t i = 0; i < lines; i++) __asm__ volatile(".byte 0x0f, 0x1c, 0x00" ::"a"(at + i * LINE) : "memory");
}

static void flush_lines(const unsigned char *at, size_t lines) {
    for (size_t i = 0; i < lines; i++) __asm__ volatile(".byte 0x66, 0x0f, 0xae, 0x38" ::"a"(at + i * LINE) : "memory");
}

/* Leaf 7 of cpuid says which of them there are. */
static void find_demotions(void) {
    unsigned a, b = 0, c = 0, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    if (b & 1u << 23) demotions[CKPT_DEMOTE] = demotions[CKPT_DEMOTE_FLUSH] = (struct demotion){"clflushopt", flush_lines};
    if (c & 1u << 25) demotions[CKPT_DEMOTE] = (struct demotion){"cldemote", demote_lines};
}

static int has_avx2(void) { return __builtin_cpu_supports("avx2"); }
static int has_avx512(void) { return __builtin_cpu_supports("avx512f"); }
#else
#define FENCE() ((void)0)
static void find_demotions(void) {}
#endif

void ckpt_stores_fetch(const void *address, size_t bytes) {
    const char *at = address;
    for (size_t i = 0; i < bytes; i += LINE) __builtin_prefetch(at + i, 0, 2);
}

static int always(void) { return 1; }

static const struct {
    const char *name;
    int (*supported)(void);
    copy_lines *stream, *keep;
} kinds[] = {
#if defined(__x86_64__)
    {"avx512", has_avx512, stream_avx512, keep_avx512},
    {"avx2", has_avx2, stream_avx2, keep_sse2},
    {"sse2", always, stream_sse2, keep_sse2},
#endif
    {"plain", always, copy_plain, copy_plain},
};
#define KINDS (sizeof kinds / sizeof kinds[0])

static size_t chosen = KINDS - 1;

int ckpt_stores_force(const char *name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    for (size_t i = 0; i < KINDS; i++) {
        if (name[0] && strcmp(name, kinds[i].name) != 0) continue;
        if (!kinds[i].supported()) continue;
        chosen = i;
        return 1;
    }
    return 0;
}

void ckpt_stores_choose(void) {
    ckpt_stores_force("");
    find_demotions();
}

const char *ckpt_stores_name(void) { return kinds[chosen].name; }

static void copy(copy_lines *lines, unsigned char *to, const unsigned char *from, size_t bytes) {
    size_t head = (size_t)(-(uintptr_t)to & (LINE - 1));
    if (head > bytes) head = bytes;
    if (head) ckpt_next.memcpy(to, from, head);
    size_t body = (bytes - head) & ~(size_t)(LINE - 1);
    lines(to + head, from + head, body);
    if (bytes > head + body) ckpt_next.memcpy(to + head + body, from + head + body, bytes - head - body);
}

void ckpt_stores_stream(void *destination, const void *source, size_t bytes) {
    copy(kinds[chosen].stream, destination, source, bytes);
    FENCE();
}

void ckpt_stores_keep(void *destination, const void *source, size_t bytes) {
    copy(kinds[chosen].keep, destination, source, bytes);
}

void ckpt_stores_demote(const void *address, size_t bytes, unsigned demotion) {
    const unsigned char *at = address;
    size_t before = (uintptr_t)at % LINE;
    if (demotion < sizeof demotions / sizeof demotions[0] && demotions[demotion].lines)
        demotions[demotion].lines(at - before, (before + bytes + LINE - 1) / LINE);
}

const char *ckpt_stores_demotes_by(unsigned demotion) {
    int known = demotion < sizeof demotions / sizeof demotions[0] && demotions[demotion].lines;
    return known ? demotions[demotion].name : "nothing";
}
