/* Another library that takes libc's place for the functions that ours looks at. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static void note(const char *word, size_t length) {
    const char *path = getenv("OTHER_LOG");
    int fd = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (fd < 0) return;
    if (write(fd, word, length) < 0) _exit(9);
    close(fd);
}

void *mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset) {
    void *(*next)(void *, size_t, int, int, int, off_t) = dlsym(RTLD_NEXT, "mmap");
    note("mmap\n", 5);
    return next(address, bytes, protection, flags, fd, offset);
}

int munmap(void *address, size_t bytes) {
    int (*next)(void *, size_t) = dlsym(RTLD_NEXT, "munmap");
    return next(address, bytes);
}
