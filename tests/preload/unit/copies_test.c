/* Whole pieces and odd ones, in every way of copying, with fewer bytes behind them than would be fetched ahead. */
#define _GNU_SOURCE
#include "check.h"
#include "copies.h"
#include "next.h"
#include "ring.h"
#include "stores.h"

#include <string.h>

#define PIECE (512u << 10)
#define PIECES 4u

static unsigned char *image, *buffer, *device;

/* The driver's way: all pieces through one buffer, and back. */
static void cycle(const struct ckpt_copies_options *options, size_t piece) {
    size_t all = PIECES * (size_t)PIECE;
    ckpt_copies_set(options);
    memset(image, 0, all);
    for (size_t start = 0; start < all; start += piece) {
        size_t bytes = all - start < piece ? all - start : piece;
        memcpy(buffer, device + start, bytes);
        ckpt_copies_write(image + start, buffer, bytes);
    }
    CHECK(memcmp(image, device, all) == 0);
    for (size_t start = 0; start < all; start += piece) {
        size_t bytes = all - start < piece ? all - start : piece;
        ckpt_copies_read(buffer, image + start, bytes, all - start - bytes);
        CHECK(memcmp(buffer, device + start, bytes) == 0);
    }
}

static void every_way(void) {
    static const size_t blocks[] = {0, 4096, 16u << 10, 1u << 30}, pieces[] = {PIECE, CKPT_COPIES_BYTES - 1, PIECE + 65};
    for (unsigned way = 0; way < 3 * 2 * 2 * 4; way++) {
        struct ckpt_copies_options options = {
            .demote = way % 3,
            .read_streams = way / 3 % 2,
            .aside = way / 6 % 2,
            .block = blocks[way / 12],
            .read_ahead = way / 12,
        };
        for (unsigned i = 0; i < 3; i++) cycle(&options, pieces[i]);
    }
}

int main(void) {
    const struct ckpt_ring_options awake = {NULL, 100};
    ckpt_next_find();
    ckpt_stores_choose();
    image = aligned_alloc(4096, PIECES * (size_t)PIECE);
    buffer = aligned_alloc(4096, PIECE + 4096);
    device = malloc(PIECES * (size_t)PIECE);
    CHECK(image && buffer && device);
    for (size_t i = 0; i < PIECES * (size_t)PIECE; i++) device[i] = (unsigned char)(i * 2654435761u >> 13);
    every_way(); /* by the caller alone */
    CHECK(ckpt_ring_start(3, &awake) == 3);
    every_way();
    ckpt_ring_limit(3, 0);
    every_way();
    return 0;
}
