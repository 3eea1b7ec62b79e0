# kernels: filesys
"""File-system calls around the I/O engine: alignment, safe opening, holes, space, durable names.

All are synchronous and release the GIL: call them through `asyncio.to_thread`. Errors are those of
`ckptpipe.pyx.errors.io_error`, with the operation and the path.
"""

from libc.errno cimport (
    EACCES, EBADF, EEXIST, EINVAL, ELOOP, EMLINK, ENOSYS, ENOTDIR, ENXIO, EOPNOTSUPP, EPERM, EXDEV,
)
from libc.stdint cimport int64_t, uint32_t, uint64_t
from posix.stat cimport S_ISBLK, S_ISREG, fstat, struct_stat
from posix.unistd cimport close as c_close

import errno as _errno
import os

from ckptpipe.pyx.errors import io_error

cdef extern from "filesys.h" nogil:
    int fs_dio_alignment(int fd, uint32_t* memory, uint32_t* offset)
    int fs_logical_block(int fd)
    int fs_reopen(int fd, int flags)
    int fs_openat(int dirfd, const char* path, int flags, unsigned mode)
    int fs_openat2(int dirfd, const char* path, uint64_t flags, uint64_t mode, uint64_t resolve)
    int fs_is_link(int dirfd, const char* path)
    int fs_exists(int dirfd, const char* path)
    int fs_type(const char* path, int fd, uint64_t* type)
    int fs_free(const char* path, int fd, uint64_t* bytes)
    int64_t fs_seek_data(int fd, int64_t start)
    int64_t fs_seek_hole(int fd, int64_t start)
    int fs_fsync(int fd)
    int fs_rename_noreplace(int old_dir, const char* old_name, int new_dir, const char* new_name)
    int fs_link(int old_dir, const char* old_name, int new_dir, const char* new_name)
    int fs_rename(int old_dir, const char* old_name, int new_dir, const char* new_name)
    int fs_unlink(int dirfd, const char* path)

AT_FDCWD = -100

# openat2(2)
RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10

# fallocate(2)
FALLOC_KEEP_SIZE = 0x01
FALLOC_PUNCH_HOLE = 0x02  # only together with FALLOC_KEEP_SIZE
FALLOC_COLLAPSE_RANGE = 0x08
FALLOC_ZERO_RANGE = 0x10
FALLOC_INSERT_RANGE = 0x20

SAFE_ALIGNMENT = 4096  # every device and file system of today takes it

# statfs(2) and <linux/magic.h>. "fuse" is also fuseblk and virtiofs, "ext4" also ext2 and ext3.
_FILESYSTEMS = {
    0x0BD00BD0: "lustre",
    0x00C36400: "ceph",
    0x01021994: "tmpfs",
    0x01021997: "9p",
    0x19830326: "beegfs",
    0x2011BAB0: "exfat",
    0x2FC12FC1: "zfs",
    0x47504653: "gpfs",
    0x4D44: "vfat",
    0x58465342: "xfs",
    0x65735546: "fuse",
    0x6969: "nfs",
    0x73717368: "squashfs",
    0x794C7630: "overlay",
    0x858458F6: "ramfs",
    0x9123683E: "btrfs",
    0x958458F6: "hugetlbfs",
    0x9FA0: "proc",
    0xCA451A4E: "bcachefs",
    0xEF53: "ext4",
    0xF2F52010: "f2fs",
    0xFE534D42: "smb2",
    0xFF534D42: "cifs",
}


def dio_alignment(int fd, path):
    """(alignment of memory, alignment of offset and length) for direct I/O on ``fd``; None: no direct I/O.

    From statx(2) where kernel and file system tell (6.1; ext4, xfs, f2fs, block devices; tmpfs does not).
    Else a block device's logical block size, or 4096 where the file can be opened with O_DIRECT.
    """
    cdef uint32_t memory = 0, offset = 0
    cdef int rc, other, flags
    cdef struct_stat status
    with nogil:
        rc = fs_dio_alignment(fd, &memory, &offset)
    if rc < 0:
        raise io_error(-rc, "statx", _text(path))
    if rc == 1:
        return (memory, offset) if memory and offset else None
    if fstat(fd, &status) != 0 or not (S_ISREG(status.st_mode) or S_ISBLK(status.st_mode)):
        return None
    if S_ISBLK(status.st_mode):
        with nogil:
            rc = fs_logical_block(fd)
        return (rc, rc) if rc > 0 else (SAFE_ALIGNMENT, SAFE_ALIGNMENT)
    flags = os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NONBLOCK
    with nogil:
        other = fs_reopen(fd, flags)
    if other >= 0:
        c_close(other)
    elif other == -EINVAL or other == -EOPNOTSUPP:
        return None
    return (SAFE_ALIGNMENT, SAFE_ALIGNMENT)


