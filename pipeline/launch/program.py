"""Becoming the program: its environment, and exec."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ckptpipe.pipeline.errors import UsageError
from ckptpipe.pipeline.launch.errors import LaunchFailed
from ckptpipe.pipeline.launch.libraries import preload
from ckptpipe.pipeline.launch.options import VARIABLE, LaunchOptions
from ckptpipe.pipeline.runtime_directory import private_directory, runtime_directory
from ckptpipe.storage_backends.quantities import format_bytes

_BUDGETS = "budgets"
_ANY_ORDER = "verify_asan_link_order=0"


def environment(options: LaunchOptions, base: Mapping[str, str]) -> dict[str, str]:
    """``base`` with what makes a program started in it a launched one."""
    check_size(options)
    folder = private_directory(runtime_directory() / _BUDGETS)
    forget_finished(folder)
    # Made by the first process of the tree that uses CUDA, removed by the last one.
    budget = folder / secrets.token_hex(8)
    sanitizer = base.get("ASAN_OPTIONS", "")
    return {
        **base,
        # A program with GCC's address sanitizer refuses to run behind any preloaded library, unless told not to look.
        "ASAN_OPTIONS": f"{sanitizer}:{_ANY_ORDER}" if sanitizer else _ANY_ORDER,
        "LD_PRELOAD": preload(base.get("LD_PRELOAD", ""), options.hook, base),
        VARIABLE: options.encode(str(budget)),
    }


def launch(command: Sequence[str], options: LaunchOptions) -> NoReturn:
    """Become ``command``: the same process id, terminal and descriptors. Raises where that cannot be."""
    if not command:
        raise UsageError(
            "no program to launch", cure="write it after the options: ckptpipe launch -- PROGRAM…"
        )
    path = shutil.which(command[0])
    if path is None:
        found = os.path.exists(command[0]) and "/" in command[0]
        what = "cannot be executed" if found else "there is no such program"
        raise LaunchFailed(
            f"{command[0]}: {what}",
            cure="check its mode" if found else "check its name and PATH",
            exit_code=126 if found else 127,
        )
    variables = environment(options, os.environ)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would pass that on
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(path, list(command), variables)
    except OSError as error:
        raise LaunchFailed(
            f"{path}: {error.strerror}",
            cure="a script needs a first line that names its interpreter"
            if error.errno == errno.ENOEXEC
            else "",
            exit_code=127 if error.errno == errno.ENOENT else 126,
        ) from error


def check_size(options: LaunchOptions) -> None:
    """UsageError for a pool that this machine or this process's cgroup can never hold."""
    from ckptpipe.pipeline import machine

    total, _ = machine.memory()
    limit = machine.memory_limit()
    most, whose = (int(limit.value), limit.where) if limit is not None else (total, "this machine's memory")
    for what, size in (("pool", options.pool), ("budget", options.budget)):
        if size.nbytes > most:
            raise UsageError(
                f"a {what} of {format_bytes(size.nbytes)} is more than {whose} holds, {format_bytes(most)}",
                cure=f"take a smaller --{what}, or a share such as --{what} 50%",
            )


def forget_finished(folder: Path) -> None:
    """Remove budgets of trees that ended without their last process having been able to."""
    for path in folder.iterdir():
        try:
            with path.open("r+b") as file:
                # The same lock that each process of a tree holds a byte of; see budget.h.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 0, 0)
                path.unlink()
        except OSError:  # in use, or another launch was faster
            continue
