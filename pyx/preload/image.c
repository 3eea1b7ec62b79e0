#define _GNU_SOURCE
#include "image.h"

#include "config.h"
#include "control_page.h"
#include "copies.h"
#include "futex.h"
#include "gate.h"
#include "handover_server.h"
#include "next.h"
#include "pool.h"
#include "probes.h"
#include "process_facts.h"
#include "ring.h"
#include "sums.h"
#include "window.h"
#include "written.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#define ZERO_STEP_BYTES (2u << 20)
#define AHEAD_BYTES (8 * CKPT_PIECE_BYTES) /* the most that is fetched before it is wanted */

_Atomic uintptr_t ckpt_image_low, ckpt_image_high;

/* What is not for others to see. Slot i goes with entry i of the control page. */
static struct {
    uint64_t space;  /* bytes of the pool */
    uint64_t mapped; /* bytes in the process: at an address of the driver's choice not one page more than it asked */
    struct ckpt_written written;
} slots[CKPT_IMAGES];
static pthread_mutex_t tracking = PTHREAD_MUTEX_INITIALIZER; /* of slots[] but their sizes, late lists and watermarks */

static struct ckpt_image *image_at(unsigned i) { return &ckpt_control->image[i]; }
static int is_mapped(unsigned i) { return atomic_load(&image_at(i)->phase) != CKPT_PHASE_FREE; }

int ckpt_images_mapped(void) {
    int count = 0;
    for (unsigned i = 0; ckpt_control && i < CKPT_IMAGES; i++) count += is_mapped(i);
    return count;
}

/* The image's entries of the block table; NULL where none are kept. */
static _Atomic uint64_t *blocks_of(const struct ckpt_image *image) {
    if (!(atomic_load(&image->flags) & CKPT_IMAGE_SUMMED)) return NULL;
    return ckpt_control_blocks() + image->offset / CKPT_BLOCK_BYTES;
}

static void narrow_range(void) {
    uintptr_t low = 0, high = 0;
    for (unsigned i = 0; i < CKPT_IMAGES; i++) {
        if (!is_mapped(i)) continue;
        uintptr_t start = image_at(i)->address, end = start + slots[i].mapped;
        if (!low || start < low) low = start;
        if (end > high) high = end;
    }
    atomic_store(&ckpt_image_low, low);
    atomic_store(&ckpt_image_high, high);
}

/* First fit among the images that are there. */
static int find_space(uint64_t space, unsigned *slot, uint64_t *offset) {
    int found = 0;
    for (unsigned i = 0; i < CKPT_IMAGES && !found; i++)
        if (!is_mapped(i)) {
            *slot = i;
            found = 1;
        }
    if (!found) return 0;
    uint64_t at = 0;
    for (unsigned i = 0; i < CKPT_IMAGES;) {
        if (is_mapped(i) && at < image_at(i)->offset + slots[i].space && image_at(i)->offset < at + space) {
            at = image_at(i)->offset + slots[i].space;
            i = 0;
            continue;
        }
        i++;
    }
    *offset = at;
    return at <= ckpt_pool_bytes() && space <= ckpt_pool_bytes() - at;
}

static void fall_back(int reason, uint64_t bytes, const char *text) {
    ckpt_control->fallback_reason = (uint32_t)reason;
    ckpt_control->fallback_bytes = bytes;
    ckpt_control_text(ckpt_control->fallback_text, "%s", text);
    atomic_fetch_add(&ckpt_control->fallbacks, 1);
    ckpt_control_event();
}

void ckpt_image_passed(size_t bytes) {
    if (ckpt_control)
        fall_back(CKPT_REASON_NOT_EXPECTED, bytes, "no checkpoint was expected, and a thread of the program's asked");
}

static uint64_t whole_pages(uint64_t bytes) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

/* 0 or an errno. */
static int place(uint64_t offset, uint64_t bytes, void *address, int flags, unsigned char **where) {
    int error = 0;
    void *mapped = NULL;
    if (address) {
        int replace = (flags & MAP_FIXED) && !(flags & MAP_FIXED_NOREPLACE);
        error = ckpt_pool_map(offset, whole_pages(bytes), address, replace, &mapped);
        if (error && !(flags & (MAP_FIXED | MAP_FIXED_NOREPLACE))) mapped = NULL, error = 0; /* it was a wish */
    }
    if (!error && !mapped && !(mapped = ckpt_pool_at(offset)))
        error = ckpt_pool_map(offset, whole_pages(bytes), NULL, 0, &mapped);
    *where = mapped;
    return error;
}

