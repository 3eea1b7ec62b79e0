#include "filesys.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_openat2
#define SYS_openat2 437
#endif
#ifndef RENAME_NOREPLACE
#define RENAME_NOREPLACE 1
#endif

#define RETRY(call)                            \
    ({                                         \
        long r_;                               \
        do                                     \
            r_ = (long)(call);                 \
        while (r_ < 0 && errno == EINTR);      \
        r_ < 0 ? -(long)errno : r_;            \
    })

/* struct statx of the kernel: 256 bytes, only these three fields are needed. */
struct statx_dio {
    uint32_t mask;
    uint8_t before[0x98 - 4];
    uint32_t memory_align, offset_align;
    uint8_t after[256 - 0xa0];
};

_Static_assert(sizeof(struct statx_dio) == 256, "struct statx");

int fs_dio_alignment(int fd, uint32_t *memory, uint32_t *offset)
{
    enum { WANT_DIOALIGN = 0x2000, EMPTY_PATH = 0x1000 };
    struct statx_dio answer;
    memset(&answer, 0, sizeof answer);
#ifdef SYS_statx
    long rc = RETRY(syscall(SYS_statx, fd, "", EMPTY_PATH, WANT_DIOALIGN, &answer));
#else
    long rc = -ENOSYS;
#endif
    if (rc == -ENOSYS || rc == -EPERM || rc == -EINVAL)
        return 0; /* an old kernel, or a seccomp filter that is older than the call */
    if (rc < 0)
        return (int)rc;
    if (!(answer.mask & WANT_DIOALIGN))
        return 0;
    *memory = answer.memory_align;
    *offset = answer.offset_align;
    return 1;
}

int fs_logical_block(int fd)
{
    int size = 0;
    int rc = (int)RETRY(ioctl(fd, BLKSSZGET, &size));
    return rc < 0 ? rc : size;
}

int fs_openat(int dirfd, const char *path, int flags, unsigned mode)
{
    return (int)RETRY(openat(dirfd, path, flags, mode));
}

int fs_reopen(int fd, int flags)
{
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return fs_openat(AT_FDCWD, path, flags, 0);
}

int fs_openat2(int dirfd, const char *path, uint64_t flags, uint64_t mode, uint64_t resolve)
{
    struct {
        uint64_t flags, mode, resolve;
    } how = {flags, mode, resolve};
    /* EAGAIN: a rename or mount went on elsewhere at the same time (openat2(2)). */
    for (int attempt = 0;; attempt++) {
        int fd = (int)RETRY(syscall(SYS_openat2, dirfd, path, &how, sizeof how));
        if (fd != -EAGAIN || attempt == 100)
            return fd;
    }
}

int fs_is_link(int dirfd, const char *path)
{
    struct stat status;
    int rc = (int)RETRY(fstatat(dirfd, path, &status, AT_SYMLINK_NOFOLLOW));
    return rc < 0 ? rc : S_ISLNK(status.st_mode);
}

int fs_exists(int dirfd, const char *path)
{
    int rc = fs_is_link(dirfd, path);
    return rc == -ENOENT ? 0 : rc < 0 ? rc : 1;
}

int fs_type(const char *path, int fd, uint64_t *type)
{
    struct statfs status;
    int rc = (int)RETRY(path ? statfs(path, &status) : fstatfs(fd, &status));
    *type = (uint32_t)status.f_type; /* magic numbers have 32 bits; the field's width and sign differ */
    return rc;
}

int fs_free(const char *path, int fd, uint64_t *bytes)
{
    struct statvfs status;
    int rc = (int)RETRY(path ? statvfs(path, &status) : fstatvfs(fd, &status));
    *bytes = rc < 0 ? 0 : (uint64_t)status.f_bavail * status.f_frsize;
    return rc;
}

int64_t fs_seek_data(int fd, int64_t from)
{
    return RETRY(lseek(fd, from, SEEK_DATA));
}

int64_t fs_seek_hole(int fd, int64_t from)
{
    return RETRY(lseek(fd, from, SEEK_HOLE));
}

int fs_fsync(int fd)
{
    return (int)RETRY(fsync(fd));
}

int fs_rename_noreplace(int old_dir, const char *old_name, int new_dir, const char *new_name)
{
#ifdef SYS_renameat2
    return (int)RETRY(syscall(SYS_renameat2, old_dir, old_name, new_dir, new_name, RENAME_NOREPLACE));
#else
    return -ENOSYS;
#endif
}

int fs_link(int old_dir, const char *old_name, int new_dir, const char *new_name)
{
    return (int)RETRY(linkat(old_dir, old_name, new_dir, new_name, 0));
}

int fs_rename(int old_dir, const char *old_name, int new_dir, const char *new_name)
{
    return (int)RETRY(renameat(old_dir, old_name, new_dir, new_name));
}

int fs_unlink(int dirfd, const char *path)
{
    return (int)RETRY(unlinkat(dirfd, path, 0));
}
