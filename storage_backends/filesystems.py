"""What kind of file system a path lies on, and what that means for direct I/O and durability."""

from __future__ import annotations

import ctypes
import mmap
import os
import re

from ckptpipe.pyx import files

DIRECT = ("ext4", "xfs", "f2fs", "btrfs", "bcachefs", "overlay")  # on a block device: direct I/O pays there
VOLATILE = ("tmpfs", "ramfs", "hugetlbfs")  # gone with the machine

_SYS_CACHESTAT = 451  # the same number on every architecture (Linux 6.5)
_SAMPLES = 64  # windows looked at where cachestat is missing
_WINDOW = 1 << 20  # bytes
_ESCAPE = re.compile(rb"\\([0-7]{3})")  # how mountinfo writes spaces and the like


def existing_part(path: str) -> str:
    """``path`` or its nearest parent that exists, or that cannot be looked into."""
    path = os.path.abspath(path)
    while path != os.sep:
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            path = os.path.dirname(path)
        except OSError:
            break
        else:
            break
    return path


def kind_of(path: str) -> str:
    """``ext4``, ``xfs``, ``tmpfs``, ``fuse``, …: of the path or of its nearest parent that exists."""
    path = existing_part(path)
    try:
        kind = files.filesystem(path)[1]
    except OSError:
        # A dead FUSE mount, or a directory closed to us: the mount table still knows.
        types = _mount_types(path)
        if not types:
            raise
        return types[0]
    # virtiofs and fuseblk have the FUSE magic number, and behave like any local file system.
    return _mounted_type(path) or kind if kind == "fuse" else kind


def is_fuse(path: str) -> bool:
    """Whether ``path`` lies, or would be made, on a FUSE mount. A dead mount counts as one."""
    try:
        return kind_of(path) == "fuse"
    except OSError:
        return False


def cached_share(descriptor: int, size: int) -> float:
    """The share of a file's first ``size`` bytes that the page cache holds, from 0 to 1."""
    if size <= 0:
        return 0.0
    pages = _cachestat(descriptor, size)
    if pages is not None:
        return min(1.0, pages * mmap.PAGESIZE / size)
    return _mincore_share(descriptor, size)


class _CachestatRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recent"))


_LIBC = ctypes.CDLL(None, use_errno=True)


def _cachestat(descriptor: int, size: int) -> int | None:
    """Pages in the cache (cachestat(2)); None where the kernel or a seccomp filter has no such call."""
    asked = _CachestatRange(0, size)
    found = _Cachestat()
    rc = _LIBC.syscall(
        ctypes.c_long(_SYS_CACHESTAT),
        ctypes.c_uint(descriptor),
        ctypes.byref(asked),
        ctypes.byref(found),
        ctypes.c_uint(0),
    )
    return int(found.cache) if rc == 0 else None


def _mincore_share(descriptor: int, size: int) -> float:
    """mincore(2) on windows spread evenly over the file."""
    windows = min(_SAMPLES, -(-size // _WINDOW))
    seen = there = 0
    for index in range(windows):
        start = (size - 1) * index // windows // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        length = min(_WINDOW, size - start)
        try:
            with mmap.mmap(
                descriptor, length, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=start
            ) as view:
                pages = -(-length // mmap.PAGESIZE)
                vector = (ctypes.c_ubyte * pages)()
                anchor = ctypes.c_char.from_buffer(view)
                rc = _LIBC.mincore(
                    ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(length), ctypes.byref(vector)
                )
                del anchor
        except (OSError, ValueError):
            return 0.0
        if rc != 0:
            return 0.0
        seen += pages
        there += sum(page & 1 for page in vector)
    return there / seen


def _mounted_type(path: str) -> str:
    """ "virtiofs" or "fuseblk" where the mount is one, else ""."""
    found = _mount_types(path)[:1]
    return found[0] if found and found[0] in ("virtiofs", "fuseblk") else ""


def _mount_types(path: str) -> list[str]:
    """Types of the mounts that ``path`` lies under, the innermost first (/proc/self/mountinfo, proc(5));
    subtypes like ``fuse.s3fs`` are given as ``fuse``."""
    wanted = os.fsencode(os.path.realpath(path))
    found: list[tuple[int, int, str]] = []
    try:
        with open("/proc/self/mountinfo", "rb") as lines:
            for order, line in enumerate(lines):
                left, _, right = line.partition(b" - ")
                point = _ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), left.split(b" ")[4])
                if wanted == point or wanted.startswith(point.rstrip(b"/") + b"/"):
                    kind = right.split(b" ")[0].partition(b".")[0]
                    found.append((len(point), order, kind.decode("ascii", "replace")))
    except OSError:
        return []
    return [kind for _, _, kind in sorted(found, reverse=True)]