static void open_slot(unsigned slot, uint64_t offset, uint64_t space, uint64_t bytes, unsigned char *where) {
    struct ckpt_image *image = image_at(slot);
    int kept = where == ckpt_pool_at(offset);
    memset(image, 0, sizeof *image);
    slots[slot].space = space;
    slots[slot].mapped = kept ? space : whole_pages(bytes);
    ckpt_written_clear(&slots[slot].written);
    ckpt_window_clear(slot);
    memset(ckpt_control_pieces() + offset / CKPT_PIECE_BYTES, 0, space / CKPT_PIECE_BYTES * sizeof(struct ckpt_piece));
    image->generation = atomic_fetch_add(&ckpt_control->generation, 1) + 1;
    image->address = (uint64_t)where;
    image->offset = offset;
    image->bytes = bytes;
    uint32_t flags = kept ? 0 : CKPT_IMAGE_MOVED;
    if (ckpt_config.checksum && atomic_load(&ckpt_control->armed)) {
        ckpt_sums_clear(ckpt_control_blocks() + offset / CKPT_BLOCK_BYTES, space);
        flags |= CKPT_IMAGE_SUMMED;
    }
    atomic_store(&image->flags, flags);
}

/* Under the pool's lock. */
static int serve(void *address, size_t bytes, int flags, unsigned char **where, char *text) {
    uint64_t began = ckpt_now_ns(), offset;
    uint64_t space = ((uint64_t)bytes + CKPT_PIECE_BYTES - 1) / CKPT_PIECE_BYTES * CKPT_PIECE_BYTES;
    unsigned slot;
    if (ckpt_pool_make()) {
        ckpt_control_text(text, "%s", ckpt_control->pool_text);
        return (int)ckpt_control->pool_reason;
    }
    if (ckpt_pool_fd() < 0) {
        ckpt_control_text(text, "the program closed the pool's descriptor");
        return CKPT_REASON_NO_POOL;
    }
    if (!find_space(space, &slot, &offset)) {
        ckpt_control_text(text, "the pool of %llu bytes has no free range of %zu",
                          (unsigned long long)ckpt_pool_bytes(), bytes);
        return CKPT_REASON_TOO_SMALL;
    }
    int reason = ckpt_pool_warm(offset + space, 0, text);
    if (!reason && atomic_load(&ckpt_control->pool_holes)) reason = ckpt_pool_refill(offset, space, text);
    if (reason) return reason;
    int error = place(offset, bytes, address, flags, where);
    if (error) {
        ckpt_control_text(text, "the pool cannot be mapped at %p: %s", address, ckpt_error_words(error));
        return CKPT_REASON_PLACE;
    }
    if (offset == 0 && space >= atomic_load(&ckpt_control->pool_warm)) atomic_store(&ckpt_control->pool_holes, 0);
    open_slot(slot, offset, space, bytes, *where);
    image_at(slot)->map_ns = ckpt_now_ns() - began;
    atomic_store(&image_at(slot)->phase, CKPT_PHASE_WRITING);
    narrow_range();
    if (ckpt_config.mode == CKPT_POOL_GROW) ckpt_pool_want((offset + space) / 100 * (100 + ckpt_config.margin_percent));
    return 0;
}

void *ckpt_image_map(void *address, size_t bytes, int flags) {
    char text[CKPT_TEXT] = "";
    unsigned char *where = NULL;
    int before = errno;
    if (!ckpt_control) return NULL;
    atomic_fetch_add(&ckpt_pool_hurry, 1);
    pthread_mutex_lock(&ckpt_pool_lock);
    int reason = serve(address, bytes, flags, &where, text);
    ckpt_probe_mapped();
    pthread_mutex_unlock(&ckpt_pool_lock);
    atomic_fetch_sub(&ckpt_pool_hurry, 1);
    if (reason) {
        fall_back(reason, bytes, text);
        where = NULL;
    } else {
        atomic_fetch_add(&ckpt_control->served, 1);
        ckpt_control_event();
        if (ckpt_config.mode == CKPT_POOL_GROW) ckpt_handover_wake();
    }
    errno = before;
    return where;
}

static void close_slot(unsigned i) {
    ckpt_probe_returned();
    atomic_store(&image_at(i)->phase, CKPT_PHASE_FREE);
    atomic_store(&image_at(i)->gate, CKPT_GATE_OPEN);
    narrow_range();
    atomic_fetch_add(&ckpt_control->returned, 1);
    ckpt_control_event();
}

