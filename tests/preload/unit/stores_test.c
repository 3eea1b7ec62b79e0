/* Every kind of store, every alignment: the bytes, and not one beside them. */
#define _GNU_SOURCE
#include "check.h"
#include "next.h"
#include "stores.h"

#include <string.h>

#define ROOM 8192u

static unsigned char from[ROOM], to[ROOM], expected[ROOM];

static void copy(size_t to_at, size_t from_at, size_t bytes) {
    memset(to, 0xcc, ROOM);
    memset(expected, 0xcc, ROOM);
    memcpy(expected + to_at, from + from_at, bytes);
    ckpt_stores_stream(to + to_at, from + from_at, bytes);
    CHECK(memcmp(to, expected, ROOM) == 0);
    memset(to, 0xcc, ROOM);
    ckpt_stores_keep(to + to_at, from + from_at, bytes);
    CHECK(memcmp(to, expected, ROOM) == 0);
}

int main(void) {
    const char *names[] = {"", "avx512", "avx2", "sse2", "plain"};
    ckpt_next_find();
    for (unsigned i = 0; i < ROOM; i++) from[i] = (unsigned char)(i * 7 + i / 256);
    for (unsigned kind = 0; kind < sizeof names / sizeof names[0]; kind++) {
        if (!ckpt_stores_force(names[kind])) continue;
        CHECK(!names[kind][0] || strcmp(ckpt_stores_name(), names[kind]) == 0);
        for (size_t at = 0; at < 70; at++)
            for (size_t bytes = 0; bytes < 200; bytes += 13) copy(at, 69 - at, bytes);
        copy(0, 0, ROOM);
        copy(1, 3, ROOM - 3);
    }
    CHECK(!ckpt_stores_force("nonsuch"));
    ckpt_stores_choose();
    memcpy(to, from, ROOM);
    for (unsigned demotion = 0; demotion < 4; demotion++) {
        const char *name = ckpt_stores_demotes_by(demotion);
        CHECK((demotion > CKPT_DEMOTE_NOT && demotion <= CKPT_DEMOTE_FLUSH) || strcmp(name, "nothing") == 0);
        for (size_t at = 0; at < 70; at++) ckpt_stores_demote(to + at, ROOM - at - at % 7, demotion);
        ckpt_stores_demote(to, 0, demotion);
        CHECK(memcmp(to, from, ROOM) == 0);
    }
    if (strcmp(ckpt_stores_demotes_by(CKPT_DEMOTE_FLUSH), "clflushopt") == 0)
        CHECK(strcmp(ckpt_stores_demotes_by(CKPT_DEMOTE), "nothing") != 0);
    return 0;
}