def openat2(int dirfd, path, int flags, unsigned mode=0, uint64_t resolve=0x08 | 0x04):
    """Open ``path`` under ``dirfd``, by default beneath it and through no symbolic link; close-on-exec.

    Where the kernel (before 5.6) or a seccomp filter has no openat2, the path is walked component by
    component with O_NOFOLLOW. That is stricter: it refuses ``..`` and links whatever ``resolve`` says.
    ELOOP: a link; EXDEV: a path that leaves ``dirfd``.
    """
    cdef int fd
    cdef bytes name = _path(path)
    cdef const char* text = name
    flags |= os.O_CLOEXEC
    if not flags & os.O_CREAT and flags & os.O_TMPFILE != os.O_TMPFILE:
        mode = 0  # openat2 is strict: EINVAL for a mode that has no use
    with nogil:
        fd = fs_openat2(dirfd, text, <uint32_t>flags, mode, resolve)
    if fd == -ENOSYS or fd == -EPERM:
        return _walk(dirfd, name, flags, mode, path)
    if fd < 0:
        raise _open_error(-fd, path)
    return fd


def _walk(int dirfd, bytes name, int flags, unsigned mode, path):
    """openat2 for kernels without it: RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS, and no ``..`` at all."""
    cdef int current = dirfd, following, step
    cdef const char* text
    if name.startswith(b"/"):
        raise _open_error(EXDEV, path)
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise _open_error(EXDEV, path)
    if not name:
        raise _open_error(_errno.ENOENT, path)
    if not parts:
        parts = [b"."]
    if name.endswith((b"/", b"/.")):
        flags |= os.O_DIRECTORY
    inner = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        for index, part in enumerate(parts):
            text = part
            step = flags | os.O_NOFOLLOW if index == len(parts) - 1 else inner
            with nogil:
                following = fs_openat(current, text, step, mode)
            if following == -ENOTDIR and fs_is_link(current, text) == 1:
                following = -ELOOP
            if following < 0:
                raise _open_error(-following, path)
            if current != dirfd:
                c_close(current)
            current = following
            if step & os.O_PATH and index == len(parts) - 1 and _is_link(current):
                raise _open_error(ELOOP, path)  # O_PATH | O_NOFOLLOW opens the link itself
    except BaseException:
        if current != dirfd:
            c_close(current)
        raise
    return current


cdef bint _is_link(int fd) noexcept:
    cdef struct_stat status
    return fstat(fd, &status) == 0 and (status.st_mode & 0o170000) == 0o120000


def filesystem(path):
    """(type number of statfs(2), name) of the file system that holds ``path`` (or an open descriptor).

    Names: "ext4", "xfs", "tmpfs", "fuse", "nfs", "overlay", …; a hexadecimal number where it is not known.
    """
    cdef uint64_t kind = 0
    cdef int rc, fd = -1
    cdef const char* text = NULL
    if isinstance(path, int):
        fd = path
    else:
        name = _path(path)
        text = name
    with nogil:
        rc = fs_type(text, fd, &kind)
    if rc < 0:
        raise io_error(-rc, "statfs", _text(path))
    return kind, _FILESYSTEMS.get(kind, f"{kind:#x}")


def free_space(path):
    """Bytes that this user may still write to the file system of ``path`` (or of an open descriptor)."""
    cdef uint64_t nbytes = 0
    cdef int rc, fd = -1
    cdef const char* text = NULL
    if isinstance(path, int):
        fd = path
    else:
        name = _path(path)
        text = name
    with nogil:
        rc = fs_free(text, fd, &nbytes)
    if rc < 0:
        raise io_error(-rc, "statvfs", _text(path))
    return nbytes


