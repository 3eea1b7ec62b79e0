"""File-system calls around the I/O engine. Synchronous, without the GIL: use `asyncio.to_thread`."""

import os

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]

AT_FDCWD: int
RESOLVE_NO_XDEV: int
RESOLVE_NO_MAGICLINKS: int
RESOLVE_NO_SYMLINKS: int
RESOLVE_BENEATH: int
RESOLVE_IN_ROOT: int
FALLOC_KEEP_SIZE: int
FALLOC_PUNCH_HOLE: int
FALLOC_COLLAPSE_RANGE: int
FALLOC_ZERO_RANGE: int
FALLOC_INSERT_RANGE: int
SAFE_ALIGNMENT: int

def dio_alignment(
    fd: int, path: Path
) -> tuple[int, int] | None: ...  # (memory, offset and length); None: no direct I/O
def openat2(
    dirfd: int, path: Path, flags: int, mode: int = 0, resolve: int = 0x0C
) -> int: ...  # default: RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS; ELOOP: a link, EXDEV: leaves dirfd
def filesystem(path: Path | int) -> tuple[int, str]: ...  # (statfs type, "ext4" | "tmpfs" | "fuse" | …)
def free_space(path: Path | int) -> int: ...  # bytes
def seek_data_ranges(fd: int, size: int) -> list[tuple[int, int]]: ...  # (offset, nbytes); moves the position
def fsync_directory(path: Path) -> bool: ...  # False: this file system cannot
def rename_noreplace(
    old_dir: int, old: Path, new_dir: int, new: Path
) -> str: ...  # "renameat2" | "link" | "checked"
