/* RFC 1951 by zlib, which is looked for at run time: its few declarations are written here (zlib.h, 1.2.0 and later). */
#define _GNU_SOURCE
#include "codecs.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

typedef struct {
    const unsigned char *next_in;
    unsigned int avail_in;
    unsigned long total_in;
    unsigned char *next_out;
    unsigned int avail_out;
    unsigned long total_out;
    const char *msg;
    void *state;
    void *(*zalloc)(void *, unsigned int, unsigned int);
    void (*zfree)(void *, void *);
    void *opaque;
    int data_type;
    unsigned long adler, reserved;
} ZStream;

enum { Z_FINISH = 4, Z_STREAM_END = 1, Z_DEFLATED = 8, Z_DEFAULT_STRATEGY = 0, Z_HUFFMAN_ONLY = 2, RAW_WINDOW = -15 };

static int (*deflate_start)(ZStream *, int, int, int, int, int, const char *, int);
static int (*deflate_run)(ZStream *, int);
static int (*deflate_stop)(ZStream *);
static int (*inflate_start)(ZStream *, int, const char *, int);
static int (*inflate_run)(ZStream *, int);
static int (*inflate_stop)(ZStream *);
static int ready;

static void load(void) {
    void *library = dlopen("libz.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "simulated GPU: no Deflate: %s\n", dlerror());
        return;
    }
    *(void **)&deflate_start = dlsym(library, "deflateInit2_");
    *(void **)&deflate_run = dlsym(library, "deflate");
    *(void **)&deflate_stop = dlsym(library, "deflateEnd");
    *(void **)&inflate_start = dlsym(library, "inflateInit2_");
    *(void **)&inflate_run = dlsym(library, "inflate");
    *(void **)&inflate_stop = dlsym(library, "inflateEnd");
    ready = deflate_start && deflate_run && deflate_stop && inflate_start && inflate_run && inflate_stop;
}

static int loaded(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load);
    return ready;
}

Decoded deflate_decode(const unsigned char *in, size_t nbytes, unsigned char *out, size_t room, size_t *written) {
    *written = 0;
    if (!loaded()) return DECODE_NO_LIBRARY;
    if (nbytes > 0xffffffffu || room > 0xffffffffu) return DECODE_NO_ROOM;
    unsigned char nothing;
    ZStream stream = {.next_in = in, .avail_in = (unsigned int)nbytes, .next_out = room ? out : &nothing,
                      .avail_out = (unsigned int)room};
    if (inflate_start(&stream, RAW_WINDOW, "1.2.11", (int)sizeof stream) != 0) return DECODE_NO_LIBRARY;
    int result = inflate_run(&stream, Z_FINISH);
    *written = room - stream.avail_out;
    Decoded answer = DECODE_CORRUPT;
    if (result == Z_STREAM_END) answer = stream.avail_in ? DECODE_CORRUPT : DECODED;
    else if ((result == 0 || result == -5) && !stream.avail_out) { /* Z_BUF_ERROR: full, or nothing left to read */
        unsigned char more;
        stream.next_out = &more;
        stream.avail_out = 1;
        result = inflate_run(&stream, Z_FINISH);
        if (result == Z_STREAM_END && stream.avail_out) answer = stream.avail_in ? DECODE_CORRUPT : DECODED;
        else if (!stream.avail_out) answer = DECODE_NO_ROOM;
    }
    inflate_stop(&stream);
    return answer;
}

size_t deflate_encode(int level, const unsigned char *in, size_t nbytes, unsigned char *out, size_t room) {
    static const int levels[] = {1, 1, 4, 5, 6, 9};
    if (!loaded() || nbytes > 0xffffffffu) return 0;
    if (room > 0xffffffffu) room = 0xffffffffu;
    ZStream stream = {.next_in = in, .avail_in = (unsigned int)nbytes, .next_out = out,
                      .avail_out = (unsigned int)room};
    if (deflate_start(&stream, levels[level], Z_DEFLATED, RAW_WINDOW, 8,
                      level == 0 ? Z_HUFFMAN_ONLY : Z_DEFAULT_STRATEGY, "1.2.11", (int)sizeof stream) != 0)
        return 0;
    size_t written = deflate_run(&stream, Z_FINISH) == Z_STREAM_END ? room - stream.avail_out : 0;
    deflate_stop(&stream);
    return written;
}
