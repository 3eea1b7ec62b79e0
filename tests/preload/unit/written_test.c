/* Spans against a byte map, at random. */
#define _GNU_SOURCE
#include "check.h"
#include "written.h"

#include <string.h>

#define BYTES 4096u

static unsigned char map[BYTES];
static struct ckpt_written written;

static void compare(void) {
    unsigned at = 0;
    while (at < BYTES && map[at]) at++;
    CHECK(ckpt_written_prefix(&written) == at);
    uint64_t from = 0;
    struct ckpt_span gap;
    for (unsigned i = 0; i < BYTES;) {
        while (i < BYTES && map[i]) i++;
        unsigned start = i;
        while (i < BYTES && !map[i]) i++;
        if (start == i) break;
        CHECK(ckpt_written_gap(&written, from, BYTES, &gap));
        CHECK(gap.start == start && gap.end == i);
        from = gap.end;
    }
    CHECK(!ckpt_written_gap(&written, from, BYTES, &gap) || from == BYTES);
    for (unsigned i = 1; i < written.count; i++) CHECK(written.span[i - 1].end < written.span[i].start);
}

int main(void) {
    srand(7);
    for (int round = 0; round < 200; round++) {
        memset(map, 0, sizeof map);
        ckpt_written_clear(&written);
        for (int i = 0; i < 60; i++) {
            unsigned start = (unsigned)rand() % BYTES, length = (unsigned)rand() % (round % 2 ? 300 : 30);
            unsigned end = start + length < BYTES ? start + length : BYTES;
            memset(map + start, 1, end - start);
            ckpt_written_add(&written, start, end);
            compare();
        }
        CHECK(!written.overflow);
    }
    /* More gaps than there is room for: what is remembered stays true, and later spans still join. */
    ckpt_written_clear(&written);
    for (uint64_t i = 0; i < CKPT_SPANS + 10; i++) ckpt_written_add(&written, i * 10, i * 10 + 5);
    CHECK(written.overflow && written.count == CKPT_SPANS);
    ckpt_written_add(&written, 0, CKPT_SPANS * 20);
    CHECK(written.count == 1 && ckpt_written_prefix(&written) == CKPT_SPANS * 20);
    return 0;
}