def seek_data_ranges(int fd, int64_t size):
    """[(offset, nbytes)] of what is not a hole in the first ``size`` bytes; moves the descriptor's position.

    One range that covers all where the file system cannot tell. Holes may be reported as data, never data as
    holes.
    """
    cdef int64_t at = 0, data, hole
    ranges = []
    while at < size:
        with nogil:
            data = fs_seek_data(fd, at)
            hole = fs_seek_hole(fd, data) if 0 <= data < size else 0
        if data == -ENXIO or data >= size:
            break
        if hole == -ENXIO:  # the file shrank in between
            break
        if data < 0 or hole < 0:
            number = -data if data < 0 else -hole
            if number == EBADF:
                raise io_error(number, "lseek", f"descriptor {fd}")
            return [(0, size)]
        if hole <= data:
            break
        ranges.append((data, min(hole, size) - data))
        at = hole
    return ranges


def fsync_directory(path):
    """Make the names in a directory durable. False where the file system cannot sync directories."""
    cdef int fd, rc, flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    cdef bytes name = _path(path)
    cdef const char* text = name
    with nogil:
        fd = fs_openat(-100, text, flags, 0)
    if fd < 0:
        raise _open_error(-fd, path)
    with nogil:
        rc = fs_fsync(fd)
        c_close(fd)
    if rc == -EINVAL or rc == -ENOSYS or rc == -EOPNOTSUPP:
        return False
    if rc < 0:
        raise io_error(-rc, "fsync", _text(path))
    return True


def rename_noreplace(int old_dir, old, int new_dir, new):
    """Give a file another name, and fail with FileExistsError where that is taken.

    Returns how: "renameat2" and "link" are atomic; "checked" looked first, and could overwrite a file made in
    that instant (some network and FUSE file systems have neither).
    """
    cdef bytes old_name = _path(old)
    cdef bytes new_name = _path(new)
    cdef const char* old_text = old_name
    cdef const char* new_text = new_name
    cdef int rc, found
    with nogil:
        rc = fs_rename_noreplace(old_dir, old_text, new_dir, new_text)
    if rc == 0:
        return "renameat2"
    if rc != -EINVAL and rc != -ENOSYS and rc != -EPERM and rc != -EOPNOTSUPP:
        raise _rename_error(-rc, old, new)
    with nogil:
        rc = fs_link(old_dir, old_text, new_dir, new_text)
    if rc == 0:
        with nogil:
            rc = fs_unlink(old_dir, old_text)
        if rc < 0:
            raise io_error(-rc, "unlink", _text(old))
        return "link"
    if rc not in (-EPERM, -EOPNOTSUPP, -ENOSYS, -EMLINK, -EINVAL, -EACCES):
        raise _rename_error(-rc, old, new)
    with nogil:
        found = fs_exists(new_dir, new_text)
        rc = fs_rename(old_dir, old_text, new_dir, new_text) if found == 0 else 0
    if found == 1:
        raise _rename_error(EEXIST, old, new)
    if found < 0 or rc < 0:
        raise _rename_error(-found if found < 0 else -rc, old, new)
    return "checked"


cdef object _rename_error(number, old, new):
    if number == EEXIST:
        return io_error(EEXIST, "rename", _text(new))
    error = io_error(number, "rename", _text(old))
    error.message = f"rename {_text(old)} to {_text(new)}: {os.strerror(number)}"
    return error


cdef object _open_error(number, path):
    cure = ""
    if number == ELOOP:
        cure = "a symbolic link is in the path, and none is followed here"
    elif number == EXDEV:
        cure = "the path leaves its directory (absolute, or through ..)"
    return io_error(number, "open", _text(path), cure=cure)


cdef bytes _path(path):
    cdef bytes name = os.fsencode(path)
    if b"\0" in name:
        raise io_error(EINVAL, "open", _text(name), cure="the name holds a NUL byte")
    return name


cdef object _text(path):
    if isinstance(path, int):
        return f"descriptor {path}"
    return os.fsdecode(path)
