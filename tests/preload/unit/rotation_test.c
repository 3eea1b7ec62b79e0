/* What is learned of drivers that go round, that do not, that fill their buffers early, and of what proves nothing. */
#define _GNU_SOURCE
#include "check.h"
#include "rotation.h"

#include <string.h>

#define PIECE CKPT_ROTATION_PROOF_BYTES
#define PIECES 400u
#define NEVER PIECES

static unsigned char *pool, *staging;

static int same(const void *a, const void *b, size_t bytes) { return memcmp(a, b, bytes) == 0; }

enum content { ALL_DIFFER, ALL_ALIKE, HALF_ALIKE };

static void fill(unsigned char *buffer, unsigned piece, enum content content) {
    int alike = content == ALL_ALIKE || (content == HALF_ALIKE && piece % 2);
    memset(buffer, alike ? 7 : (int)(1 + piece % 251), PIECE);
    if (!alike) memcpy(buffer, &piece, sizeof piece);
}

struct driver {
    unsigned buffers, wanted;
    unsigned fills_early; /* so many copies after a piece its buffer has the next one; 0: not before it must */
    unsigned changes;     /* the order, from this piece on */
    unsigned skips;       /* a place of the image, before this piece */
    enum content content;
};

/* The first piece that may be deferred, or NEVER. */
static unsigned first_deferred(const struct driver *driver, struct ckpt_rotation *rotation) {
    unsigned first = NEVER, at = 0;
    memset(rotation, 0, sizeof *rotation);
    rotation->wanted = driver->wanted;
    for (unsigned i = 0; i < PIECES; i++) {
        unsigned k = driver->changes && i >= driver->changes ? i * i / 3 % driver->buffers : i % driver->buffers;
        unsigned char *from = staging + k * (size_t)PIECE;
        fill(from, i, driver->content);
        if (driver->fills_early && i >= driver->fills_early) {
            unsigned early = i - driver->fills_early;
            fill(staging + early % driver->buffers * (size_t)PIECE, early + driver->buffers, driver->content);
        }
        if (i && i == driver->skips) at++;
        unsigned char *to = pool + at++ * (size_t)PIECE;
        int yes = ckpt_rotation_next(rotation, to, from, PIECE, same);
        if (yes && first == NEVER) first = i;
        if (!yes && i > driver->changes) CHECK(first == NEVER || driver->changes || driver->skips);
        memcpy(to, from, PIECE);
    }
    return first;
}

int main(void) {
    struct ckpt_rotation rotation;
    pool = malloc((PIECES + 1) * (size_t)PIECE);
    staging = malloc(70 * (size_t)PIECE);
    CHECK(pool && staging);

    unsigned first = first_deferred(&(struct driver){.buffers = 27, .wanted = 9}, &rotation);
    CHECK(first >= 54 && first < 64 && rotation.buffers == 27 && rotation.depth == 9 && !rotation.restarts);
    first = first_deferred(&(struct driver){.buffers = 8, .wanted = 13}, &rotation);
    CHECK(first >= 16 && first < 24 && rotation.depth == 4);
    first = first_deferred(&(struct driver){.buffers = 27, .wanted = 9, .content = HALF_ALIKE}, &rotation);
    CHECK(first >= 54 && first < NEVER);
    CHECK(first_deferred(&(struct driver){.buffers = 27, .wanted = 9, .skips = 300}, &rotation) < 64);
    CHECK(rotation.restarts == 1 && rotation.proven >= 13); /* and once more */
    CHECK(first_deferred(&(struct driver){.buffers = 27, .wanted = 9, .changes = 100}, &rotation) < 64);
    CHECK(rotation.restarts > 1 && !rotation.proven);

    CHECK(first_deferred(&(struct driver){.buffers = 27, .wanted = 0}, &rotation) == NEVER);
    CHECK(first_deferred(&(struct driver){.buffers = 1, .wanted = 9}, &rotation) == NEVER);
    CHECK(first_deferred(&(struct driver){.buffers = 7, .wanted = 9}, &rotation) == NEVER);
    CHECK(first_deferred(&(struct driver){.buffers = 64, .wanted = 9}, &rotation) == NEVER);
    CHECK(first_deferred(&(struct driver){.buffers = 63, .wanted = 9}, &rotation) != NEVER);
    CHECK(first_deferred(&(struct driver){.buffers = 27, .wanted = 9, .content = ALL_ALIKE}, &rotation) == NEVER);
    CHECK(!rotation.refused);
    for (unsigned early = 1; early <= 9; early++)
        CHECK(first_deferred(&(struct driver){.buffers = 27, .wanted = 9, .fills_early = early}, &rotation) == NEVER &&
              rotation.refused);
    CHECK(first_deferred(&(struct driver){.buffers = 27, .wanted = 9, .fills_early = 10}, &rotation) < 64);
    ckpt_rotation_restart(&rotation);
    CHECK(!rotation.count && !rotation.buffers);
    return 0;
}