int ckpt_image_unmap(void *address, size_t bytes) {
    uint64_t start = (uint64_t)address, end = start + whole_pages(bytes);
    int answer = 0, before = errno;
    pthread_mutex_lock(&ckpt_pool_lock);
    for (unsigned i = 0; i < CKPT_IMAGES; i++) {
        struct ckpt_image *image = image_at(i);
        uint64_t image_end = image->address + whole_pages(image->bytes);
        if (!is_mapped(i) || end <= image->address || image->address + slots[i].mapped <= start) continue;
        int moved = atomic_load(&image->flags) & CKPT_IMAGE_MOVED;
        if (start == image->address && end == image_end) {
            if (moved) ckpt_raw_munmap((void *)image->address, slots[i].mapped);
            close_slot(i);
            answer = 1;
            break;
        }
        /* A part of it, or more than it: the caller unmaps what it says, and the pool is not whole any more. What is
         * left of the image is forgotten with its last byte, which is the one that ends the range. */
        if (!moved) ckpt_pool_tear();
        if (end >= image_end) close_slot(i);
    }
    int cooled = answer && !ckpt_images_mapped() && ckpt_pool_cool();
    pthread_mutex_unlock(&ckpt_pool_lock);
    if (cooled) ckpt_handover_wake();
    errno = before;
    return answer;
}

static int find_image(const void *address, size_t bytes, uint64_t *start, uint64_t *end) {
    uint64_t from = (uint64_t)address, to = from + bytes;
    for (unsigned i = 0; i < CKPT_IMAGES; i++) {
        uint64_t low = image_at(i)->address, high = low + slots[i].mapped;
        if (!is_mapped(i) || to <= low || high <= from) continue;
        *start = from > low ? from - low : 0;
        *end = (to < high ? to : high) - low;
        return (int)i;
    }
    return -1;
}

static struct ckpt_piece *pieces_of(const struct ckpt_image *image, uint64_t start, uint64_t end, uint64_t *count) {
    uint64_t first = (image->offset + start) / CKPT_PIECE_BYTES, last = (image->offset + end - 1) / CKPT_PIECE_BYTES;
    *count = last - first + 1;
    return ckpt_control_pieces() + first;
}

/* `summed`: what is stored will be summed up. */
static void write_begins(unsigned i, uint64_t start, uint64_t end, int summed) {
    struct ckpt_image *image = image_at(i);
    uint64_t count;
    struct ckpt_piece *pieces = pieces_of(image, start, end, &count);
    pthread_mutex_lock(&tracking);
    for (uint64_t k = 0; k < count; k++) atomic_fetch_add(&pieces[k].started, 1);
    _Atomic uint64_t *blocks = blocks_of(image);
    if (blocks) (summed ? ckpt_sums_claim : ckpt_sums_spoil)(blocks, start, end);
    if (!image->began_ns) image->began_ns = ckpt_now_ns();
    if (start < atomic_load(&image->high)) {
        uint64_t serial = atomic_load(&ckpt_control->late_serial) + 1;
        ckpt_control->late[(serial - 1) % CKPT_LATE] =
            (struct ckpt_late){image->generation, start, end - start, serial};
        atomic_fetch_add(&image->late_count, 1);
        atomic_store(&ckpt_control->late_serial, serial);
    }
    pthread_mutex_unlock(&tracking);
}

static void write_ends(unsigned i, uint64_t start, uint64_t end) {
    struct ckpt_image *image = image_at(i);
    uint64_t count;
    struct ckpt_piece *pieces = pieces_of(image, start, end, &count);
    pthread_mutex_lock(&tracking);
    for (uint64_t k = 0; k < count; k++) atomic_fetch_add(&pieces[k].finished, 1);
    ckpt_written_add(&slots[i].written, start, end);
    if (slots[i].written.overflow) atomic_fetch_or(&image->flags, CKPT_IMAGE_UNTRACKED);
    image->ended_ns = ckpt_now_ns();
    atomic_fetch_add(&image->written, end - start);
    atomic_fetch_add(&image->copies, 1);
    if (end > atomic_load(&image->high)) atomic_store(&image->high, end);
    uint64_t prefix = ckpt_written_prefix(&slots[i].written);
    atomic_store(&image->watermark, prefix < image->bytes ? prefix : image->bytes);
    pthread_mutex_unlock(&tracking);
    ckpt_control_event();
}

static void zero_step(void *context, size_t start, size_t bytes, struct ckpt_later *later) {
    (void)later;
    memset((unsigned char *)context + start, 0, bytes);
}

