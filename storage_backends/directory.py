"""One directory of objects: what the nvme and fuse backends share below the bytes themselves.

Everything here blocks and runs on a thread. Objects are reached through a descriptor of their directory
and never through a symbolic link; directories made here have mode 0700 and files 0600, whatever the umask.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ckptpipe.pyx import files
from ckptpipe.storage_backends.abc import NAME_PATTERN, TEMPORARY_PREFIX, WRITE_PROBE, check_name, is_name
from ckptpipe.storage_backends.errors import (
    AccessDenied,
    NoSpace,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    StoreNotFound,
)
from ckptpipe.storage_backends.open_limit import limit_cure

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM)


def storage_error(error: OSError, operation: str, path: str) -> StorageError:
    """An OSError as the backend's class that says what can be done. Raise it ``from error``."""
    number = error.errno or 0
    what = f"{operation} {path}: {os.strerror(number) if number else error}"
    if number == errno.ENOENT:
        return ObjectNotFound(what)
    if number == errno.EEXIST:
        return ObjectExists(what)
    if number in (errno.ENOSPC, errno.EDQUOT):
        cure = "raise the quota" if number == errno.EDQUOT else "free space there"
        return NoSpace(f"{what} ({os.path.dirname(path)} is full)", cure=f"{cure}, or save elsewhere")
    if number in (errno.EACCES, errno.EPERM):
        return AccessDenied(what, cure=f"give this user (uid {os.geteuid()}) access, or run as another")
    if number == errno.EROFS:
        return AccessDenied(what, cure="the file system is mounted read-only: remount it read-write")
    if number in (errno.ENOTCONN, errno.ESTALE, errno.ECONNABORTED):
        return StoreNotFound(what, cure="the mount is dead: unmount it and mount it again")
    if number in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
        return StorageError(
            f"{path} is not a regular file", cure="objects are never links, pipes or directories"
        )
    if number == errno.ENOTDIR:
        return StoreNotFound(f"{path}: not a directory")
    if number == errno.EIO:
        return StorageError(what, cure="the device or the mount reports damage: look at the kernel log")
    return StorageError(what, cure=getattr(error, "cure", "") or limit_cure(number))


