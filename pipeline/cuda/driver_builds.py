"""Which builds of the CUDA driver were seen to write their image by nothing but copies that the capture library sees.

Kept in the runtime directory, by the driver library's name, size and time and the way in which it is hooked: a new
driver, or a new version of ckptpipe, is unknown again.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from ckptpipe.pipeline.runtime_directory import runtime_directory
from ckptpipe.pipeline.version import __version__
from ckptpipe.pyx.control_page import PoolState

_FILE = "driver-builds.json"
_LIMIT = 64 << 10  # bytes; what is larger was not written here


def driver_build(pid: int, state: PoolState) -> str:
    """The build of the driver in process ``pid``; "" where it cannot be told, which is no build anybody knows."""
    try:
        found = os.stat(f"/proc/{pid}/root{state.library}")
    except OSError:
        return ""
    name = os.path.basename(state.library)
    return f"{name} {found.st_size} {found.st_mtime_ns} {state.hook} ckptpipe {__version__}"


def known_builds() -> dict[str, bool]:
    """False: it was seen to write in other ways, too. Blocks. A file that cannot be read is one that says nothing."""
    try:
        with (runtime_directory() / _FILE).open("rb") as file:
            found = json.loads(file.read(_LIMIT))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {build: sound for build, sound in found.items() if isinstance(sound, bool)}


def note_build(build: str, sound: bool) -> None:
    """What was found out of a build; once it was found wanting, that stays. Blocks."""
    if not build:
        return
    known = known_builds()
    if known.get(build) in (sound, False):
        return
    folder = runtime_directory()
    fresh: Path = folder / f".{_FILE}.{secrets.token_hex(4)}"
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({**known, build: sound}, file, indent=1)
        fresh.replace(folder / _FILE)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
