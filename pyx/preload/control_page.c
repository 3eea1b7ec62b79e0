#define _GNU_SOURCE
#include "control_page.h"

#include "config.h"
#include "descriptor.h"
#include "futex.h"
#include "next.h"
#include "process_facts.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

struct ckpt_control *ckpt_control;
static struct ckpt_descriptor descriptor = CKPT_NO_DESCRIPTOR;

int ckpt_control_make(void) {
    int fd = memfd_create("ckptpipe-control", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return errno;
    struct ckpt_control *page = MAP_FAILED;
    if (ftruncate(fd, CKPT_CONTROL_BYTES) == 0 && fchmod(fd, 0600) == 0 &&
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
        page = ckpt_raw_mmap(NULL, CKPT_CONTROL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (page == MAP_FAILED) {
        int error = errno;
        close(fd);
        return error;
    }
    madvise(page, CKPT_CONTROL_BYTES, MADV_DONTFORK);
    madvise(page, CKPT_CONTROL_BYTES, MADV_DONTDUMP);
    descriptor = ckpt_descriptor_of(fd);
    page->version = CKPT_CONTROL_VERSION;
    page->header_bytes = sizeof *page;
    page->control_bytes = CKPT_CONTROL_BYTES;
    page->piece_bytes = CKPT_PIECE_BYTES;
    page->images = CKPT_IMAGES;
    page->pid = (int32_t)getpid();
    page->start_time = ckpt_start_time();
    page->numa_node = -1;
    page->magic = CKPT_CONTROL_MAGIC;
    __atomic_store_n(&ckpt_control, page, __ATOMIC_RELEASE);
    return 0;
}

int ckpt_control_fd(void) { return ckpt_descriptor_number(&descriptor); }

struct ckpt_piece *ckpt_control_pieces(void) {
    return (struct ckpt_piece *)((unsigned char *)ckpt_control + CKPT_PIECES_OFFSET);
}

_Atomic uint64_t *ckpt_control_blocks(void) {
    return (_Atomic uint64_t *)((unsigned char *)ckpt_control + CKPT_BLOCKS_OFFSET);
}

void ckpt_control_event(void) {
    if (!ckpt_control) return;
    atomic_fetch_add(&ckpt_control->events, 1);
    if (atomic_load(&ckpt_control->watchers)) ckpt_futex_wake(&ckpt_control->events, INT_MAX, 1);
}

void ckpt_control_text(char *field, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(field, CKPT_TEXT, format, arguments);
    va_end(arguments);
}

void ckpt_control_forget(void) {
    ckpt_descriptor_close(&descriptor);
    ckpt_control = NULL; /* its mapping did not come along */
}
