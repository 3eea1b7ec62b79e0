"""PCIe links, NUMA nodes and shared uplinks, read from a sysfs tree like that of a machine with four GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptpipe.pipeline.cuda.topology import Link, normal, place_of, shared_uplinks


def device(root: Path, path: str, **files: str) -> None:
    folder = root / "sys/devices" / path
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")
    link = root / "sys/bus/pci/devices" / folder.name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    fast = {
        "current_link_speed": "32.0 GT/s PCIe",
        "current_link_width": "16",
        "max_link_speed": "32.0 GT/s PCIe",
        "max_link_width": "16",
    }
    # Two behind one switch under root port 0000:15:01.0, one under a port of its own, one with no port in sight.
    switch = "pci0000:15/0000:15:01.0/0000:16:00.0"
    device(tmp_path, f"{switch}/0000:17:00.0/0000:18:00.0", **fast, numa_node="0")
    device(tmp_path, f"{switch}/0000:17:01.0/0000:19:00.0", **fast, numa_node="0")
    device(
        tmp_path,
        "pci0000:95/0000:95:01.0/0000:96:00.0",
        **fast | {"current_link_speed": "2.5 GT/s PCIe", "current_link_width": "8"},
        numa_node="1",
    )
    device(
        tmp_path, "pci0000:00/0000:00:05.0", numa_node="-1", max_link_speed="Unknown", max_link_width="255x"
    )
    return tmp_path


def test_links_and_nodes(root: Path) -> None:
    place = place_of("00000000:18:00.0", root)
    assert place.pci == "0000:18:00.0"
    assert place.link == Link(5, 16, 5, 16)
    assert str(place.link) == "PCIe 5 x16"
    assert place.numa_node == 0 and place.uplink == "0000:15:01.0"
    idle = place_of("0000:96:00.0", root)
    assert idle.link == Link(1, 8, 5, 16) and str(idle.link) == "PCIe 5 x16 (runs at x8)"
    assert idle.numa_node == 1


def test_what_is_not_there_is_not_known(root: Path) -> None:
    virtual = place_of("0000:00:05.0", root)
    assert (virtual.link, virtual.numa_node, virtual.uplink) == (Link(), None, "")
    assert str(virtual.link) == "unknown"
    missing = place_of("0000:ff:00.0", root)
    assert (missing.link, missing.numa_node, missing.uplink) == (Link(), None, "")


def test_gpus_that_share_an_uplink(root: Path) -> None:
    places = [place_of(pci, root) for pci in ("0000:19:00.0", "0000:18:00.0", "0000:96:00.0", "0000:00:05.0")]
    assert shared_uplinks(places) == [["0000:18:00.0", "0000:19:00.0"]]


def test_spellings() -> None:
    assert normal("00000000:AF:00.0") == normal("0000:af:00.0") == "0000:af:00.0"
    assert normal("00010000:01:00.0") == "10000:01:00.0"
