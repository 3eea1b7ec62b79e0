"""A folder for large files that is gone afterwards, whatever happens, and proof that nothing runs on in it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30


@contextmanager
def scratch(name: str, need_bytes: int, *, parent: Path | None = None) -> Iterator[Path]:
    """A fresh folder on the disk of the project (CKPTPIPE_BENCH_DIR names another), removed at the end, also
    after Ctrl-C and SIGTERM. Ends the program with a clear message where ``need_bytes`` do not fit."""
    place = parent or Path(os.environ.get("CKPTPIPE_BENCH_DIR") or ROOT / ".cache" / "bench")
    place.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(place).free
    if free < need_bytes:
        sys.exit(
            f"{name} needs {need_bytes / GIB:.1f} GiB of free disk in {place}, {free / GIB:.1f} GiB are there; "
            "free some, or name another folder: CKPTPIPE_BENCH_DIR=/path"
        )
    previous = signal.signal(signal.SIGTERM, _leave)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def memory_folder(name: str, need_bytes: int) -> Iterator[Path | None]:
    """A folder in memory (/dev/shm), so that a disk does not blur a figure; None where it has no room."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or not os.access(shm, os.W_OK) or shutil.disk_usage(shm).free < need_bytes * 5 // 4:
        yield None
        return
    with scratch(name, need_bytes, parent=shm) as folder:
        yield folder


def processes_of(folder: Path) -> list[str]:
    """ "PID command" of every process that names the folder in its command line."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            command = (
                Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
        except OSError:
            continue
        if str(folder) in command:
            found.append(f"{entry} {command.strip()}")
    return found


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
