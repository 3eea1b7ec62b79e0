"""The GPU part of `ckptpipe doctor`: GPUs and their links, which capture paths work here and why not the others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from ctypes import CDLL, byref, c_int
from pathlib import Path

from ckptpipe.pipeline.cuda import choice, topology
from ckptpipe.pipeline.cuda.driver import CudaDriver, Gpu
from ckptpipe.pipeline.doctor_codecs import codec_finding
from ckptpipe.pipeline.doctor_report import Finding
from ckptpipe.pipeline.tracing import may_trace, ptrace_scope
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.storage_backends.quantities import format_bytes

_ALGORITHMS = {1: "Deflate", 2: "Snappy", 4: "LZ4"}  # CUmemDecompressAlgorithm, as bits of attribute 136
_OPEN_SECONDS = 60.0  # cuInit takes 1 to 2 s; a broken driver can take for ever


async def gpu_findings(root: Path = Path("/")) -> list[Finding]:
    """Initialises the driver where there is one; takes a second or two then, and no GPU memory."""
    findings, loads = _driver(root)
    if not loads:
        return findings
    try:
        async with asyncio.timeout(_OPEN_SECONDS):
            driver = await CudaDriver.open()
    except TimeoutError:
        return [
            *findings,
            Finding(
                "GPUs",
                f"the driver did not initialise within {_OPEN_SECONDS:.0f} s",
                "missing",
                "look into dmesg",
            ),
        ]
    except CkptpipeError as error:
        return [*findings, Finding("GPUs", error.message, "missing", error.cure)]
    async with driver:
        if driver.simulated:
            findings[0] = Finding(
                "driver", f"{findings[0].value}, a simulation: no result of it is a GPU's", "note"
            )
        try:
            gpus = await driver.devices()
        except CkptpipeError as error:
            return [*findings, Finding("GPUs", error.message, "missing", error.cure)]
        places = {gpu.ordinal: topology.place_of(gpu.pci, root) for gpu in gpus}
        return [
            *findings,
            *_gpus(gpus, places),
            _numa(gpus, places),
            _uplinks(gpus, places),
            _decompression(gpus),
            await asyncio.to_thread(codec_finding, driver, gpus),
            *_capture(driver, gpus, root),
            await _controller(),
        ]


def _driver(root: Path) -> tuple[list[Finding], bool]:
    """Its version, and whether it can be used at all."""
    try:
        library = CDLL("libcuda.so.1")
    except OSError:
        absent = "no GPU driver found (libcuda.so.1); files, buffers and stores need none"
        return [Finding("driver", absent, "note")], False
    number = c_int(0)
    status = library.cuDriverGetVersion(byref(number))
    if status != 0:
        broken = f"libcuda.so.1 loads, cuDriverGetVersion answers error {status}"
        return [Finding("driver", broken, "note")], False
    value = f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    try:
        module = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        module = ""
    findings = [Finding("driver", value)]
    if module:
        findings.append(Finding("kernel module", " ".join(module.removeprefix("NVRM version:").split())))
    return findings, True


def _gpus(gpus: Sequence[Gpu], places: dict[int, topology.Place]) -> list[Finding]:
    """One line for all that are alike."""
    if not gpus:
        return [Finding("GPUs", "none", "missing", "check nvidia-smi and CUDA_VISIBLE_DEVICES")]
    alike: dict[str, list[int]] = {}
    slow = set()
    for gpu in gpus:
        link = places[gpu.ordinal].link
        mig = ", a MIG instance (cannot be checkpointed)" if gpu.mig else ""
        text = f"{gpu.name}, {format_bytes(gpu.memory_bytes)}, {_link(link)}{mig}"
        alike.setdefault(text, []).append(gpu.ordinal)
        if 0 < link.width < link.max_width:
            slow.add(text)
    return [
        Finding(
            f"GPU {_ordinals(ordinals)}",
            text,
            "note" if text in slow else "ok",
            "it runs with fewer lanes than it has: check its slot and riser" if text in slow else "",
        )
        for text, ordinals in alike.items()
    ]


def _link(link: topology.Link) -> str:
    return str(link) if link.max_width else "PCIe link not visible"


def _numa(gpus: Sequence[Gpu], places: dict[int, topology.Place]) -> Finding:
    nodes: dict[int | None, list[int]] = {}
    for gpu in gpus:
        nodes.setdefault(places[gpu.ordinal].numa_node, []).append(gpu.ordinal)
    if set(nodes) <= {None}:
        return Finding("GPU NUMA nodes", "one node, or not visible")
    listed = (
        f"{'unknown' if node is None else f'node {node}'}: GPU {_ordinals(found)}"
        for node, found in sorted(nodes.items(), key=lambda item: -1 if item[0] is None else item[0])
    )
    return Finding("GPU NUMA nodes", "; ".join(listed))


def _uplinks(gpus: Sequence[Gpu], places: dict[int, topology.Place]) -> Finding:
    ordinals = {places[gpu.ordinal].pci: gpu.ordinal for gpu in gpus}
    shared = topology.shared_uplinks(places.values())
    if not any(place.uplink for place in places.values()):
        return Finding("PCIe uplinks", "not visible (a virtual machine hides them)" if gpus else "no GPU")
    if not shared:
        return Finding("PCIe uplinks", "each GPU has its own" if len(gpus) > 1 else "its own")
    groups = "; ".join(f"GPU {_ordinals(ordinals[pci] for pci in group)}" for group in shared)
    return Finding(
        "PCIe uplinks", f"shared by {groups}: together they copy no faster than one of them", "note"
    )


def _decompression(gpus: Sequence[Gpu]) -> Finding:
    """Attributes 136 and 137 of each GPU."""
    alike: dict[tuple[int, int], list[int]] = {}
    for gpu in gpus:
        alike.setdefault((gpu.decompress_mask, gpu.decompress_max_bytes), []).append(gpu.ordinal)
    told = []
    for (mask, longest), ordinals in alike.items():
        names = [name for bit, name in _ALGORITHMS.items() if mask & bit]
        text = f"mask {mask:#x}" + (f" ({', '.join(names)})" if names else "")
        text += f", maximum length {format_bytes(longest) if longest else 0}"
        told.append(text if len(alike) == 1 else f"GPU {_ordinals(ordinals)}: {text}")
    if not any(mask for mask, _ in alike):
        return Finding("decompression", f"no engine: {'; '.join(told) or 'no GPU'}", "note")
    return Finding("decompression", "; ".join(told))


def _capture(driver: CudaDriver, gpus: Sequence[Gpu], root: Path) -> list[Finding]:
    custom = choice.custom_problem(driver)
    image = choice.image_problem(driver, []) or _no_tracing(root)
    limited = [gpu.ordinal for gpu in gpus if gpu.mig]
    mig = f"; not on GPU {_ordinals(limited)} (MIG)" if limited else ""
    return [
        _path("custom storage", custom, f"works{mig}", "a driver with CUDA 13.4 or later"),
        _path("driver image", image, f"works{mig}", ""),
        Finding("device buffers", "works" if gpus else "no GPU", "ok" if gpus else "missing"),
    ]


def _path(name: str, problem: str, works: str, cure: str) -> Finding:
    if problem:
        return Finding(name, problem, "missing", cure)
    return Finding(name, works)


def _no_tracing(root: Path) -> str:
    """Why the memory of another process of this user could not be read, "" where it can."""
    scope = ptrace_scope(root)
    if scope == 0 or (scope < 3 and may_trace()):
        return ""
    return (
        f"kernel.yama.ptrace_scope is {scope}: the memory of other processes cannot be read without CAP_SYS_PTRACE"
        if scope < 3
        else "kernel.yama.ptrace_scope is 3: the memory of other processes cannot be read at all"
    )


async def _controller() -> Finding:
    from ckptpipe.pipeline.controller import client
    from ckptpipe.pipeline.controller.errors import ControllerUnavailable
    from ckptpipe.pipeline.controller.runtime_directory import candidates

    try:
        pid = await client.greet(None)
    except ControllerUnavailable:
        return Finding(
            "controller",
            f"none runs ({candidates()[0]}): each command initialises CUDA itself",
            "note",
            "ckptpipe serve &",
        )
    except CkptpipeError as error:
        return Finding("controller", error.message, "missing", error.cure)
    return Finding("controller", f"runs, pid {pid}")


def _ordinals(ordinals: Iterable[int]) -> str:
    """0-3, 7"""
    runs: list[list[int]] = []
    for ordinal in sorted(ordinals):
        if runs and ordinal == runs[-1][-1] + 1:
            runs[-1].append(ordinal)
        else:
            runs.append([ordinal])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
