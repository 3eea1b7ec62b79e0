#define _GNU_SOURCE
#include "budget.h"

#include "descriptor.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

static struct {
    struct ckpt_descriptor file;
    unsigned seat;
    uint64_t total, used;
    char path[256];
} own = {.file = CKPT_NO_DESCRIPTOR};

/* 0, or an errno: EAGAIN when somebody else has it. */
static int lock(int fd, short type, off_t start, off_t length, int wait) {
    struct flock wanted = {.l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = length};
    while (fcntl(fd, wait ? F_OFD_SETLKW : F_OFD_SETLK, &wanted) < 0)
        if (errno != EINTR) return errno;
    return 0;
}

static int seat_is_taken(int fd, unsigned seat) {
    struct flock wanted = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = CKPT_BUDGET_LOCKS + seat, .l_len = 1};
    return fcntl(fd, F_OFD_GETLK, &wanted) == 0 && wanted.l_type != F_UNLCK;
}

static int take_seat(int fd) {
    for (unsigned seat = 0; seat < CKPT_BUDGET_SEATS; seat++) {
        int error = lock(fd, F_WRLCK, CKPT_BUDGET_LOCKS + seat, 1, 0);
        if (error == 0) {
            own.seat = seat;
            return 0;
        }
        if (error != EAGAIN && error != EACCES) return error;
    }
    return EUSERS;
}

/* A file that is somebody else's or that others may write is not believed. */
static int open_file(const char *path) {
    for (int tries = 0; tries < 16; tries++) {
        struct stat found;
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY, 0600);
        if (fd < 0) return -errno;
        int error = lock(fd, F_WRLCK, 0, 1, 1);
        if (!error && fstat(fd, &found)) error = errno;
        if (!error && (!S_ISREG(found.st_mode) || found.st_uid != geteuid() || found.st_mode & 077)) error = EPERM;
        if (!error && found.st_nlink) {
            error = take_seat(fd);
            if (!error) {
                own.file = ckpt_descriptor_of(fd);
                return fd; /* with its byte 0 locked */
            }
        }
        close(fd);
        if (error) return -error;
        /* The last process of the tree removed it between our open and our lock. */
    }
    return -ESTALE;
}

static int claim_in(int fd, uint64_t total, uint64_t bytes) {
    struct ckpt_budget_file file;
    ssize_t got = pread(fd, &file, sizeof file, 0);
    if (got < 0) return errno;
    if (got != sizeof file || file.magic != CKPT_BUDGET_MAGIC) {
        memset(&file, 0, sizeof file);
        file.magic = CKPT_BUDGET_MAGIC;
        file.total = total;
    }
    uint64_t others = 0;
    for (unsigned seat = 0; seat < CKPT_BUDGET_SEATS; seat++) {
        if (seat == own.seat) continue;
        if (file.used[seat] && !seat_is_taken(fd, seat)) file.used[seat] = 0; /* its process is dead */
        others += file.used[seat];
    }
    own.total = file.total;
    own.used = others + bytes;
    if (bytes > own.used || own.used > file.total) {
        own.used = others;
        return ENOSPC;
    }
    file.used[own.seat] = bytes;
    return pwrite(fd, &file, sizeof file, 0) == sizeof file ? 0 : EIO;
}

int ckpt_budget_claim(const char *path, uint64_t total, uint64_t bytes) {
    if (!path[0]) {
        own.total = total;
        if (bytes > total) return ENOSPC;
        own.used = bytes;
        return 0;
    }
    int fd = ckpt_descriptor_number(&own.file);
    int error = 0;
    if (fd < 0) {
        fd = open_file(path);
        if (fd < 0) return -fd;
        strncpy(own.path, path, sizeof own.path - 1);
    } else {
        error = lock(fd, F_WRLCK, 0, 1, 1);
    }
    if (!error) {
        error = claim_in(fd, total, bytes);
        lock(fd, F_UNLCK, 0, 1, 1);
    }
    return error;
}

uint64_t ckpt_budget_total(void) { return own.total; }
uint64_t ckpt_budget_used(void) { return own.used; }

void ckpt_budget_leave(void) {
    int fd = ckpt_descriptor_number(&own.file);
    if (fd < 0 || !own.path[0]) return;
    if (lock(fd, F_WRLCK, 0, 1, 0) == 0) {
        int alone = 1;
        for (unsigned seat = 0; seat < CKPT_BUDGET_SEATS && alone; seat++) alone = !seat_is_taken(fd, seat);
        if (alone) unlink(own.path);
    }
    ckpt_descriptor_close(&own.file);
}

void ckpt_budget_forget(void) {
    ckpt_descriptor_close(&own.file); /* the parent holds the locks on */
    own.path[0] = 0;
    own.total = own.used = 0;
}
