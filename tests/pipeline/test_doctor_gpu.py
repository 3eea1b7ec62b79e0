"""The GPU part of `ckptpipe doctor`, on simulated machines and on invented ones in sysfs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptpipe.pipeline import doctor_gpu
from ckptpipe.pipeline.cuda.driver import Gpu
from ckptpipe.pipeline.cuda.topology import Link, Place
from ckptpipe.pipeline.doctor_report import DoctorReport, Finding, Section
from tests.simcuda import SimWorld

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-python: pip install 'ckptpipe[gpu]'")


@pytest.fixture(autouse=True)
def _runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A runtime directory of the test's own, with a path as short as a real one's: what is said is one screen."""
    with tempfile.TemporaryDirectory(prefix="run-") as path:
        monkeypatch.setenv("XDG_RUNTIME_DIR", path)
        yield


@pytest.fixture
def findings() -> Iterator[Callable[..., dict[str, Finding]]]:
    """``findings(root, gpus=…)``: what is said of such a machine, by name."""

    def look(root: Path = Path("/"), *, nvcomp: str = "", **options: object) -> dict[str, Finding]:
        more = {"CKPTPIPE_NVCOMP": nvcomp} if nvcomp else {}
        with SimWorld(**options) as world, world.attached(**more):  # type: ignore[arg-type]
            found = asyncio.run(doctor_gpu.gpu_findings(root))
            # Only the one that looks at it has a context, and it has let it go.
            assert all(world.used(gpu.index) == 0 for gpu in world.gpus)
        return {each.name: each for each in found}

    yield look


def test_a_machine_of_today(findings: Callable[..., dict[str, Finding]]) -> None:
    found = findings(gpus=8, memory=1 << 30, names="NVIDIA B200", decompression=(7, 4 << 20))
    assert "a simulation" in found["driver"].value
    assert found["GPU 0-7"].value == "NVIDIA B200, 1.0 GiB, PCIe link not visible"
    assert found["decompression"].value == "mask 0x7 (Deflate, Snappy, LZ4), maximum length 4.0 MiB"
    assert (found["custom storage"].state, found["custom storage"].value) == ("ok", "works")
    assert found["device buffers"].state == "ok"
    assert found["GPU codecs"].value == (
        "nvCOMP 6.0.0 (simulated); decodes: decompression-engine, nvcomp-cuda, cpu; scratch 512.0 MiB a GPU (--gpu-scratch)"
    )
    assert found["controller"].cure == "ckptpipe serve &"
    report = DoctorReport([Section("GPU", list(found.values()))])
    assert len(report.lines()) <= 14, "the rest of the screen is for the others"


def test_no_engine(findings: Callable[..., dict[str, Finding]]) -> None:
    found = findings(gpus=1)["decompression"]
    assert (found.state, found.value) == ("note", "no engine: mask 0x0, maximum length 0")


def test_no_nvcomp(findings: Callable[..., dict[str, Finding]]) -> None:
    found = findings(gpus=1, decompression=(1, 4 << 20), nvcomp="/nowhere/libnvcomp.so")["GPU codecs"]
    assert found.state == "note" and "decodes: decompression-engine, cpu" in found.value
    assert found.cure
    assert findings(gpus=1, nvcomp="/nowhere")["GPU codecs"].value.endswith("decodes: cpu")


def test_mig_is_said(findings: Callable[..., dict[str, Finding]]) -> None:
    names = ["NVIDIA A100 MIG 1g.5gb", "NVIDIA A100"]
    found = findings(gpus=2, names=names)
    assert "cannot be checkpointed" in found["GPU 0"].value
    assert found["custom storage"].value == "works; not on GPU 0 (MIG)"


def test_where_the_kernel_forbids_to_read_others(
    findings: Callable[..., dict[str, Finding]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = tmp_path / "proc/sys/kernel/yama/ptrace_scope"
    scope.parent.mkdir(parents=True)
    monkeypatch.setattr(doctor_gpu, "may_trace", lambda: False)
    for value, state in (("0", "ok"), ("1", "missing"), ("2", "missing"), ("3", "missing")):
        scope.write_text(value + "\n")
        assert findings(tmp_path, gpus=1)["driver image"].state == state
    monkeypatch.setattr(doctor_gpu, "may_trace", lambda: True)
    scope.write_text("1\n")
    assert findings(tmp_path, gpus=1)["driver image"].state == "ok"


def gpu(ordinal: int, pci: str) -> Gpu:
    return Gpu(ordinal, f"GPU-{ordinal}", "NVIDIA H200", 141 << 30, pci, (9, 0), False)


def place(pci: str, *, node: int | None = None, uplink: str = "", width: int = 16) -> Place:
    return Place(pci, Link(5, width, 5, 16), node, uplink)


def test_links_nodes_and_uplinks() -> None:
    pcis = [f"0000:{bus}:00.0" for bus in ("17", "18", "3d", "aa")]
    gpus = [gpu(number, pci) for number, pci in enumerate(pcis)]
    places = {
        0: place(pcis[0], node=0, uplink="0000:16:01.0"),
        1: place(pcis[1], node=0, uplink="0000:16:01.0"),
        2: place(pcis[2], node=0, uplink="0000:3c:01.0"),
        3: place(pcis[3], node=1, uplink="0000:a9:01.0", width=8),
    }
    lines = doctor_gpu._gpus(gpus, places)
    assert [line.name for line in lines] == ["GPU 0-2", "GPU 3"]
    assert lines[0].value == "NVIDIA H200, 141.0 GiB, PCIe 5 x16"
    assert lines[1].state == "note"
    assert "runs at x8" in lines[1].value
    assert doctor_gpu._numa(gpus, places).value == "node 0: GPU 0-2; node 1: GPU 3"
    assert "shared by GPU 0-1:" in doctor_gpu._uplinks(gpus, places).value
    alone = {number: place(pci, uplink=f"up{number}") for number, pci in enumerate(pcis)}
    assert doctor_gpu._uplinks(gpus, alone).value == "each GPU has its own"
    hidden = {number: place(pci) for number, pci in enumerate(pcis)}
    assert "not visible" in doctor_gpu._uplinks(gpus, hidden).value


def test_ordinals_in_words() -> None:
    assert doctor_gpu._ordinals([]) == ""
    assert doctor_gpu._ordinals([3, 0, 1, 2, 7]) == "0-3, 7"
    assert doctor_gpu._ordinals([0, 2]) == "0, 2"


def test_an_older_driver_lacks_custom_storage() -> None:
    program = "from ckptpipe.pipeline.cli import main; main(['doctor', '--json'])"
    with SimWorld(gpus=1, driver_version=12080) as world:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=world.environment(),
            capture_output=True,
            text=True,
            check=True,
        )
    (section,) = (each for each in json.loads(done.stdout)["sections"] if each["title"] == "GPU")
    found = {each["name"]: each for each in section["findings"]}
    assert found["custom storage"]["state"] == "missing"
    assert "no cuCheckpointOperationComplete" in found["custom storage"]["value"]
    assert found["driver image"]["state"] == "ok"
