#include "written.h"

#include <string.h>

void ckpt_written_clear(struct ckpt_written *written) {
    written->count = 0;
    written->overflow = 0;
}

/* The first span that ends at or after `at`. */
static unsigned find(const struct ckpt_written *written, uint64_t at) {
    unsigned low = 0, high = written->count;
    while (low < high) {
        unsigned middle = (low + high) / 2;
        if (written->span[middle].end < at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

void ckpt_written_add(struct ckpt_written *written, uint64_t start, uint64_t end) {
    if (start >= end) return;
    unsigned first = find(written, start), past = first;
    while (past < written->count && written->span[past].start <= end) {
        if (written->span[past].start < start) start = written->span[past].start;
        if (written->span[past].end > end) end = written->span[past].end;
        past++;
    }
    if (past == first) {
        if (written->count == CKPT_SPANS) {
            written->overflow = 1;
            return;
        }
        memmove(&written->span[first + 1], &written->span[first],
                (written->count - first) * sizeof written->span[0]);
        written->count++;
    } else {
        memmove(&written->span[first + 1], &written->span[past], (written->count - past) * sizeof written->span[0]);
        written->count -= past - first - 1;
    }
    written->span[first] = (struct ckpt_span){start, end};
}

uint64_t ckpt_written_prefix(const struct ckpt_written *written) {
    return written->count && written->span[0].start == 0 ? written->span[0].end : 0;
}

int ckpt_written_gap(const struct ckpt_written *written, uint64_t from, uint64_t end, struct ckpt_span *gap) {
    unsigned i = find(written, from);
    if (i < written->count && written->span[i].start <= from) {
        from = written->span[i].end;
        i++;
    }
    if (from >= end) return 0;
    gap->start = from;
    gap->end = i < written->count && written->span[i].start < end ? written->span[i].start : end;
    return 1;
}
