"""A FUSE mount for tests: bindfs shows one folder under another, through /dev/fuse."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NoFuse(Exception):
    """This machine, or this user, cannot mount one; says why."""


@contextmanager
def bindfs(folder: Path, *options: str) -> Iterator[Path]:
    """Mount ``folder/behind`` at ``folder/mount``; unmounted at the end, whatever happens."""
    for tool in ("bindfs", "fusermount3"):
        if shutil.which(tool) is None:
            raise NoFuse(f"{tool} is not installed (Debian: apt install bindfs fuse3)")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise NoFuse("/dev/fuse cannot be opened")
    behind, mount = folder / "behind", folder / "mount"
    behind.mkdir()
    mount.mkdir()
    # Without -f it goes to the background once the mount stands, and ends with the mount.
    done = subprocess.run(
        ["bindfs", "--no-allow-other", *options, str(behind), str(mount)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise NoFuse(f"bindfs: {done.stderr.strip() or done.returncode}")
    try:
        yield mount
    finally:
        if os.path.ismount(mount):
            subprocess.run(["fusermount3", "-u", str(mount)], check=True)
