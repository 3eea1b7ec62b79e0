"""Who is saving: what a live lease object says of its process, and whether that process has ended."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def lease_facts(save_id: str, started: float) -> bytes:
    """The content of a lease object, refreshed now."""
    facts = {
        "save_id": save_id,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process": _identity(os.getpid()),
        "started": round(started, 3),
        "refreshed": round(time.time(), 3),
    }
    return json.dumps(facts, sort_keys=True).encode() + b"\n"


def read_lease(data: bytes) -> tuple[str, bool]:
    """(who holds it in words, whether that process is known to have ended) of a lease object's bytes."""
    try:
        facts: Mapping[str, Any] = json.loads(data)
        pid, host, identity = int(facts["pid"]), str(facts["host"]), facts.get("process")
    except (ValueError, KeyError, TypeError):
        return "", False
    return f" of process {pid} on {host}", _has_ended(pid, identity)


def _has_ended(pid: int, identity: object) -> bool:
    """Only where it can be known: the same boot of the same kernel, and the same PID namespace."""
    here = _identity(os.getpid())
    if not isinstance(identity, dict) or not here:
        return False
    if any(identity.get(key) != here[key] for key in ("boot_id", "pid_namespace")):
        return False
    return _identity(pid) != identity


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
