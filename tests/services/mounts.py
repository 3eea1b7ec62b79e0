"""Real FUSE mounts: s3fs over an S3 server, bindfs over a folder. Both are Debian's; ``fuse3`` unmounts them."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from .process import Process, ServiceError, ServiceMissing
from .s3_server import S3Server


@dataclass
class Mount:
    """``path`` is the mount point. `stop` unmounts, ends the daemon and removes what it kept locally."""

    path: Path
    process: Process
    directory: Path

    def stop(self) -> None:
        """Idempotent."""
        unmount(self.path)
        self.process.stop()
        # A daemon that was killed leaves a mount that answers nothing: take that away too.
        unmount(self.path)
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start_s3fs(server: S3Server, directory: str | Path, *, prefix: str = "") -> Mount:
    """Mount ``server``'s bucket (or ``prefix`` of it) under a new folder of ``directory``."""
    program = _program("s3fs", "Debian's package s3fs")
    _check_fuse()
    folder = _folder(directory, "s3fs-")
    point = folder / "mnt"
    point.mkdir()
    (folder / "cache").mkdir()
    passwords = folder / "passwd"
    passwords.touch(mode=0o600)
    passwords.write_text(f"{server.access_key}:{server.secret_key}\n", encoding="utf-8")
    bucket = f"{server.bucket}:/{prefix}" if prefix else server.bucket
    options = [
        f"passwd_file={passwords}",
        f"url={server.endpoint_url}",
        "use_path_request_style",
        f"tmpdir={folder / 'cache'}",
        "sigv4",
        f"endpoint={server.region}",
        "stat_cache_expire=1",
    ]
    environment = {}
    if server.ca_bundle is not None:
        environment["CURL_CA_BUNDLE"] = str(server.ca_bundle)
    command = [program, bucket, str(point), "-f", *(part for option in options for part in ("-o", option))]
    return _mount(command, folder, point, environment)


def start_bindfs(source: str | Path, directory: str | Path) -> Mount:
    """Mount ``source``, which exists, under a new folder of ``directory``."""
    program = _program("bindfs", "Debian's package bindfs")
    _check_fuse()
    folder = _folder(directory, "bindfs-")
    point = folder / "mnt"
    point.mkdir()
    return _mount([program, "-f", "--no-allow-other", str(source), str(point)], folder, point, {})


def is_mounted(path: Path) -> bool:
    """Whether ``path`` is a mount point; also of a file system whose daemon is dead."""
    wanted = os.path.realpath(path.parent) + "/" + path.name
    with open("/proc/self/mountinfo", encoding="utf-8") as table:
        return any(line.split()[4].encode().decode("unicode_escape") == wanted for line in table)


def unmount(path: Path) -> None:
    """Lazily: what is still open stays usable. Not an error where nothing is mounted."""
    if not is_mounted(path):
        return
    program = shutil.which("fusermount3") or shutil.which("fusermount")
    if program is not None:
        subprocess.run([program, "-u", "-z", str(path)], check=False, capture_output=True, timeout=20)


def _mount(command: list[str], folder: Path, point: Path, environment: dict[str, str]) -> Mount:
    mount = Mount(point, Process(command, folder / "log", environment=environment), folder)
    try:
        mount.process.wait_until(lambda: is_mounted(point), what=Path(command[0]).name)
        os.listdir(point)
    except BaseException as error:
        mount.stop()
        if isinstance(error, ServiceError) and "ermission denied" in str(error):
            raise ServiceMissing(f"FUSE mounts are not permitted here: {error}") from error
        raise
    return mount


def _program(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ServiceMissing(f"{name} is not installed; {package} has it")
    return found


def _check_fuse() -> None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise ServiceMissing("/dev/fuse is not there, or not ours to open")
    if shutil.which("fusermount3") is None and shutil.which("fusermount") is None:
        raise ServiceMissing("fusermount3 is not installed; Debian's package fuse3 has it")


def _folder(directory: str | Path, prefix: str) -> Path:
    parent = Path(directory)
    parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
