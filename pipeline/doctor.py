"""`ckptpipe doctor`: what this machine offers to a save or a restore, and the cure for what it lacks.

Nothing is changed, no network is asked, no secret is read out. Where there is a GPU driver, it is initialised.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ckptpipe.pipeline import machine
from ckptpipe.pipeline.credential_source import find_credentials
from ckptpipe.pipeline.doctor_gpu import gpu_findings
from ckptpipe.pipeline.doctor_report import DoctorReport, Finding, Section
from ckptpipe.pipeline.version import __version__
from ckptpipe.pyx import checksum, copy, files
from ckptpipe.pyx.io_engine import probe
from ckptpipe.pyx.memory import numa_nodes
from ckptpipe.storage_backends.quantities import format_bytes

__all__ = ["DoctorReport", "Finding", "Section", "examine"]


async def examine(path: str | os.PathLike[str] = ".") -> DoctorReport:
    """Look at this machine; ``path`` is where direct I/O is asked about (the image's future folder)."""
    sections = [
        Section("ckptpipe", _software()),
        Section("processor and memory", _processor() + _memory()),
        Section("files", await asyncio.to_thread(_files, Path(path))),
        Section("object store", await asyncio.to_thread(_object_store)),
        Section("GPU", await gpu_findings()),
    ]
    return DoctorReport(sections)


def _software() -> list[Finding]:
    try:
        loop = Finding("event loop", f"uvloop {version('uvloop')}")
    except PackageNotFoundError:
        loop = Finding("event loop", "asyncio", "note", "pip install uvloop: less CPU a request")
    return [
        Finding("version", __version__),
        Finding("Python", f"{platform.python_version()} ({sys.executable})"),
        Finding("kernel", f"{platform.system()} {platform.release()} {platform.machine()}"),
        loop,
    ]


def _processor() -> list[Finding]:
    cpus = str(machine.usable_cpus())
    limit = machine.cpu_limit()
    if limit is not None:
        cpus += f", of which a cgroup grants {limit.value:.1f} ({limit.where})"
    crc = checksum.implementation()
    slow = crc == "table"
    return [
        Finding("processor", machine.cpu_model()),
        Finding("features", " ".join(machine.cpu_features()) or "none that the kernels know"),
        Finding("usable CPUs", cpus),
        Finding("copy kernel", copy.implementation()),
        Finding(
            "CRC32C kernel",
            crc,
            "note" if slow else "ok",
            "the processor has no CRC32C instruction: checksums will be the limit" if slow else "",
        ),
        Finding("NUMA nodes", str(len(numa_nodes()) or 1)),
    ]


def _memory() -> list[Finding]:
    total, available = machine.memory()
    value = f"{format_bytes(total)}, {format_bytes(available)} available"
    limit = machine.memory_limit()
    if limit is not None:
        value += f"; a cgroup grants {format_bytes(limit.value)} ({limit.where})"
    findings = [Finding("memory", value)]

    pages = machine.huge_pages()
    pools = ", ".join(f"{free} of {all_} {format_bytes(size)} pages free" for size, free, all_ in pages.pools)
    usable = pages.thp in ("always", "madvise") or any(free for _, free, _ in pages.pools)
    findings.append(
        Finding(
            "huge pages",
            f"transparent {pages.thp or 'not built in'}, shmem {pages.shmem or 'not built in'}"
            + (f"; hugetlb {pools}" if pools else ""),
            "ok" if usable else "note",
            "" if usable else "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    )
    locked = machine.memlock()
    small = locked is not None and locked < 512 << 20
    findings.append(
        Finding(
            "memlock limit",
            "none" if locked is None else format_bytes(locked),
            "note" if small else "ok",
            "ulimit -l unlimited, or LimitMEMLOCK=infinity: the ring can then be locked and registered"
            if small
            else "",
        )
    )
    return findings


def _files(path: Path) -> list[Finding]:
    return [*_engines(), _direct_io(path), *_fuse()]


def _engines() -> list[Finding]:
    findings = []
    for found in probe():
        value = "runs" if found.works else f"does not run: {found.why}"
        if found.notes:
            value += f" ({'; '.join(found.notes)})"
        findings.append(Finding(f"{found.name} engine", value, "ok" if found.works else "missing"))
    if findings and findings[0].state == "missing":
        # Containers forbid io_uring more often than kernels lack it.
        findings[0] = replace(
            findings[0], cure="kernel 5.6 or later, and a seccomp profile that allows io_uring_setup"
        )
    return findings


def _direct_io(path: Path) -> Finding:
    """Asks of an unnamed file in ``path``: alignment is a matter of the file, not of the file system."""
    try:
        _, kind = files.filesystem(path)
        handle = os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return Finding("direct I/O", f"{path}: {error.strerror}", "note", "name a folder that can be written")
    try:
        alignment = files.dio_alignment(handle, path)
    finally:
        os.close(handle)
    if alignment is None:
        return Finding(
            "direct I/O", f"not on {kind} ({path.absolute()}): saves there go through the page cache", "note"
        )
    memory, offset = alignment
    return Finding(
        "direct I/O", f"on {kind} ({path.absolute()}): memory aligned to {memory}, offsets to {offset}"
    )


def _fuse() -> list[Finding]:
    if not os.path.exists("/dev/fuse"):
        device = Finding(
            "/dev/fuse", "not there", "missing", "modprobe fuse; in a container: --device /dev/fuse"
        )
    elif not os.access("/dev/fuse", os.R_OK | os.W_OK):
        device = Finding("/dev/fuse", "no permission", "missing", "mount as root, or join the device's group")
    else:
        device = Finding("/dev/fuse", "usable")
    program = shutil.which("fusermount3")
    if program is None:
        return [
            device,
            Finding(
                "fusermount3",
                "not found",
                "missing",
                "apt-get install fuse3 (only to mount; not to use a mount)",
            ),
        ]
    return [device, Finding("fusermount3", program)]


def _object_store() -> list[Finding]:
    source = find_credentials()
    profile = f", profile {source.profile}" if source.profile else ""
    if source.provider:
        credentials = Finding("AWS credentials", f"by {source.provider}{profile} (not tried)")
    elif source.problem:
        credentials = Finding("AWS credentials", f"unusable{profile}", "missing", source.problem)
    else:
        credentials = Finding(
            "AWS credentials",
            f"none in environment and files{profile}; instance metadata was not asked",
            "note",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; --no-sign-request needs none",
        )
    where = _without_user(source.endpoint) or "AWS"
    return [credentials, Finding("S3 endpoint", f"{where}, region {source.region or 'not set'}")]


def _without_user(url: str) -> str:
    """An endpoint's URL without a user and password that somebody wrote into it."""
    scheme, separator, rest = url.rpartition("://")
    return scheme + separator + rest.rpartition("@")[2]
