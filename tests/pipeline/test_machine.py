"""Facts of the machine, read from a made-up /proc and /sys: what other kernels and containers show."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptpipe.pipeline import machine

MEMINFO = "MemTotal:       24654108 kB\nMemFree:          200000 kB\nMemAvailable:   20000000 kB\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put(tmp_path, "proc/meminfo", MEMINFO)
    return tmp_path


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_memory(root: Path) -> None:
    assert machine.memory(root) == (24654108 * 1024, 20000000 * 1024)


def test_processor_of_both_architectures(root: Path) -> None:
    put(root, "proc/cpuinfo", "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu sse4_2 avx2 sse4_2x\n")
    assert machine.cpu_model(root) == "Some CPU"
    assert machine.cpu_features(root) == ["sse4_2", "avx2"]
    put(root, "proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd pmull crc32\n")
    assert machine.cpu_model(root) == os.uname().machine
    assert machine.cpu_features(root) == ["crc32", "pmull"]


def test_huge_pages(root: Path) -> None:
    put(root, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    put(
        root,
        "sys/kernel/mm/transparent_hugepage/shmem_enabled",
        "always within_size advise [never] deny force\n",
    )
    put(root, "sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages", "0\n")
    put(root, "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "0\n")
    put(root, "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "3\n")
    put(root, "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "8\n")
    assert machine.huge_pages(root) == machine.HugePages(
        "madvise", "never", ((2 << 20, 3, 8), (1 << 30, 0, 0))
    )


def test_a_kernel_without_huge_pages(root: Path) -> None:
    assert machine.huge_pages(root) == machine.HugePages("", "", ())


def test_cgroup_2_takes_the_tightest_limit_up_the_tree(root: Path) -> None:
    put(root, "proc/self/cgroup", "0::/user.slice/job.scope\n")
    put(root, "proc/self/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n")
    put(root, "sys/fs/cgroup/user.slice/job.scope/cpu.max", "max 100000\n")
    put(root, "sys/fs/cgroup/user.slice/job.scope/memory.max", "8589934592\n")
    put(root, "sys/fs/cgroup/user.slice/cpu.max", "150000 100000\n")
    put(root, "sys/fs/cgroup/user.slice/memory.max", "4294967296\n")
    cpu, memory = machine.cpu_limit(root), machine.memory_limit(root)
    assert cpu is not None
    assert cpu.value == 1.5
    assert cpu.where.endswith("/user.slice/cpu.max")
    assert memory is not None
    assert memory.value == 4 << 30


def test_cgroup_1(root: Path) -> None:
    put(root, "proc/self/cgroup", "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/x\n")
    put(
        root,
        "proc/self/mounts",
        "cgroup /sys/fs/cgroup/memory cgroup ro,memory 0 0\ncgroup /sys/fs/cgroup/cpu,cpuacct cgroup ro,cpu,cpuacct 0 0\n",
    )
    # Inside the container the host's path is not there: the mount is the group itself.
    put(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n")
    put(root, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "50000\n")
    put(root, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    cpu, memory = machine.cpu_limit(root), machine.memory_limit(root)
    assert cpu is not None
    assert cpu.value == 0.5
    assert memory is not None
    assert memory.value == 1 << 30


def test_no_cgroup_limit(root: Path) -> None:
    put(root, "proc/self/cgroup", "5:memory:/\n4:cpu,cpuacct:/\n0::/\n")
    put(root, "proc/self/mounts", "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n")
    put(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert machine.cpu_limit(root) is None
    assert machine.memory_limit(root) is None


def test_this_machine() -> None:
    total, available = machine.memory()
    assert 0 < available <= total
    assert machine.usable_cpus() == len(os.sched_getaffinity(0))
    assert machine.cpu_model()
