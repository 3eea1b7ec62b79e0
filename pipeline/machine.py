"""What the kernel says of this machine: processors, memory, limits. Read from /proc and /sys, nothing is run."""

from __future__ import annotations

import os
import platform
import re
import resource
from dataclasses import dataclass
from pathlib import Path

CPU_FEATURES = ("sse4_2", "pclmulqdq", "avx2", "avx512f", "avx512vl", "vpclmulqdq", "crc32", "pmull")
"""The flags that the copy and checksum kernels look at, in x86's and aarch64's spelling."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The tightest cgroup limit: ``value`` in bytes or CPUs, ``where`` the file that sets it."""

    value: float
    where: str


@dataclass(frozen=True, slots=True)
class HugePages:
    """``thp`` and ``shmem``: the kernel's chosen mode ("always", "madvise", "never", "" where not built in).
    ``pools``: (page size in bytes, free pages, all pages) of each hugetlb size."""

    thp: str
    shmem: str
    pools: tuple[tuple[int, int, int], ...]


def cpu_model(root: Path = Path("/")) -> str:
    for line in _text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model") and value.strip():
            return value.strip()
    return platform.machine()


def cpu_features(root: Path = Path("/")) -> list[str]:
    """Those of `CPU_FEATURES` that the processor has, in that order."""
    for line in _text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags = set(value.split())
            return [feature for feature in CPU_FEATURES if feature in flags]
    return []


def usable_cpus() -> int:
    """Processors that this process may run on (taskset, cpusets)."""
    return len(os.sched_getaffinity(0))


def memory(root: Path = Path("/")) -> tuple[int, int]:
    """(all, available) bytes of the machine."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE))
    return int(fields["MemTotal"]) * 1024, int(fields["MemAvailable"]) * 1024


def memlock() -> int | None:
    """Bytes that this process may lock (RLIMIT_MEMLOCK), None where there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def huge_pages(root: Path = Path("/")) -> HugePages:
    thp = root / "sys/kernel/mm/transparent_hugepage"
    pools = []
    folder = root / "sys/kernel/mm/hugepages"
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        size = re.fullmatch(r"hugepages-(\d+)kB", entry.name)
        if size is not None:
            free, total = (
                int(_text(entry / name).strip() or 0) for name in ("free_hugepages", "nr_hugepages")
            )
            pools.append((int(size[1]) * 1024, free, total))
    return HugePages(_chosen(thp / "enabled"), _chosen(thp / "shmem_enabled"), tuple(sorted(pools)))


def cpu_limit(root: Path = Path("/")) -> Limit | None:
    """CPUs that this process's cgroups grant, by version 2 (cpu.max) or 1 (cfs quota); None without a limit."""
    limits = []
    for folder in _cgroup_folders("", root):
        quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            limits.append(Limit(int(quota) / int(period), str(folder / "cpu.max")))
    for folder in _cgroup_folders("cpu", root):
        quota = _text(folder / "cpu.cfs_quota_us").strip()
        period = _text(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period):
            limits.append(Limit(int(quota) / int(period), str(folder / "cpu.cfs_quota_us")))
    return min(limits, key=lambda limit: limit.value, default=None)


def memory_limit(root: Path = Path("/")) -> Limit | None:
    """Bytes that this process's cgroups grant, by version 2 (memory.max) or 1; None without a limit."""
    machine, _ = memory(root)
    limits = []
    for controller, name in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
        for folder in _cgroup_folders(controller, root):
            value = _text(folder / name).strip()
            # Version 1 writes "no limit" as a number near 2**63.
            if value.isdigit() and int(value) < machine:
                limits.append(Limit(int(value), str(folder / name)))
    return min(limits, key=lambda limit: limit.value, default=None)


def _cgroup_folders(controller: str, root: Path) -> list[Path]:
    """This process's group and its parents in the hierarchy of ``controller`` ("" is version 2's)."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller not in controllers.split(","):
            continue
        mount = _cgroup_mount(controller, root)
        if mount is None:
            return []
        group = mount / path.lstrip("/")
        # In a container the path can be the host's, which is not mounted here: then the mount is the group.
        group = group if group.is_dir() and ".." not in group.parts else mount
        return [group, *(parent for parent in group.parents if parent.is_relative_to(mount))]
    return []


def _cgroup_mount(controller: str, root: Path) -> Path | None:
    for line in _text(root / "proc/self/mounts").splitlines():
        _, where, kind, options, *_ = line.split()
        if (kind == "cgroup2" and not controller) or (
            kind == "cgroup" and controller and controller in options.split(",")
        ):
            return root / where.lstrip("/")
    return None


def _chosen(path: Path) -> str:
    """The bracketed word of a kernel setting: "always [madvise] never"."""
    found = re.search(r"\[(\w+)\]", _text(path))
    return found[1] if found else ""


def _text(path: Path) -> str:
    """A file of the kernel's, "" where this kernel or container has none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
