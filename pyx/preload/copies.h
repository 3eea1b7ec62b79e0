/* Copies between the driver's memory and an image, shared out over the ring. */
#ifndef CKPT_COPIES_H
#define CKPT_COPIES_H

#include <stddef.h>
#include <stdint.h>

/* Copies as large as this are shared out; it costs some microseconds. */
#define CKPT_COPIES_BYTES (256u << 10)

enum ckpt_write_way { /* how a copy into an image stores */
    CKPT_WRITE_STREAM, /* past the caches */
    CKPT_WRITE_OWN,    /* into lines that were fetched for it while the driver was at its last transfer */
    CKPT_WRITE_BEHIND, /* the driver goes on once it is in the workers' caches: they store it then */
};

struct ckpt_copies_options {
    enum ckpt_write_way write;
    int read_streams; /* copies out of an image store past the caches, too */
    int read_ahead;   /* what the driver will want next is fetched in the meantime */
    int aside;        /* the caller copies nothing itself where workers are awake */
};

/* After the ring has started. `lanes` of it share `piece_bytes`, the driver's usual copy. */
void ckpt_copies_start(const struct ckpt_copies_options *options, size_t piece_bytes);

/* Called once, by any thread, when all bytes of a write are stored and fenced. */
struct ckpt_stored {
    void (*call)(const struct ckpt_stored *stored);
    unsigned image;
    uint64_t start, end;
};

/* Into an image. `usual`: the driver goes through it piece by piece, and this is the next one; then the bytes may be
 * stored after the return, and `room` bytes behind the destination are of the same image. */
void ckpt_copies_write(void *to, const void *from, size_t bytes, int usual, size_t room,
                       const struct ckpt_stored *stored);

/* Out of an image, complete at the return. `ahead`: so many bytes behind the source may be fetched, and are likely to
 * be wanted next. */
void ckpt_copies_read(void *to, const void *from, size_t bytes, size_t ahead);

/* Returns when all that was written is stored, and told so. What everything else that has to do with images begins
 * with. */
void ckpt_copies_drain(void);

/* In the child of a fork. */
void ckpt_copies_forget(void);

#endif
