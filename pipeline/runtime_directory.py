"""The directory of this user's runtime state: sockets, locks, and what is known of checkpointed processes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ckptpipe.pyx.errors import CkptpipeError


class RuntimeDirectoryError(CkptpipeError):
    """The runtime directory is not ours alone."""


def runtime_directory() -> Path:
    """$XDG_RUNTIME_DIR/ckptpipe, /run/user/UID/ckptpipe, or /tmp/ckptpipe-UID; made 0700.

    RuntimeDirectoryError where it belongs to somebody else or others may enter it: whoever can write there
    could make a restore go into the wrong checkpoint.
    """
    uid = os.geteuid()
    base = os.environ.get("XDG_RUNTIME_DIR")
    for parent in (base, f"/run/user/{uid}"):
        if parent and os.path.isabs(parent) and _is_own(parent, uid):
            return private_directory(Path(parent) / "ckptpipe")
    return private_directory(Path(f"/tmp/ckptpipe-{uid}"))


def _is_own(parent: str, uid: int) -> bool:
    """After ``sudo``, XDG_RUNTIME_DIR can be somebody else's: its specification says to take no notice then."""
    try:
        found = os.stat(parent)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid


def private_directory(path: Path) -> Path:
    """``path``, made 0700 where it is not there; RuntimeDirectoryError unless it is a directory of ours alone."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise RuntimeDirectoryError(
            f"the runtime directory {path} cannot be made: {error.strerror}",
            cure="set XDG_RUNTIME_DIR to a directory that is yours",
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise RuntimeDirectoryError(
            f"the runtime directory {path} is not a directory of user {os.geteuid()} alone",
            cure=f"remove it, or: chmod 700 {path}",
        )
    return path
