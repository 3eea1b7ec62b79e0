"""Compiles the simulated driver and nvCOMP, the control library and the C target, once for each state of the sources.

Needs a C compiler and nothing else. The results lie in ``build/simcuda/<hash of the sources>/``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "source"
CACHE = HERE.parent.parent / "build" / "simcuda"
KEEP_SECONDS = 7 * 86400
"""How long builds of other sources are kept."""
FLAGS = ("-std=c11", "-O2", "-g", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-pthread")
LIBRARY = (
    *("world", "faults", "call", "process", "device", "context", "memory", "host_memory", "copy", "stream"),
    *("work", "event", "module", "library", "ipc", "checkpoint", "custom_storage", "restore_thread"),
    *(
        "kernels",
        "kernels_checksum",
        "kernels_codec",
        "virtual",
        "pool",
        "decompress",
        "deflate",
        "lz4",
        "snappy",
    ),
    *("proc_address", "errors"),
)
NVCOMP = ("nvcomp", "nvcomp_batch", "nvcomp_formats", "nvcomp_ans", "deflate", "lz4", "snappy")
CONTROL = ("world", "control")


class CompilerMissingError(RuntimeError):
    """There is no C compiler here: `apt-get install gcc`, or name one in CC."""


def build() -> Path:
    """The folder with libcuda.so.1, libnvcomp.so, libcontrol.so and plain_target, compiled now if it has to be."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise CompilerMissingError("the simulated CUDA driver needs a C compiler: install gcc, or set CC")
    folder = CACHE / _digest(compiler)
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    # Tests run in several processes: the first compiles, the others wait for it.
    with (CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _build_into(folder, compiler)
    return folder


def _build_into(folder: Path, compiler: str) -> None:
    for old in CACHE.iterdir():
        if old.is_dir() and time.time() - old.stat().st_mtime > KEEP_SECONDS:
            shutil.rmtree(old, ignore_errors=True)
    fresh = Path(tempfile.mkdtemp(prefix="new-", dir=CACHE))
    try:
        # Calls of memcpy, mmap and munmap go to libc: a preloaded library can take their place.
        shared = ("-fPIC", "-shared", "-fvisibility=hidden", "-fno-builtin-memcpy")
        library = ("-Wl,-soname,libcuda.so.1", "-o", str(fresh / "libcuda.so.1"))
        _compile(compiler, (*shared, *library), [SOURCES / f"{name}.c" for name in LIBRARY])
        nvcomp = ("-Wl,-soname,libnvcomp.so.6", "-o", str(fresh / "libnvcomp.so"))
        _compile(compiler, (*shared, *nvcomp), [SOURCES / f"{name}.c" for name in NVCOMP])
        control = ("-o", str(fresh / "libcontrol.so"))
        _compile(compiler, (*shared, *control), [SOURCES / f"{name}.c" for name in CONTROL])
        _compile(compiler, ("-o", str(fresh / "plain_target")), [HERE / "targets" / "plain.c"])
        fresh.chmod(0o755)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _digest(compiler: str) -> str:
    digest = hashlib.sha256(f"{compiler} {FLAGS} {LIBRARY} {NVCOMP} {CONTROL}".encode())
    for path in sorted([*SOURCES.iterdir(), HERE / "targets" / "plain.c", Path(__file__)]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, options: tuple[str, ...], sources: list[Path]) -> None:
    command = [compiler, *FLAGS, *options, *map(str, sources), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the simulated CUDA driver does not compile:\n{done.stderr}")


if __name__ == "__main__":
    print(build())
