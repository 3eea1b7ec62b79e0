/* Which bytes of an image were written: sorted spans that do not touch. */
#ifndef CKPT_WRITTEN_H
#define CKPT_WRITTEN_H

#include <stdint.h>

#define CKPT_SPANS 512

struct ckpt_span {
    uint64_t start, end;
};

struct ckpt_written {
    unsigned count;
    int overflow; /* a span had no room: what is here was written, but perhaps more */
    struct ckpt_span span[CKPT_SPANS];
};

void ckpt_written_clear(struct ckpt_written *written);
void ckpt_written_add(struct ckpt_written *written, uint64_t start, uint64_t end);
uint64_t ckpt_written_prefix(const struct ckpt_written *written); /* bytes from 0 without a gap */

/* The first gap at or after `from` and before `end`; 0 where there is none. */
int ckpt_written_gap(const struct ckpt_written *written, uint64_t from, uint64_t end, struct ckpt_span *gap);

#endif
