"""The libraries that are preloaded, and which of them a machine's driver needs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ckptpipe.pipeline.launch.errors import LaunchFailed
from ckptpipe.pipeline.launch.options import Hook
from ckptpipe.pipeline.launch.relocations import relocated_symbols

CAPTURE = "libckptpipe_preload.so"
SYMBOLS = "libckptpipe_preload_symbols.so"

_COPIES = {"memcpy", "memmove", "__memcpy_chk", "__memmove_chk"}
_DRIVER_FOLDERS = (
    *("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/lib64"),
    *("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib/wsl/lib", "/run/opengl-driver/lib"),
)
_FIRST = re.compile(r"(lib(clang_rt\.)?[ahtl]san[.\-_]|libubsan)")
"""A sanitizer's runtime refuses to start anywhere but at the head of the list."""


def library(name: str) -> Path:
    """Where it was installed; LaunchFailed where it was not built."""
    import ckptpipe.pyx

    for folder in ckptpipe.pyx.__path__:
        path = Path(folder).resolve() / name
        if path.is_file():
            return path
    raise LaunchFailed(
        f"{name} is not beside ckptpipe.pyx: this installation was built without it",
        cure="install ckptpipe again, with a C compiler (in a checkout: make build)",
    )


def preload(existing: str, hook: Hook, environment: Mapping[str, str]) -> str:
    """LD_PRELOAD with our libraries, ahead of what is there: an allocator's library may answer mmap without
    passing it on. Our own of an outer launch go."""
    ours = [str(library(CAPTURE))]
    if hook == "symbols" or (hook == "auto" and not redirects(environment)):
        # In this order: the capture library's own copies must not come back to it.
        ours.insert(0, str(library(SYMBOLS)))
    for path in ours:
        if re.search(r"[\s:$]", path):
            raise LaunchFailed(
                f"{path} cannot be preloaded: the dynamic loader splits names at spaces and colons",
                cure="install ckptpipe under a path without them",
            )
    others = [word for word in re.split(r"[\s:]+", existing) if word]
    others = [word for word in others if os.path.basename(word) not in (CAPTURE, SYMBOLS)]
    first = [word for word in others if _FIRST.match(os.path.basename(word))]
    return ":".join([*first, *ours, *(word for word in others if word not in first)])


def redirects(environment: Mapping[str, str]) -> bool:
    """Whether this machine's libcuda has the relocation entries that the first way redirects. True where there is
    no libcuda to be seen: the library looks itself, and says in the control page what it found."""
    path = driver_library(environment)
    if path is None:
        return True
    symbols = relocated_symbols(path)
    return symbols is None or bool({"mmap", "mmap64"} & symbols and "munmap" in symbols and _COPIES & symbols)


def driver_library(environment: Mapping[str, str]) -> Path | None:
    folders = [*environment.get("LD_LIBRARY_PATH", "").split(":"), *_DRIVER_FOLDERS]
    for folder in folders:
        path = Path(folder or ".") / "libcuda.so.1"
        if path.is_file():
            return path
    return None
