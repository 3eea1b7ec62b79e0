#define _GNU_SOURCE
#include "next.h"

#include <dlfcn.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

struct ckpt_next ckpt_next;
ckpt_mmap_call *ckpt_symbol_mmap;
ckpt_munmap_call *ckpt_symbol_munmap;

void *ckpt_raw_mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset) {
    return (void *)syscall(SYS_mmap, address, bytes, protection, flags, fd, offset);
}

int ckpt_raw_munmap(void *address, size_t bytes) { return (int)syscall(SYS_munmap, address, bytes); }

static void find(void *pointer, const char *name) {
    void *address = dlsym(RTLD_NEXT, name); /* ISO C has no conversion from it to a function's pointer */
    memcpy(pointer, &address, sizeof address);
}

void ckpt_next_find(void) {
    find(&ckpt_next.mmap, "mmap");
    find(&ckpt_next.munmap, "munmap");
    find(&ckpt_next.memcpy, "memcpy");
    find(&ckpt_next.memmove, "memmove");
    find(&ckpt_next.memcpy_checked, "__memcpy_chk");
    find(&ckpt_next.memmove_checked, "__memmove_chk");
    find(&ckpt_next.pthread_create, "pthread_create");
    if (!ckpt_next.mmap) ckpt_next.mmap = ckpt_raw_mmap;
    if (!ckpt_next.munmap) ckpt_next.munmap = ckpt_raw_munmap;
    ckpt_symbol_mmap = ckpt_next.mmap;
    ckpt_symbol_munmap = ckpt_next.munmap;
}
