/* A descriptor of ours in a process that may close any descriptor at any time, and open another in its place. */
#ifndef CKPT_DESCRIPTOR_H
#define CKPT_DESCRIPTOR_H

#include <sys/stat.h>
#include <unistd.h>

struct ckpt_descriptor {
    int fd;
    dev_t device;
    ino_t inode;
};

#define CKPT_NO_DESCRIPTOR {-1, 0, 0}

static inline struct ckpt_descriptor ckpt_descriptor_of(int fd) {
    struct stat found;
    struct ckpt_descriptor descriptor = {fd, 0, 0};
    if (fd >= 0 && fstat(fd, &found) == 0) {
        descriptor.device = found.st_dev;
        descriptor.inode = found.st_ino;
    }
    return descriptor;
}

/* Its number while it is still ours, else -1. */
static inline int ckpt_descriptor_number(const struct ckpt_descriptor *descriptor) {
    struct stat found;
    if (descriptor->fd < 0 || fstat(descriptor->fd, &found)) return -1;
    return found.st_dev == descriptor->device && found.st_ino == descriptor->inode ? descriptor->fd : -1;
}

static inline void ckpt_descriptor_close(struct ckpt_descriptor *descriptor) {
    int fd = ckpt_descriptor_number(descriptor);
    if (fd >= 0) close(fd);
    descriptor->fd = -1;
}

#endif