static uint64_t settle(unsigned i) {
    struct ckpt_image *image = image_at(i);
    struct ckpt_span gap;
    uint64_t filled = 0;
    if (atomic_load(&image->flags) & (CKPT_IMAGE_SETTLED | CKPT_IMAGE_UNTRACKED)) return 0;
    /* A driver of which no copy is seen writes in another way: what it left there is not for us to clear. */
    if (!atomic_load(&image->written)) return 0;
    for (uint64_t from = 0;; from = gap.end) {
        pthread_mutex_lock(&tracking);
        int found = ckpt_written_gap(&slots[i].written, from, slots[i].mapped, &gap);
        pthread_mutex_unlock(&tracking);
        if (!found) break;
        uint64_t count;
        struct ckpt_piece *pieces = pieces_of(image, gap.start, gap.end, &count);
        for (uint64_t k = 0; k < count; k++) atomic_fetch_add(&pieces[k].started, 1);
        if (blocks_of(image)) ckpt_sums_spoil(blocks_of(image), gap.start, gap.end);
        ckpt_ring_run(zero_step, (unsigned char *)image->address + gap.start, gap.end - gap.start, ZERO_STEP_BYTES, 0,
                      CKPT_RING_PLAIN);
        for (uint64_t k = 0; k < count; k++) atomic_fetch_add(&pieces[k].finished, 1);
        filled += gap.end - gap.start;
    }
    pthread_mutex_lock(&tracking);
    ckpt_written_add(&slots[i].written, 0, slots[i].space);
    atomic_store(&image->watermark, image->bytes);
    atomic_fetch_or(&image->flags, CKPT_IMAGE_SETTLED);
    pthread_mutex_unlock(&tracking);
    ckpt_control_event();
    return filled;
}

uint64_t ckpt_images_settle(void) {
    uint64_t filled = 0;
    pthread_mutex_lock(&ckpt_pool_lock);
    for (unsigned i = 0; i < CKPT_IMAGES; i++)
        if (is_mapped(i)) filled += settle(i);
    pthread_mutex_unlock(&ckpt_pool_lock);
    return filled;
}

static void map_step(void *context, size_t start, size_t bytes, struct ckpt_later *later) {
    (void)later;
    madvise((unsigned char *)context + start, bytes, MADV_POPULATE_READ);
}

/* Others have filled the holes of this image: its page tables are made by all threads, not by faults of each copy. */
static void map_pages(const struct ckpt_image *image) {
    if (!atomic_load(&ckpt_control->pool_holes) || atomic_load(&image->gate) != CKPT_GATE_OPEN) return;
    ckpt_ring_run(map_step, (unsigned char *)image->address, whole_pages(image->bytes), CKPT_PIECE_BYTES, 0,
                  CKPT_RING_PLAIN);
}

/* The first copy that reads an image says so. */
static void reading_begins(unsigned i) {
    struct ckpt_image *image = image_at(i);
    if (atomic_load(&image->phase) == CKPT_PHASE_WRITING) {
        uint32_t writing = CKPT_PHASE_WRITING;
        pthread_mutex_lock(&ckpt_pool_lock);
        settle(i);
        map_pages(image);
        if (atomic_compare_exchange_strong(&image->phase, &writing, CKPT_PHASE_READING))
            image->read_began_ns = ckpt_now_ns();
        pthread_mutex_unlock(&ckpt_pool_lock);
        ckpt_control_event();
    }
}

/* To be read up to `end`: what an image ends with lies in a page of its own. */
static void pass_gate(struct ckpt_image *image, uint64_t start, uint64_t end) {
    ckpt_gate_pass(image, start, end < image->bytes ? end : image->bytes);
}

/* How many bytes at `start` of the image may be fetched ahead: at most `most`, and none that is not there. */
static uint64_t readable(const struct ckpt_image *image, uint64_t start, uint64_t most) {
    uint64_t end = image->bytes;
    if (atomic_load(&image->gate) != CKPT_GATE_OPEN) {
        uint64_t ready = atomic_load(&image->ready);
        if (ready < end) end = ready;
    }
    if (start >= end) return 0;
    return end - start < most ? end - start : most;
}

static void read_ends(unsigned i, uint64_t start, uint64_t end) {
    struct ckpt_image *image = image_at(i);
    image->read_ended_ns = ckpt_now_ns();
    atomic_fetch_add(&image->copies, 1);
    atomic_fetch_add(&image->read, end - start);
    ckpt_control_event();
}

/* ---- copies ---- */

