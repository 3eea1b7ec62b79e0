#include "rotation.h"

#include "samples.h"

#define RING (CKPT_ROTATION_MOST + 1)

static struct ckpt_rotation_piece *past(struct ckpt_rotation *rotation, uint64_t back) {
    return &rotation->piece[(rotation->count - back) % RING];
}

void ckpt_rotation_restart(struct ckpt_rotation *rotation) {
    if (!rotation->count) return;
    rotation->count = 0;
    rotation->buffers = rotation->proven = rotation->depth = 0;
    rotation->restarts++;
}

static int was_seen(struct ckpt_rotation *rotation, const void *from) {
    for (uint64_t back = 1; back <= rotation->count; back++)
        if (past(rotation, back)->from == from) return 1;
    return 0;
}

/* Whether it fits what was seen until now. */
static int goes_on(struct ckpt_rotation *rotation, const unsigned char *to, const unsigned char *from) {
    if (!rotation->count) return 1;
    const struct ckpt_rotation_piece *last = past(rotation, 1);
    if (to != last->to + last->bytes) return 0;
    if (rotation->buffers) return from == past(rotation, rotation->buffers)->from;
    if (!was_seen(rotation, from)) return rotation->count < CKPT_ROTATION_MOST;
    if (from != past(rotation, rotation->count)->from || rotation->count < CKPT_ROTATION_LEAST) return 0;
    rotation->buffers = (unsigned)rotation->count;
    if (rotation->buffers > rotation->most_buffers) rotation->most_buffers = rotation->buffers;
    rotation->depth = rotation->wanted < rotation->buffers / 2 ? rotation->wanted : rotation->buffers / 2;
    return 1;
}

static int is_proven(const struct ckpt_rotation *rotation) {
    return rotation->buffers && rotation->count >= 2 * rotation->buffers && rotation->proven >= rotation->buffers / 2;
}

static void look_back(struct ckpt_rotation *rotation, const unsigned char *from, size_t bytes,
                      ckpt_rotation_same *same) {
    const struct ckpt_rotation_piece *before = past(rotation, rotation->buffers); /* in the same buffer */
    size_t common = bytes < before->bytes ? bytes : before->bytes;
    if (before->intact && !ckpt_samples_equal(from, before->to, common)) rotation->proven++;
    if (rotation->proven > rotation->most_proven) rotation->most_proven = rotation->proven;
    struct ckpt_rotation_piece *piece = past(rotation, rotation->depth);
    if (same(piece->from, piece->to, piece->bytes))
        piece->intact = piece->bytes >= CKPT_ROTATION_PROOF_BYTES;
    else
        rotation->refused = 1;
}

int ckpt_rotation_next(struct ckpt_rotation *rotation, const void *to, const void *from, size_t bytes,
                       ckpt_rotation_same *same) {
    if (rotation->refused || !rotation->wanted) return 0;
    if (!goes_on(rotation, to, from)) ckpt_rotation_restart(rotation);
    int proven = is_proven(rotation);
    if (rotation->buffers && !proven) look_back(rotation, from, bytes, same);
    *past(rotation, 0) = (struct ckpt_rotation_piece){to, from, bytes, 0};
    rotation->count++;
    return proven && !rotation->refused;
}
