"""The controller's folder: ``controller.sock`` in a directory of mode 0700 that belongs to one user.

Both ends look at the directory and the socket in it before they use them, and use them through the
directory's own descriptor, so that nothing can be exchanged between the look and the use (and so that the
108 bytes of a socket's address are always enough).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptpipe.pipeline.controller.errors import ControllerRefused, ControllerUnavailable

SOCKET = "controller.sock"
_MODE = 0o700
_SOCKET_MODE = 0o600
_TRIES = 8


def candidates() -> list[Path]:
    """Where a controller of this user may be, the usual place first: the server takes the first, a client
    asks at each, because a service and a shell do not always have the same environment."""
    user = os.geteuid()
    parents = [Path(text) for text in (os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{user}") if text]
    found = [parent / "ckptpipe" for parent in parents if parent.is_absolute() and _is_own(parent, user)]
    return list(dict.fromkeys([*found, Path(f"/tmp/ckptpipe-{user}")]))


def _is_own(path: Path, user: int) -> bool:
    """After ``sudo``, XDG_RUNTIME_DIR can be somebody else's: its specification says to take no notice then."""
    try:
        found = path.stat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == user


class RuntimeDirectory:
    """An open, checked directory. ``owner`` is the uid to which directory and socket belong."""

    def __init__(self, path: Path, descriptor: int, owner: int, name: str = SOCKET) -> None:
        self.path = path
        self.owner = owner
        self.name = name
        self._descriptor = descriptor

    @property
    def socket_path(self) -> Path:
        return self.path / self.name

    @property
    def address(self) -> str:
        """What bind(2) and connect(2) take: the socket below the descriptor, whatever the path is now."""
        return f"/proc/self/fd/{self._descriptor}/{self.name}"

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def check_socket(self) -> None:
        """ControllerUnavailable where there is none, ControllerRefused where it is not the controller's."""
        try:
            found = os.stat(self.name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            raise ControllerUnavailable(
                f"no controller runs: {self.socket_path} is not there", cure="start one with ckptpipe serve"
            ) from None
        if not stat.S_ISSOCK(found.st_mode):
            raise ControllerRefused(
                f"{self.socket_path} is {_kind(found.st_mode)}, not a socket",
                cure="remove it, then start ckptpipe serve again",
            )
        if found.st_uid != self.owner:
            raise ControllerRefused(
                f"{self.socket_path} belongs to uid {found.st_uid}, its directory to uid {self.owner}",
                cure="remove it, then start ckptpipe serve again",
            )
        if stat.S_IMODE(found.st_mode) != _SOCKET_MODE:
            raise ControllerRefused(
                f"{self.socket_path} has mode {stat.S_IMODE(found.st_mode):04o}, not {_SOCKET_MODE:04o}",
                cure=f"chmod {_SOCKET_MODE:04o} {self.socket_path}, or start ckptpipe serve again",
            )

    @contextmanager
    def listening(self, backlog: int) -> Iterator[socket.socket]:
        """A socket that listens here, and is the only one of its name; removed at the end.

        A socket that a killed server left is replaced. ControllerRefused where somebody listens already.
        """
        with contextlib.closing(_stream()) as listener:
            with self._alone():
                self._clear()
                listener.bind(self.address)
                own = os.stat(self.name, dir_fd=self._descriptor, follow_symlinks=False).st_ino
                os.chmod(self.name, _SOCKET_MODE, dir_fd=self._descriptor)
                listener.listen(backlog)
            listener.setblocking(False)
            try:
                yield listener
            finally:
                with self._alone():
                    self._remove(own)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The lock is the directory's own: the kernel lets it go with the process, and nothing stays behind.
        It is held for the moment of a bind(2) or unlink(2) only."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _clear(self) -> None:
        try:
            found = os.stat(self.name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode):
            raise ControllerRefused(
                f"{self.socket_path} is {_kind(found.st_mode)}, not a socket of a controller that ended",
                cure="remove it, or take another --socket",
            )
        if self._somebody_listens():
            raise ControllerRefused(
                f"another controller serves {self.socket_path}",
                cure="stop that one first, or take another --socket",
            )
        os.unlink(self.name, dir_fd=self._descriptor)

    def _somebody_listens(self) -> bool:
        with contextlib.closing(_stream()) as probe:
            probe.setblocking(False)
            try:
                probe.connect(self.address)
            except BlockingIOError:  # its backlog is full
                return True
            except (ConnectionRefusedError, FileNotFoundError):
                return False
            return True

    def _remove(self, inode: int) -> None:
        try:
            found = os.stat(self.name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return
        if found.st_ino == inode:
            os.unlink(self.name, dir_fd=self._descriptor)


def _stream() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)


def open_for_server(socket_path: Path | None = None) -> RuntimeDirectory:
    """The directory of ``socket_path`` (default: the usual one), made where it is missing."""
    path, name = _split(socket_path) if socket_path is not None else (candidates()[0], SOCKET)
    for _ in range(_TRIES):
        try:
            os.mkdir(path, _MODE)
        except FileExistsError:
            pass
        except OSError as error:
            raise ControllerRefused(
                f"cannot make {path}: {error.strerror}", cure="name a place with --socket DIR/controller.sock"
            ) from error
        try:
            return _open(path, name, os.geteuid())
        except ControllerUnavailable:  # removed between the two calls
            continue
    raise ControllerRefused(f"{path} disappears again and again", cure="take another --socket")


def open_for_client(socket_path: Path | None = None) -> RuntimeDirectory:
    """The directory in which a controller's socket is; ControllerUnavailable where there is none.

    Root may talk to anybody's controller where ``socket_path`` says so; everybody else only to their own.
    """
    user = os.geteuid()
    if socket_path is not None:
        path, name = _split(socket_path)
        return _with_socket(_open(path, name, None if user == 0 else user))
    absent: ControllerUnavailable | None = None
    for path in candidates():
        try:
            return _with_socket(_open(path, SOCKET, user))
        except ControllerUnavailable as error:
            absent = absent or error
    assert absent is not None
    raise absent


def _with_socket(directory: RuntimeDirectory) -> RuntimeDirectory:
    try:
        directory.check_socket()
    except BaseException:
        directory.close()
        raise
    return directory


def _split(socket_path: Path) -> tuple[Path, str]:
    if not socket_path.name or socket_path.name in (".", ".."):
        raise ControllerRefused(
            f"--socket {socket_path} names no file", cure="write --socket DIR/controller.sock"
        )
    return Path(os.path.abspath(socket_path.parent)), socket_path.name


def _open(path: Path, name: str, owner: int | None) -> RuntimeDirectory:
    """``owner`` None: whoever owns it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ControllerUnavailable(
            f"no controller runs: {path} is not there", cure="start one with ckptpipe serve"
        ) from None
    except OSError as error:
        raise _refused_open(path, error) from error
    try:
        found = os.fstat(descriptor)
        _check_directory(path, found, owner)
        _check_parent(path.parent, found.st_uid)
    except BaseException:
        os.close(descriptor)
        raise
    return RuntimeDirectory(path, descriptor, found.st_uid, name)


def _refused_open(path: Path, error: OSError) -> ControllerRefused:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        what = "a symbolic link" if path.is_symlink() else "not a directory"
        return ControllerRefused(
            f"{path} is {what}: a controller's directory must be a real one of the user's own",
            cure=f"remove {path}, or name another place with --socket",
        )
    return ControllerRefused(
        f"cannot open {path}: {error.strerror}", cure="check its owner and mode, or use --no-controller"
    )


def _check_directory(path: Path, found: os.stat_result, owner: int | None) -> None:
    if owner is not None and found.st_uid != owner:
        raise ControllerRefused(
            f"{path} belongs to uid {found.st_uid}, not to uid {owner}",
            cure="have it removed by its owner, or name another place with --socket",
        )
    if stat.S_IMODE(found.st_mode) != _MODE:
        raise ControllerRefused(
            f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, not {_MODE:04o}: others could get at the socket",
            cure=f"chmod {_MODE:04o} {path} (look into it first), or name another place with --socket",
        )


def _check_parent(path: Path, owner: int) -> None:
    """Whoever may rename entries of the parent could put another directory in place of ours."""
    found = path.stat()
    if found.st_uid not in (0, owner):
        raise ControllerRefused(
            f"{path} belongs to uid {found.st_uid}, who could replace the controller's directory in it",
            cure="name another place with --socket",
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
        raise ControllerRefused(
            f"{path} can be written by others, who could replace the controller's directory in it",
            cure=f"chmod go-w {path}, or name another place with --socket",
        )


def _kind(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    return "a directory" if stat.S_ISDIR(mode) else "a file"
