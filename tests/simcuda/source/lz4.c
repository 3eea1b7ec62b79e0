/* One LZ4 block (lz4_Block_format.md): sequences of literals and a match, the last one literals alone. */
#include "codecs.h"

#include <string.h>

/* A length's further bytes: 0 when the input ends. */
static int longer(const unsigned char **at, const unsigned char *end, size_t *length) {
    unsigned char byte;
    do {
        if (*at == end) return 0;
        byte = *(*at)++;
        *length += byte;
    } while (byte == 255);
    return 1;
}

Decoded lz4_decode(const unsigned char *in, size_t nbytes, unsigned char *out, size_t room, size_t *written) {
    const unsigned char *end = in + nbytes;
    size_t done = 0;
    *written = 0;
    while (in < end) {
        unsigned char token = *in++;
        size_t literals = token >> 4, length = token & 15;
        if (literals == 15 && !longer(&in, end, &literals)) return DECODE_CORRUPT;
        if (literals > (size_t)(end - in)) return DECODE_CORRUPT;
        if (literals > room - done) return DECODE_NO_ROOM;
        memcpy(out + done, in, literals);
        in += literals;
        done += literals;
        *written = done;
        if (in == end) return length == 0 ? DECODED : DECODE_CORRUPT;
        if (end - in < 2) return DECODE_CORRUPT;
        size_t distance = (size_t)in[0] | (size_t)in[1] << 8;
        in += 2;
        if (length == 15 && !longer(&in, end, &length)) return DECODE_CORRUPT;
        length += 4;
        if (!distance || distance > done) return DECODE_CORRUPT;
        if (length > room - done) return DECODE_NO_ROOM;
        for (; length; length--, done++) out[done] = out[done - distance]; /* it may overlap itself */
        *written = done;
    }
    return DECODE_CORRUPT; /* empty, or the last sequence had a match */
}
