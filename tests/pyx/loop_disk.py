"""A small ext4 on a loop device with 4 KiB sectors: direct I/O that is refused unless it is aligned."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NoLoopDisk(Exception):
    """This machine, or this user, cannot make one; says why."""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoLoopDisk(f"{command[0]}: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()


@contextmanager
def loop_disk(folder: Path, *, nbytes: int) -> Iterator[Path]:
    """Mount it at ``folder/mount``; unmounted and freed at the end, whatever happens."""
    if os.geteuid() != 0:
        raise NoLoopDisk("a loop device needs root")
    for tool in ("losetup", "mkfs.ext4", "mount", "umount"):
        if shutil.which(tool) is None:
            raise NoLoopDisk(f"{tool} is not installed")
    image, mount = folder / "disk.img", folder / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(nbytes)
    device = _run("losetup", "--sector-size", "4096", "--find", "--show", str(image))
    try:
        _run("mkfs.ext4", "-q", "-b", "4096", "-m", "0", "-O", "^has_journal", device)
        _run("mount", device, str(mount))
        try:
            yield mount
        finally:
            _run("umount", str(mount))
    finally:
        _run("losetup", "--detach", device)
        image.unlink()
