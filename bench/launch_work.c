/* launch_work copies|maps COUNT: what the capture library could make slower. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static void *(*volatile copy)(void *, const void *, size_t) = memcpy;

static int copies(long count) {
    static const size_t sizes[] = {16, 64, 256, 1024, 4096, 16384};
    char *from = malloc(1 << 20), *to = malloc(1 << 20);
    if (!from || !to) return 1;
    memset(from, 1, 1 << 20);
    for (long i = 0; i < count; i++) copy(to + i % 64, from + i % 128, sizes[i % 6]);
    for (long i = 0; i < count / 2000; i++) copy(to, from, 1 << 20);
    return to[100] != 1;
}

static int maps(long count) {
    int fd = memfd_create("work", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, 1 << 16)) return 1;
    for (long i = 0; i < count; i++) {
        int shared = i % 4 == 0;
        char *mapped = mmap(NULL, 1 << 16, PROT_READ | PROT_WRITE, shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS,
                            shared ? fd : -1, 0);
        if (mapped == MAP_FAILED) return 1;
        mapped[0] = 1;
        if (munmap(mapped, 1 << 16)) return 1;
    }
    return 0;
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
    return !strcmp(arguments[1], "copies") ? copies(atol(arguments[2])) : maps(atol(arguments[2]));
}
