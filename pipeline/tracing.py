"""Whether this process may read the memory of others: ptrace(2), and what Yama makes of it in this kernel."""

from __future__ import annotations

import os
from pathlib import Path

_CAP_SYS_PTRACE = 19


def ptrace_scope(root: Path) -> int:
    """kernel.yama.ptrace_scope: 0: those of the same user; 1 and 2: with CAP_SYS_PTRACE (1: and one's children); 3: none. 0 in a
    kernel without Yama."""
    try:
        return int((root / "proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def may_trace() -> bool:
    """Whether this process has CAP_SYS_PTRACE."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_SYS_PTRACE & 1)
    return os.geteuid() == 0
