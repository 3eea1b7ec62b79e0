"""Who is saving: what a live lease object says of its process, and whether that process lives."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

LEASE_MAX = 1 << 16  # bytes of a lease object that are read


@dataclass(frozen=True, slots=True)
class Holder:
    """What a lease says. ``words``: who holds it, "" where it does not say. ``life``: of the save; "unknown" where
    its process cannot be seen from here. ``refreshed``: Unix seconds by the holder's clock, 0 where it does not say.
    ``replaced``: of a save that left its clean-up to others, the save id of the image that it had replaced.
    """

    words: str = ""
    life: Literal["alive", "ended", "unknown"] = "unknown"
    refreshed: float = 0.0
    left: bool = False  # by its own words
    replaced: str = ""


def holder_facts(save_id: str, started: float) -> dict[str, Any]:
    """What the leases of one save of this process say of it, each the same: a machine may be renamed meanwhile.
    ``started``: Unix seconds."""
    return {
        "save_id": save_id,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process": _identity(os.getpid()),
        "started": round(started, 3),
    }


def lease_facts(own: Mapping[str, Any], *, left: bool = False, replaced: str = "") -> bytes:
    """The content of a lease object, refreshed now. ``own``: as `holder_facts` gave it. ``left``: the save has ended,
    and what it stored is anybody's to remove where no manifest names it; so is the save ``replaced``."""
    facts = {**own, "refreshed": round(time.time(), 3)}
    if left:
        facts |= {"left": True, "replaced": replaced}
    return json.dumps(facts, sort_keys=True).encode() + b"\n"


def is_lease_of(data: bytes, own: Mapping[str, Any]) -> bool:
    """Whether a lease object's bytes are what `lease_facts` made of ``own``, at whatever time, of a save that runs."""
    facts = _facts(data)
    return all(facts.get(key) == value for key, value in own.items()) and "left" not in facts


def read_lease(data: bytes) -> Holder:
    """What can be told of a lease object's bytes. Nobody need have written them in earnest."""
    facts = _facts(data)
    refreshed = facts.get("refreshed")
    if not isinstance(refreshed, int | float) or not math.isfinite(refreshed):
        refreshed = 0.0
    left, replaced = facts.get("left") is True, facts.get("replaced")
    try:
        pid, host = int(facts["pid"]), str(facts["host"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return Holder(life="ended" if left else "unknown", left=left)
    return Holder(
        f" of process {pid} on {host}",
        "ended" if left else _life(pid, facts.get("process")),
        float(refreshed),
        left,
        replaced if left and isinstance(replaced, str) else "",
    )


def _facts(data: bytes) -> Mapping[str, Any]:
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _life(pid: int, identity: object) -> Literal["alive", "ended", "unknown"]:
    """Only where it can be known: the same boot of the same kernel, and the same PID namespace."""
    here = _identity(os.getpid())
    if not isinstance(identity, dict) or not here:
        return "unknown"
    if any(identity.get(key) != here[key] for key in ("boot_id", "pid_namespace")):
        return "unknown"
    return "alive" if _identity(pid) == identity else "ended"


def _identity(pid: int) -> dict[str, str]:
    """What makes a process the one that it is; {} where there is none, or /proc does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        fields = stat[stat.rindex(")") + 2 :].split()
        if fields[0] in ("Z", "X"):
            return {}
        return {
            "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
            "pid_namespace": os.readlink("/proc/self/ns/pid"),
            "start_time": fields[19],
        }
    except (OSError, ValueError, IndexError):
        return {}
