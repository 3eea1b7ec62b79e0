"""Huge pages of 2 MiB that are reserved for a benchmark, and given back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HUGE = 2 << 20
RESERVED = Path("/proc/sys/vm/nr_hugepages")


@contextmanager
def reserved(nbytes: int) -> Iterator[bool]:
    """Reserves so much more; whether that was to be had. What was reserved before is so again at the end."""
    before, wanted = RESERVED.read_text(encoding="ascii"), -(-nbytes // HUGE)
    try:
        try:
            RESERVED.write_text(str(int(before) + wanted), encoding="ascii")
        except PermissionError:
            yield False
        else:
            yield int(RESERVED.read_text(encoding="ascii")) >= int(before) + wanted
    finally:
        if RESERVED.read_text(encoding="ascii") != before:
            RESERVED.write_text(before, encoding="ascii")
