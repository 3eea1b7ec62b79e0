/* Whether the driver comes back to the buffers that it copies from only after a known number of other copies: learned
 * from what it does, and proven by what its buffers hold, before anything relies on it.
 *
 * It must go round and round over the same buffers, two rounds alike. Of each piece it is then looked, `depth` copies
 * later, whether its buffer still holds all of it. That says something where the buffer's next piece is another one:
 * only such pieces count, and half as many as there are buffers are wanted. One that does not hold refuses the driver
 * for ever.
 */
#ifndef CKPT_ROTATION_H
#define CKPT_ROTATION_H

#include <stddef.h>
#include <stdint.h>

#define CKPT_ROTATION_LEAST 8u /* buffers */
#define CKPT_ROTATION_MOST 63u
#define CKPT_ROTATION_PROOF_BYTES (256u << 10) /* a smaller piece proves nothing */

struct ckpt_rotation_piece {
    const unsigned char *to, *from;
    size_t bytes;
    int intact;
};

struct ckpt_rotation {
    unsigned wanted;  /* copies that a piece's buffer is to stay as it is: half of the buffers at most */
    unsigned depth;   /* and that it was seen to, once there are `buffers` */
    unsigned buffers; /* 0: not known */
    unsigned proven;  /* pieces that count */
    unsigned most_buffers, most_proven; /* of all that it learned */
    int refused;
    uint64_t count;    /* pieces since it began to learn */
    uint64_t restarts; /* how often that was, all in all */
    struct ckpt_rotation_piece piece[CKPT_ROTATION_MOST + 1];
};

typedef int ckpt_rotation_same(const void *a, const void *b, size_t bytes);

/* The driver is about to copy a piece, and everything before it is stored, unless the last answer was yes. Whether the
 * driver may go on before this one is stored, while it copies `depth` - 1 others. */
int ckpt_rotation_next(struct ckpt_rotation *rotation, const void *to, const void *from, size_t bytes,
                       ckpt_rotation_same *same);

/* Something else happened: what was learned is forgotten, but for a refusal. */
void ckpt_rotation_restart(struct ckpt_rotation *rotation);

#endif
