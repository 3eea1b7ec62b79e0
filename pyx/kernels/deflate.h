/* Deflate (RFC 1951): an encoder that codes by entropy alone, and ISA-L's decoder where a process has it. */
#ifndef CKPT_DEFLATE_H
#define CKPT_DEFLATE_H

#include <stddef.h>
#include <stdint.h>

/* One final block of literals with Huffman codes of their own, or stored blocks where these are shorter: all of
   source as one raw stream. Bytes written, 0 when room does not hold them. nbytes is at most 2^30. */
size_t ck_deflate_literals(const unsigned char *source, size_t nbytes, unsigned char *destination, size_t room);
/* How many bytes that would write. */
size_t ck_deflate_literals_size(const unsigned char *source, size_t nbytes);

/* Finds isal_inflate_* in the shared object at path, which may be an extension module with ISA-L in it.
   0, or -1 when it cannot be loaded or has them not. The library stays loaded. */
int ck_isal_open(const char *path);

enum {
    CK_INFLATE_OK = 0,
    CK_INFLATE_CUT,     /* the stream goes on behind the last byte */
    CK_INFLATE_LONG,    /* it gives more than room bytes */
    CK_INFLATE_SHORT,   /* it gives fewer: *found */
    CK_INFLATE_TRAILER, /* bytes follow it: *found */
    CK_INFLATE_DAMAGED
};

#define CK_ISAL_STATE (512u << 10) /* bytes of a decoder's state; ISA-L 2's struct inflate_state has 88 KiB */

/* Decodes one raw stream that must fill destination exactly. state: CK_ISAL_STATE bytes, aligned to 64. */
int ck_isal_inflate(void *state, const unsigned char *source, size_t nbytes, unsigned char *destination,
                    size_t room, size_t *found);

typedef struct {
    const unsigned char *stored; /* the stored plane */
    const uint32_t *lengths;     /* of its blocks; NULL: the plane is stored as it is */
} ck_stored_plane;

#define CK_PLANE_BLOCK_MOST (256u << 10) /* what caches hold of several planes */

/* Decodes the 1, 2 or 4 planes of a chunk and merges them into destination, block by block while it is in the cache,
   and takes the CRC32C of that. block: raw bytes of each block but the last, of every coded plane. scratch: width * block
   bytes. Where it does not return CK_INFLATE_OK, *plane and *number tell the block. */
int ck_isal_chunk(void *state, const ck_stored_plane *planes, int width, size_t block, unsigned char *destination,
                  size_t nbytes, unsigned char *scratch, uint32_t *crc, int *plane, size_t *number, size_t *found);

#endif
