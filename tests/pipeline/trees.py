"""Directory trees for tests: made, and compared by everything that a restore must bring back."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """What one name in a tree is. ``allocated``: bytes on the disk (of files that are compared for holes)."""

    kind: str  # file | directory | symlink
    mode: int = 0
    digest: str = ""
    size: int = 0
    target: bytes = b""
    mtime_ns: int = 0


def look(root: str | os.PathLike[str], *, times: bool = False) -> dict[bytes, Entry]:
    """Everything below ``root`` by its path, nothing where it is missing; links are not followed. ``times``: those of
    directories and links too, not of files alone."""
    base = os.fsencode(root)
    found: dict[bytes, Entry] = {}
    stack = [b""] if os.path.isdir(base) else []
    while stack:
        head = stack.pop()
        with os.scandir(os.path.join(base, head)) as entries:
            for entry in entries:
                path = os.path.join(head, entry.name)
                facts = entry.stat(follow_symlinks=False)
                mode = stat.S_IMODE(facts.st_mode)
                mtime_ns = facts.st_mtime_ns if times else 0
                if entry.is_symlink():
                    found[path] = Entry("symlink", target=os.readlink(entry.path), mtime_ns=mtime_ns)
                elif entry.is_dir():
                    found[path] = Entry("directory", mode, mtime_ns=mtime_ns)
                    stack.append(path)
                else:
                    with open(entry.path, "rb") as file:
                        digest = hashlib.file_digest(file, "sha256").hexdigest()
                    found[path] = Entry("file", mode, digest, facts.st_size, b"", facts.st_mtime_ns)
    return found


def allocated(path: str | os.PathLike[str]) -> int:
    return os.stat(path).st_blocks * 512


def write(path: Path, data: bytes, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)
    return path


def criu_like(root: Path, pages: bytes) -> Path:
    """The names and shapes that ``criu dump`` gives an image directory (criu.org, "Images")."""
    for name in ("core-1", "mm-1", "pagemap-1", "pstree", "fdinfo-2", "files", "inventory", "seccomp"):
        write(root / f"{name}.img", os.urandom(37 + len(name)), 0o600)
    write(root / "pages-1.img", pages, 0o600)
    write(root / "dump.log", b"(00.000000) Version: 4.0\n", 0o600)
    write(root / "stats-dump", os.urandom(51))
    (root / "parent").symlink_to("../previous-dump")
    return root


def gvisor_like(root: Path, pages: bytes) -> Path:
    """The files of ``runsc checkpoint --image-path`` (a state file, its pages and their metadata)."""
    write(root / "checkpoint.img", os.urandom(3001), 0o644)
    write(root / "pages.img", pages, 0o644)
    write(root / "pages_meta.img", os.urandom(613), 0o644)
    return root