@contextmanager
def explained(operation: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(error, operation, path) from error


class Directory:
    """``path`` may itself be reached through links: it is the user's. Below it no link is followed.

    ``modes`` False: the mount has its own idea of modes (s3fs fails in odd ways when asked for others).
    """

    def __init__(self, path: str, *, modes: bool = True) -> None:
        self.path = path
        self.modes = modes

    def __repr__(self) -> str:
        return f"Directory({self.path!r})"

    def child(self, name: str) -> Directory:
        return Directory(os.path.join(self.path, check_name(name)), modes=self.modes)

    def where(self, name: str) -> str:
        return os.path.join(self.path, name)

    # The directory itself.

    def check(self) -> None:
        with explained("open", self.path):
            try:
                found = os.stat(self.path)
            except FileNotFoundError:
                raise StoreNotFound(
                    f"{self.path}: no such directory", cure="is it mounted, and spelled right?"
                ) from None
        if not stat.S_ISDIR(found.st_mode):
            raise StoreNotFound(f"{self.path}: not a directory")
        if not os.access(self.path, os.R_OK | os.X_OK, effective_ids=True):
            raise storage_error(OSError(errno.EACCES, ""), "list", self.path)

    def make(self) -> list[str]:
        """Make it and its missing parents, mode 0700, durably. What exists keeps its mode. What was made, the
        outermost first."""
        missing, made = [], []
        path = self.path
        while not os.path.isdir(path):
            missing.append(path)
            parent = os.path.dirname(path)
            if parent == path:
                break
            path = parent
        for path in reversed(missing):
            try:
                os.mkdir(path, DIRECTORY_MODE)
            except FileExistsError:
                if not os.path.isdir(path):
                    raise StoreNotFound(f"{path}: not a directory") from None
                continue
            except OSError as error:
                raise storage_error(error, "mkdir", path) from error
            made.append(path)
            self._set_mode(path, DIRECTORY_MODE)
            _sync_directory(os.path.dirname(path))
        return made

    def check_writable(self) -> None:
        if not os.access(self.path, os.W_OK | os.X_OK, effective_ids=True):
            read_only = os.statvfs(self.path).f_flag & os.ST_RDONLY
            number = errno.EROFS if read_only else errno.EACCES
            raise storage_error(OSError(number, os.strerror(number)), "write to", self.path)

    def probe(self) -> None:
        """Prove that a file can be made and removed here (quotas, immutable flags, odd mounts)."""
        name = f"{TEMPORARY_PREFIX}{WRITE_PROBE}-{secrets.token_hex(8)}"
        with self._at("", name) as (folder, leaf), explained("create a file in", self.path):
            os.close(os.open(leaf, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _OPEN, FILE_MODE, dir_fd=folder))
            os.unlink(leaf, dir_fd=folder)

    def identity(self) -> tuple[int, int]:
        """The same for every path to it."""
        with explained("stat", self.path):
            found = os.stat(self.path)
        return found.st_dev, found.st_ino

    def free_bytes(self) -> tuple[int, int]:
        """The device's number and what this user may still write there."""
        with explained("statvfs", self.path):
            return os.stat(self.path).st_dev, files.free_space(self.path)

    def sync_of(self, name: str) -> None:
        """Sync the directory that ``name`` lies in: its entry survives a crash."""
        with explained("fsync", self.path), self._at(name) as (folder, _):
            _sync(folder)

    def remove_if_empty(self) -> None:
        try:
            os.rmdir(self.path)
        except FileNotFoundError:
            return
        except OSError as error:
            # Where this user may not remove it, it is not one that we have made.
            if error.errno in (
                errno.ENOTEMPTY,
                errno.EEXIST,
                errno.EBUSY,
                errno.EACCES,
                errno.EPERM,
                errno.EROFS,
            ):
                return
            raise storage_error(error, "rmdir", self.path) from error

    # Objects in it.

    def create(self, name: str) -> int:
        """A descriptor of a new, empty object, open for writing; ObjectExists."""
        with explained("create", self.where(name)), self._at(name, make=True) as (folder, leaf):
            descriptor = os.open(leaf, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _OPEN, FILE_MODE, dir_fd=folder)
            try:
                self._set_mode(descriptor, FILE_MODE)
            except BaseException:
                os.close(descriptor)
                os.unlink(leaf, dir_fd=folder)
                raise
            return descriptor

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """A descriptor of a regular file; ObjectNotFound, StorageError for anything that is no file."""
        with explained("open", self.where(name)), self._at(name) as (folder, leaf):
            # O_NONBLOCK: a FIFO planted under an object's name must not hang us.
            descriptor = os.open(leaf, flags | _OPEN | os.O_NONBLOCK, dir_fd=folder)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise OSError(errno.ENXIO, "not a regular file")
            # With it io_uring would answer EAGAIN instead of waiting.
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_NONBLOCK)
            return descriptor

    def stat(self, name: str) -> os.stat_result | None:
        """None where there is nothing of that name."""
        try:
            with self._at(name) as (folder, leaf):
                found = os.stat(leaf, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error(error, "stat", self.where(name)) from error
        if not stat.S_ISREG(found.st_mode):
            raise storage_error(OSError(errno.ENXIO, ""), "stat", self.where(name))
        return found

    def read(self, name: str, limit: int) -> bytes:
        with explained("read", self.where(name)):
            descriptor = self.open(name)
            with open(descriptor, "rb", buffering=0) as file:
                size = os.fstat(descriptor).st_size
                if size > limit:
                    raise StorageError(f"{self.where(name)}: {size} bytes, at most {limit} are accepted")
                parts = []
                room = limit + 1
                while room and (part := file.read(min(room, 1 << 20))):
                    parts.append(part)
                    room -= len(part)
        if not room:
            raise StorageError(f"{self.where(name)}: grew past the {limit} bytes that are accepted")
        return b"".join(parts)

    def unlink(self, name: str) -> None:
        try:
            with self._at(name) as (folder, leaf):
                os.unlink(leaf, dir_fd=folder)
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_error(error, "delete", self.where(name)) from error

    def entries(self) -> list[tuple[str, os.stat_result]]:
        """Regular files whose name an object can have, sorted; none where the directory is missing."""
        return sorted(
            (name, found)
            for name, found in self._files()
            if NAME_PATTERN.fullmatch(name) and not name.startswith(TEMPORARY_PREFIX)
        )

    def temporaries(self) -> list[tuple[str, float]]:
        """Names and times of what `replace` left in a crash."""
        return sorted(
            (name, found.st_mtime) for name, found in self._files() if name.startswith(TEMPORARY_PREFIX)
        )

    def children(self) -> list[str]:
        """Sub-directories with at least one regular file in them, sorted."""
        found = []
        with explained("list", self.path):
            try:
                with os.scandir(self.path) as scan:
                    names = [entry.name for entry in scan if entry.is_dir(follow_symlinks=False)]
            except FileNotFoundError:
                return []
        for name in names:
            if not is_name(name):
                continue
            try:
                with os.scandir(self.where(name)) as scan:
                    if any(entry.is_file(follow_symlinks=False) for entry in scan):
                        found.append(name)
            except (FileNotFoundError, PermissionError):
                continue  # removed meanwhile, or another user's (lost+found)
        return sorted(found)

    def replace(self, name: str, data: bytes, *, if_absent: bool) -> bool:
        """The old object or the new one, durably: temporary file, fsync, rename, fsync of the directory.

        False where ``if_absent`` could only look first: this file system cannot rename without replacing.
        """
        sure = True
        with explained("store", self.where(name)), self._at(name, make=True) as (folder, leaf):
            temporary = f"{TEMPORARY_PREFIX}{leaf[:200]}-{secrets.token_hex(8)}"
            descriptor = os.open(
                temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _OPEN, FILE_MODE, dir_fd=folder
            )
            try:
                try:
                    self._set_mode(descriptor, FILE_MODE)
                    _write_all(descriptor, data)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                if if_absent:
                    sure = files.rename_noreplace(folder, temporary, folder, leaf) != "checked"
                else:
                    os.rename(temporary, leaf, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
            _sync(folder)
        return sure

    def write_in_place(self, name: str, data: bytes, *, if_absent: bool) -> None:
        """For mounts that cannot rename. An object that was made here is removed again when that fails."""
        made = False
        with explained("store", self.where(name)), self._at(name, make=True) as (folder, leaf):
            flags = os.O_WRONLY | os.O_CREAT | _OPEN
            try:
                descriptor = os.open(leaf, flags | os.O_EXCL, FILE_MODE, dir_fd=folder)
                made = True
            except FileExistsError:
                if if_absent:
                    raise
                descriptor = os.open(leaf, flags | os.O_TRUNC, FILE_MODE, dir_fd=folder)
            try:
                try:
                    self._set_mode(descriptor, FILE_MODE)
                    _write_all(descriptor, data)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)  # some report only here what failed
            except BaseException:
                if made:
                    with suppress(OSError):
                        os.unlink(leaf, dir_fd=folder)
                raise
            _sync(folder)

    # Parts.

    @contextmanager
    def _at(self, name: str, leaf: str = "", *, make: bool = False) -> Iterator[tuple[int, str]]:
        """The descriptor of the directory that ``name`` lies in, and its last component."""
        *folders, last = name.split("/")
        try:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            if not make:
                raise
            raise StoreNotFound(
                f"{self.path}: no such directory", cure="is it mounted, and spelled right?"
            ) from None
        try:
            for part in folders:
                inner = self._enter(folder, part, make)
                os.close(folder)
                folder = inner
            yield folder, leaf or last
        finally:
            os.close(folder)

    def _enter(self, folder: int, part: str, make: bool) -> int:
        """A descriptor of the sub-directory ``part``; a link is not followed."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(part, flags, dir_fd=folder)
        except FileNotFoundError:
            if not make:
                raise
        with suppress(FileExistsError):
            os.mkdir(part, DIRECTORY_MODE, dir_fd=folder)
            _sync(folder)
        inner = os.open(part, flags, dir_fd=folder)
        try:
            self._set_mode(inner, DIRECTORY_MODE)
        except BaseException:
            os.close(inner)
            raise
        return inner

    def _set_mode(self, file: int | str, mode: int) -> None:
        """Exactly ``mode``, also under a umask that takes bits away."""
        found = os.stat(file)
        if stat.S_IMODE(found.st_mode) == mode or found.st_uid != os.geteuid():
            return
        try:
            os.chmod(file, mode)
        except OSError as error:
            if self.modes and error.errno not in _UNSUPPORTED:
                raise

    def _files(self) -> list[tuple[str, os.stat_result]]:
        with explained("list", self.path):
            try:
                with os.scandir(self.path) as scan:
                    found = []
                    for entry in scan:
                        with suppress(FileNotFoundError):  # removed meanwhile
                            if entry.is_file(follow_symlinks=False):
                                found.append((entry.name, entry.stat(follow_symlinks=False)))
                    return found
            except FileNotFoundError:
                return []


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def _sync(folder: int) -> None:
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:  # some file systems cannot sync a directory: they need not
            raise
