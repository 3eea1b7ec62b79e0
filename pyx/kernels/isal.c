#include "deflate.h"

#include "crc32c.h"
#include "planes.h"

#include <dlfcn.h>

/* The first fields of ISA-L's struct inflate_state (igzip_lib.h, the same in every release of major version 2; the
   library fills in all that follows). */
typedef struct {
    uint8_t *next_out;
    uint32_t avail_out;
    uint32_t total_out;
    uint8_t *next_in;
    uint64_t read_in;
    uint32_t avail_in;
    int32_t read_in_length;
} inflate_head;

#define ISAL_DECOMP_OK 0
#define ISAL_END_INPUT 1
#define ISAL_OUT_OVERFLOW 2

static void (*inflate_init)(void *state);
static int (*inflate_stateless)(void *state);

int ck_isal_open(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) return -1;
    void (*init)(void *) = (void (*)(void *))dlsym(library, "isal_inflate_init");
    int (*stateless)(void *) = (int (*)(void *))dlsym(library, "isal_inflate_stateless");
    if (init == NULL || stateless == NULL) {
        dlclose(library);
        return -1;
    }
    inflate_init = init;
    inflate_stateless = stateless;
    return 0;
}

int ck_isal_inflate(void *state, const unsigned char *source, size_t nbytes, unsigned char *destination, size_t room,
                    size_t *found) {
    inflate_head *head = state;
    inflate_init(state);
    head->next_in = (uint8_t *)source;
    head->avail_in = (uint32_t)nbytes;
    head->next_out = destination;
    head->avail_out = (uint32_t)room;
    int outcome = inflate_stateless(state);
    if (outcome == ISAL_END_INPUT) return CK_INFLATE_CUT;
    if (outcome == ISAL_OUT_OVERFLOW) return CK_INFLATE_LONG;
    if (outcome != ISAL_DECOMP_OK) return CK_INFLATE_DAMAGED;
    *found = head->total_out;
    if (head->total_out != room) return CK_INFLATE_SHORT;
    *found = head->avail_in;
    return head->avail_in ? CK_INFLATE_TRAILER : CK_INFLATE_OK;
}

int ck_isal_chunk(void *state, const ck_stored_plane *planes, int width, size_t block, unsigned char *destination,
                  size_t nbytes, unsigned char *scratch, uint32_t *crc, int *plane, size_t *number, size_t *found) {
    const unsigned char *next[4], *parts[4];
    size_t step = block * (size_t)width;
    uint32_t checksum = 0;
    for (int p = 0; p < width; p++) next[p] = planes[p].stored;
    for (size_t start = 0, i = 0; start < nbytes; start += step, i++) {
        size_t part = nbytes - start < step ? nbytes - start : step;
        for (int p = 0; p < width; p++) {
            size_t room = (part - (size_t)p + (size_t)width - 1) / (size_t)width;
            parts[p] = next[p];
            if (planes[p].lengths == NULL) {
                next[p] += room;
            } else if (room) {
                unsigned char *to = width == 1 ? destination + start : scratch + (size_t)p * block;
                int outcome = ck_isal_inflate(state, next[p], planes[p].lengths[i], to, room, found);
                if (outcome != CK_INFLATE_OK) {
                    *plane = p;
                    *number = i;
                    return outcome;
                }
                next[p] += planes[p].lengths[i];
                parts[p] = to;
            }
        }
        if (width > 1) ck_planes_merge(destination + start, parts, part, width);
        checksum = ck_crc32c(checksum, destination + start, part);
    }
    *crc = checksum;
    return CK_INFLATE_OK;
}
