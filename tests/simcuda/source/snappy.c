/* One raw Snappy stream (format_description.txt): the length, then literals and copies. */
#include "codecs.h"

#include <string.h>

Decoded snappy_decode(const unsigned char *in, size_t nbytes, unsigned char *out, size_t room, size_t *written) {
    const unsigned char *end = in + nbytes;
    size_t total = 0, done = 0;
    int shift = 0;
    *written = 0;
    for (unsigned char byte = 0x80; byte & 0x80; shift += 7) {
        if (in == end || shift > 28) return DECODE_CORRUPT;
        byte = *in++;
        total |= (size_t)(byte & 0x7f) << shift;
    }
    if (total > 0xffffffffu) return DECODE_CORRUPT;
    if (total > room) return DECODE_NO_ROOM;
    while (in < end) {
        unsigned char tag = *in++;
        int kind = tag & 3, extra = kind == 3 ? 4 : kind;
        size_t length = (size_t)(tag >> 2) + 1, distance = 0;
        if (kind == 0) extra = length > 60 ? (int)length - 60 : 0;
        if (end - in < extra) return DECODE_CORRUPT;
        for (int i = 0; i < extra; i++) distance |= (size_t)in[i] << (8 * i);
        in += extra;
        if (kind == 0) {
            if (extra) length = distance + 1;
            if (length > (size_t)(end - in) || length > total - done) return DECODE_CORRUPT;
            memcpy(out + done, in, length);
            in += length;
            done += length;
        } else {
            if (kind == 1) {
                length = (size_t)((tag >> 2) & 7) + 4;
                distance |= (size_t)(tag >> 5) << 8;
            }
            if (!distance || distance > done || length > total - done) return DECODE_CORRUPT;
            for (; length; length--, done++) out[done] = out[done - distance]; /* it may overlap itself */
        }
        *written = done;
    }
    return done == total ? DECODED : DECODE_CORRUPT;
}