/* Whether what was copied up to `end` lay there all the time. Another restore of the same image may have begun while
 * the copy waited or went on: it takes everything back first, and may lay it out in another way. */
static int was_there(const struct ckpt_image *image, uint64_t window, uint64_t end) {
    atomic_thread_fence(memory_order_acquire); /* the bytes first */
    if (atomic_load(&image->window) != window) return 0;
    return atomic_load(&image->gate) == CKPT_GATE_OPEN ||
           atomic_load(&image->ready) >= (end < image->bytes ? end : image->bytes);
}

/* Piece by piece: a copy may be larger than the window. Up to where it came while the window was this one. */
static uint64_t copy_windowed(unsigned i, uint64_t window, unsigned char *destination, uint64_t start, uint64_t end) {
    struct ckpt_image *image = image_at(i);
    const unsigned char *base = (const unsigned char *)image->address;
    while (start < end) {
        uint64_t at = start % window, step = end - start;
        if (step > CKPT_PIECE_BYTES) step = CKPT_PIECE_BYTES;
        if (step > window - at) step = window - at;
        ckpt_window_enter(i, start);
        pass_gate(image, start, start + step);
        uint64_t next = (start + step) % window;
        ckpt_copies_read(destination, base + at, step, next ? readable(image, start + step, window - next) : 0);
        int good = was_there(image, window, start + step);
        ckpt_window_leave(i, start, good ? start + step : start);
        if (!good) break;
        read_ends(i, start, start + step);
        destination += step;
        start += step;
    }
    return start;
}

static void read_image(unsigned i, unsigned char *destination, const unsigned char *source, size_t bytes,
                       uint64_t start, uint64_t end) {
    struct ckpt_image *image = image_at(i);
    while (start < end) {
        uint64_t window = atomic_load(&image->window), reached = end;
        if (window && end - start != bytes) ckpt_gate_end("the driver copied beyond the end of its image");
        if (window) {
            reached = copy_windowed(i, window, destination, start, end);
        } else {
            pass_gate(image, start, end);
            ckpt_copies_read(destination, source, ckpt_probe_bytes(bytes), readable(image, end, AHEAD_BYTES));
            if (!was_there(image, window, end)) continue;
            read_ends(i, start, end);
        }
        destination += reached - start;
        source += reached - start;
        bytes -= reached - start;
        start = reached;
    }
}

static void write_image(unsigned i, void *destination, const void *source, size_t bytes, uint64_t start, uint64_t end) {
    struct ckpt_copies_sums sums = {ckpt_sums_take, blocks_of(image_at(i)), start, CKPT_BLOCK_BYTES};
    int summed = sums.blocks && end - start == bytes;
    write_begins(i, start, end, summed);
    if (summed)
        ckpt_copies_write_summed(destination, source, ckpt_probe_bytes(bytes), &sums);
    else
        ckpt_copies_write(destination, source, ckpt_probe_bytes(bytes));
    write_ends(i, start, end);
}

void ckpt_image_copy(void *destination, const void *source, size_t bytes, int overlap) {
    uint64_t to_start = 0, to_end = 0, from_start = 0, from_end = 0;
    if (!bytes) return;
    int before = errno;
    ckpt_probe_copy(destination, source);
    int to = find_image(destination, bytes, &to_start, &to_end), from = find_image(source, bytes, &from_start, &from_end);
    if (from >= 0) reading_begins((unsigned)from);
    if (to < 0 && from < 0) { /* near an image, but not in it */
        (overlap ? ckpt_next.memmove : ckpt_next.memcpy)(destination, source, bytes);
    } else if (to < 0) {
        read_image((unsigned)from, destination, source, bytes, from_start, from_end);
    } else if (from < 0) {
        write_image((unsigned)to, destination, source, bytes, to_start, to_end);
    } else { /* within images: none was seen to */
        if (atomic_load(&image_at((unsigned)from)->window))
            ckpt_gate_end("the driver copied from one part of its images to another");
        pass_gate(image_at((unsigned)from), from_start, from_end);
        write_begins((unsigned)to, to_start, to_end, 0);
        ckpt_next.memmove(destination, source, bytes);
        write_ends((unsigned)to, to_start, to_end);
        read_ends((unsigned)from, from_start, from_end);
    }
    ckpt_probe_copied(to >= 0);
    errno = before;
}

void ckpt_images_forget(void) {
    atomic_store(&ckpt_image_low, 0);
    atomic_store(&ckpt_image_high, 0);
    memset(slots, 0, sizeof slots);
    ckpt_windows_forget();
    pthread_mutex_init(&tracking, NULL);
}
