"""Compiled kernels, kept between processes in the user's cache directory.

``$CKPTPIPE_KERNEL_CACHE`` (``off``, or a directory), else ``$XDG_CACHE_HOME/ckptpipe/kernels``, else
``~/.cache/ckptpipe/kernels``. What lies there runs on the GPU beside the user's data: it is taken only from a directory
and a file that are the user's and that nobody else may write to, and only where its own SHA-256 agrees. Nothing
depends on the cache: where it cannot be used, kernels are compiled.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

MAGIC = b"CKPTKRN1"
IMAGE_MAX = 16 << 20  # bytes of one file that is believed
FILES_MAX = 64  # the oldest ones go
_COMPILERS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12", "cuda-bindings")


def key_of(text: bytes, architecture: str, options: tuple[str, ...]) -> str:
    """What an image depends on: source, target and options, and which compiler is installed (asked of the packages:
    loading it is what takes long)."""
    digest = hashlib.sha256()
    for part in (text, architecture.encode(), "\0".join(options).encode(), compiler().encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def compiler() -> str:
    found = []
    for name in _COMPILERS:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def fetch(key: str) -> bytes | None:
    """The image that was kept under ``key``; None where there is none that can be believed."""
    folder = _folder(make=False)
    if folder is None:
        return None
    try:
        descriptor = os.open(folder / key, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or not _ours_alone(found) or found.st_size > IMAGE_MAX:
                return None
            stored = file.read(IMAGE_MAX + 1)
    except OSError:
        return None
    head = len(MAGIC) + 32
    image = stored[head:]
    if stored[: len(MAGIC)] != MAGIC or hashlib.sha256(image).digest() != stored[len(MAGIC) : head]:
        return None
    return image


def keep(key: str, image: bytes) -> bool:
    """Store an image; False where that cannot be done, which nobody needs to hear of."""
    folder = _folder(make=True)
    if folder is None or len(image) > IMAGE_MAX - 64:
        return False
    temporary = folder / f".{key[:16]}-{secrets.token_hex(8)}"
    try:
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            with open(descriptor, "wb") as file:
                file.write(MAGIC + hashlib.sha256(image).digest() + image)
            os.replace(temporary, folder / key)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        _prune(folder)
    except OSError:
        return False
    return True


def _folder(*, make: bool) -> Path | None:
    """The directory, where it is the user's and nobody else may write there."""
    chosen = os.environ.get("CKPTPIPE_KERNEL_CACHE", "")
    if chosen == "off":
        return None
    if chosen:
        folder = Path(chosen)
    else:
        base = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(base):
            base = os.path.expanduser("~/.cache")
        folder = Path(base) / "ckptpipe" / "kernels"
    if not folder.is_absolute():
        return None
    try:
        if make:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    return folder if stat.S_ISDIR(found.st_mode) and _ours_alone(found) else None


def _ours_alone(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _prune(folder: Path) -> None:
    files = sorted(folder.iterdir(), key=lambda path: path.lstat().st_mtime)
    for path in files[: max(0, len(files) - FILES_MAX)]:
        path.unlink(missing_ok=True)
