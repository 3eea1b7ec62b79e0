/* File-system calls that older C libraries and Python lack. All return a value, or -errno; EINTR is retried. */
#ifndef CKPT_FILESYS_H
#define CKPT_FILESYS_H

#include <stdint.h>

/* statx(2) with STATX_DIOALIGN. 1: the kernel told (0 and 0: no direct I/O), 0: it does not tell. */
int fs_dio_alignment(int fd, uint32_t *memory, uint32_t *offset);
/* Logical block size of a block device (BLKSSZGET). */
int fs_logical_block(int fd);
/* Opens the file of a descriptor again; the new descriptor has its own flags. */
int fs_reopen(int fd, int flags);
int fs_openat(int dirfd, const char *path, int flags, unsigned mode);
int fs_openat2(int dirfd, const char *path, uint64_t flags, uint64_t mode, uint64_t resolve);
int fs_is_link(int dirfd, const char *path);
int fs_exists(int dirfd, const char *path);
/* statfs(2) of a path, or of fd when path is NULL. */
int fs_type(const char *path, int fd, uint64_t *type);
int fs_free(const char *path, int fd, uint64_t *bytes);
int64_t fs_seek_data(int fd, int64_t from);
int64_t fs_seek_hole(int fd, int64_t from);
int fs_fsync(int fd);
int fs_rename_noreplace(int old_dir, const char *old_name, int new_dir, const char *new_name);
int fs_link(int old_dir, const char *old_name, int new_dir, const char *new_name);
int fs_rename(int old_dir, const char *old_name, int new_dir, const char *new_name);
int fs_unlink(int dirfd, const char *path);

#endif
