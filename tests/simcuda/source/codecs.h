/* Decoders of the simulated decompression engine and of the simulated nvCOMP. Bounded: none reads past `nbytes` or
 * writes past `room`. */
#ifndef SIMCUDA_CODECS_H
#define SIMCUDA_CODECS_H

#include <stddef.h>

typedef enum {
    DECODED = 0,
    DECODE_CORRUPT,  /* not a stream of this format, cut short, or with bytes after its end */
    DECODE_NO_ROOM,  /* more than `room` bytes come out */
    DECODE_NO_LIBRARY /* libz.so.1 is not on this machine */
} Decoded;

/* One raw RFC 1951 stream, by zlib. */
Decoded deflate_decode(const unsigned char *in, size_t nbytes, unsigned char *out, size_t room, size_t *written);
/* `level` is nvCOMP's, 0 to 5: 0 codes entropy alone. 0 bytes written when `room` is too small or there is no zlib. */
size_t deflate_encode(int level, const unsigned char *in, size_t nbytes, unsigned char *out, size_t room);

/* One LZ4 block (no frame), one raw Snappy stream (its length in front). */
Decoded lz4_decode(const unsigned char *in, size_t nbytes, unsigned char *out, size_t room, size_t *written);
Decoded snappy_decode(const unsigned char *in, size_t nbytes, unsigned char *out, size_t room, size_t *written);

#endif
