/* Bytes out of a stream socket into memory, or through a small buffer into a file, with their CRC32C. */
#ifndef CKPT_RECEIVE_H
#define CKPT_RECEIVE_H

#include <stddef.h>
#include <stdint.h>

/* What is received at a time stays in the second-level cache until it has been checksummed and written. */
#define CK_RECEIVE_BYTES ((size_t)256 << 10)

enum { CK_RECEIVE_WHOLE, CK_RECEIVE_ENDED, CK_RECEIVE_SOCKET, CK_RECEIVE_FILE, CK_RECEIVE_STOPPED };

typedef struct {
    int socket;
    int file;              /* -1: none */
    uint64_t offset;       /* of the first byte in the file */
    unsigned char *memory; /* `nbytes`; with `through` the buffer, at least CK_RECEIVE_BYTES and the first `filled` */
    int through;           /* each piece overwrites the one before */
    size_t nbytes;         /* to come, with the `filled` that lie in memory already */
    size_t filled;
    size_t done; /* of them are checksummed and, where there is a file, in it */
    uint32_t crc;
    int error;      /* errno of CK_RECEIVE_SOCKET and CK_RECEIVE_FILE */
    size_t arrived; /* for whoever watches: read it by ck_receive_arrived */
    int stop;       /* set it by ck_receive_stop */
} ck_receive;

/* Receive all that is missing, sleeping where nothing is there. One of the above; also where it is not
 * CK_RECEIVE_WHOLE, `done` and `crc` are right. The socket's low-water mark is one byte afterwards. */
int ck_receive_run(ck_receive *body);

/* From any thread. Whoever sleeps sees it within a tenth of a second, or when the socket is shut down. */
void ck_receive_stop(ck_receive *body);
size_t ck_receive_arrived(const ck_receive *body);

#endif
