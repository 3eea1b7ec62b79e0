"""What a process holds: threads, descriptors, children, leases. Each test must leave as much as it found.

`Holdings.now()` looks; `Ledger.left_since` says in words what is there that was not. Fixtures of a wider
scope than one test (a server, a mount) are not leaks: `Ledger.adopt` takes what they brought.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

SETTLE_SECONDS = 3.0
"""A joined thread or a closed socket can outlive the call that ended it by a moment; a leak stays."""

_COUNTERS = {
    "leases, views or operations that hold staging memory": ("ckptpipe.pyx.staging", "outstanding"),
    "leases collected without release()": ("ckptpipe.pyx.staging", "leaked"),
    "worker pools not closed": ("ckptpipe.pyx.workers", "live_pools"),
    "I/O engines not closed": ("ckptpipe.pyx.engine", "live_engines"),
    "mappings not closed": ("ckptpipe.pyx.memory", "live_mappings"),
    "copy queues not closed": ("ckptpipe.pyx.cuda_queue", "live_queues"),
    "device codecs not closed": ("ckptpipe.pyx.device_codec", "live_codecs"),
    "bytes of pinned memory not released": ("ckptpipe.pyx.cuda_memory", "pinned_bytes"),
}
"""What the engine counts itself: module and function."""

_KEEPS = re.compile(r"/lib(?:cuda|nvrtc|nvcomp|nvidia-[a-z]+)\.so")
"""Libraries of NVIDIA's that keep what they opened for as long as the process lives."""
_OF_THE_DRIVER = ("/dev/nvidia", "/proc/driver/nvidia", "/dev/shm/cuda", "/memfd:cuda", "/memfd:/.nv")
_UNNAMED = ("anon_inode:", "pipe:", "socket:", "/memfd:", "/dev/shm/")
_OWN_THREADS = ("ckpt-", "ckptpipe", "asyncio_")


@dataclass(frozen=True)
class Holdings:
    """Keys tell two holders apart, values describe them."""

    threads: dict[int, str] = field(default_factory=dict)
    descriptors: dict[tuple[int, str], str] = field(default_factory=dict)
    children: dict[int, str] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    keepers: frozenset[str] = frozenset()
    """The libraries of NVIDIA's that are loaded, the simulated driver not among them."""

    @classmethod
    def now(cls) -> Holdings:
        return cls(
            threads=_threads(),
            descriptors=_descriptors(),
            children=_children(),
            counters={
                what: getattr(module, function)()
                for what, (name, function) in _COUNTERS.items()
                if (module := _loaded(name)) is not None
            },
            keepers=_keepers(),
        )

    def beyond(self, before: Holdings) -> list[str]:
        """One line a thing that is here and was not there before.

        A real driver opens devices and starts threads at any call, and keeps them: they are not counted. The first
        use of such a library also opens pipes, eventfds and memory without a name: then those are not counted either.
        """
        first = bool(self.keepers - before.keepers)
        lines = [
            f"thread {tid} ({name})"
            for tid, name in self.threads.items()
            if tid not in before.threads
            and not (self.keepers and name.startswith("cuda"))
            and not (first and not name.startswith(_OWN_THREADS))
        ]
        lines += [
            f"descriptor {key[0]} ({what})"
            for key, what in self.descriptors.items()
            if key not in before.descriptors
            and not (self.keepers and what.startswith(_OF_THE_DRIVER))
            and not (first and what.startswith(_UNNAMED))
        ]
        lines += [
            f"child process {pid} ({what})"
            for pid, what in self.children.items()
            if pid not in before.children
        ]
        for what, count in self.counters.items():
            more = count - before.counters.get(what, 0)
            if more > 0:
                lines.append(f"{more} {what}")
        return lines


class Ledger:
    """What wider fixtures brought, and what is new beside that."""

    def __init__(self) -> None:
        self._threads: dict[int, str] = {}
        self._descriptors: dict[tuple[int, str], str] = {}
        self._children: dict[int, str] = {}

    def adopt(self, before: Holdings, after: Holdings) -> None:
        self._threads |= {key: value for key, value in after.threads.items() if key not in before.threads}
        self._descriptors |= {
            key: value for key, value in after.descriptors.items() if key not in before.descriptors
        }
        self._children |= {key: value for key, value in after.children.items() if key not in before.children}

    def left_since(self, before: Holdings, *, settle: float = SETTLE_SECONDS) -> list[str]:
        """What stays beyond ``before`` and the adopted; what goes by itself within ``settle`` is no leak."""
        known = Holdings(
            threads=before.threads | self._threads,
            descriptors=before.descriptors | self._descriptors,
            children=before.children | self._children,
            counters=before.counters,
            keepers=before.keepers,
        )
        lines = Holdings.now().beyond(known)
        if not lines:
            return lines
        gc.collect()
        deadline = time.monotonic() + settle
        pause = 0.001
        while (lines := Holdings.now().beyond(known)) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(pause * 2, 0.1)
        return lines


def _loaded(name: str) -> ModuleType | None:
    """A module that some test imported: a test that does not need the engine must not need it built."""
    return sys.modules.get(name)


def _keepers() -> frozenset[str]:
    found = set()
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            if "/lib" in line and "simcuda" not in line and (match := _KEEPS.search(line)):
                found.add(match[0])
    return frozenset(found)


def _threads() -> dict[int, str]:
    found = {}
    for entry in os.listdir("/proc/self/task"):
        try:
            found[int(entry)] = Path(f"/proc/self/task/{entry}/comm").read_text(encoding="utf-8").strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _descriptors() -> dict[tuple[int, str], str]:
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:  # the descriptor that listed the folder
            continue
        found[int(entry), target] = target
    return found


def _children() -> dict[int, str]:
    """Child processes, dead ones that nobody waited for too, without multiprocessing's own tracker."""
    tracker = getattr(_loaded("multiprocessing.resource_tracker"), "_resource_tracker", None)
    own = getattr(tracker, "_pid", None)
    found = {}
    for entry in _child_ids():
        if int(entry) == own:
            continue
        try:
            stat = Path(f"/proc/{entry}/stat").read_text(encoding="utf-8", errors="replace")
            command = (
                Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, parent = stat.rpartition(")")[2].split()[:2]
        if int(parent) == os.getpid():
            name = stat[stat.index("(") : stat.rindex(")") + 1]
            found[int(entry)] = (
                f"a zombie, nobody waited for it: {name}" if state == "Z" else command.strip() or name
            )
    return found


def _child_ids() -> list[str]:
    """Ids of at least every child: the kernel's list where it was built with one, else all processes."""
    try:
        return [
            child
            for task in os.listdir("/proc/self/task")
            for child in Path(f"/proc/self/task/{task}/children").read_text(encoding="ascii").split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return [entry for entry in os.listdir("/proc") if entry.isdigit()]
