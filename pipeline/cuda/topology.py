"""Where GPUs hang: PCIe generation and width, NUMA node, shared uplinks. Read from sysfs, no driver is asked."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_GENERATIONS = {"2.5": 1, "5.0": 2, "5": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6, "128.0": 7}  # GT/s
_FUNCTION = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True, slots=True)
class Link:
    """One PCIe link; 0 where sysfs does not say. An idle GPU's current generation may be lower than it can."""

    generation: int = 0
    width: int = 0
    max_generation: int = 0
    max_width: int = 0

    def __str__(self) -> str:
        if not self.max_width:
            return "unknown"
        text = f"PCIe {self.max_generation} x{self.max_width}"
        if self.width and self.width < self.max_width:
            text += f" (runs at x{self.width})"
        return text


@dataclass(frozen=True, slots=True)
class Place:
    """Where a GPU hangs. ``uplink``: the bridge nearest to the processor that it shares or could share with
    others, "" where sysfs does not show one (virtual machines); ``numa_node`` None where there is one only."""

    pci: str
    link: Link
    numa_node: int | None
    uplink: str


def place_of(pci: str, root: Path = Path("/")) -> Place:
    """The place of the PCI function ``pci`` ("0000:17:00.0")."""
    pci = normal(pci)
    device = root / "sys/bus/pci/devices" / pci
    link = Link(
        _generation(device / "current_link_speed"),
        _number(device / "current_link_width"),
        _generation(device / "max_link_speed"),
        _number(device / "max_link_width"),
    )
    node = _number(device / "numa_node", default=-1)
    return Place(pci, link, node if node >= 0 else None, _uplink(device))


def normal(pci: str) -> str:
    """The spelling of sysfs: the driver also says "00000000:17:00.0" and capital letters."""
    domain, _, rest = pci.strip().lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}" if rest else pci


def shared_uplinks(places: Iterable[Place]) -> list[list[str]]:
    """Groups of GPUs (by PCI address) that share one uplink: together they copy no faster than one of them."""
    groups: dict[str, list[str]] = {}
    for place in places:
        if place.uplink:
            groups.setdefault(place.uplink, []).append(place.pci)
    return [sorted(group) for _, group in sorted(groups.items()) if len(group) > 1]


def _uplink(device: Path) -> str:
    """The root port: the first PCI function on the path from the host bridge down to the device."""
    try:
        parts = device.resolve(strict=True).parts
    except OSError:
        return ""
    functions = [part for part in parts if _FUNCTION.fullmatch(part)]
    return functions[0] if len(functions) > 1 else ""


def _generation(file: Path) -> int:
    return _GENERATIONS.get(_text(file).split(" ")[0], 0)  # "32.0 GT/s PCIe"


def _number(file: Path, default: int = 0) -> int:
    text = _text(file)
    try:
        return int(text)
    except ValueError:
        return default


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
