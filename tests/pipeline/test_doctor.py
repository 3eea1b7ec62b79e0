"""`ckptpipe doctor`: it tells what is there, keeps to one screen, and never tells a secret."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shutil
from pathlib import Path

import pytest

from ckptpipe.pipeline import doctor, doctor_gpu
from ckptpipe.pipeline.doctor import DoctorReport, Finding, examine
from ckptpipe.pyx import checksum, copy
from ckptpipe.pyx.io_engine import EngineProbe


def look(path: Path) -> DoctorReport:
    return asyncio.run(examine(path))


def finding(report: DoctorReport, name: str) -> Finding:
    found = [one for section in report.sections for one in section.findings if one.name == name]
    assert len(found) == 1, f"{len(found)} findings named {name}"
    return found[0]


def test_one_screen(workdir: Path) -> None:
    report = look(workdir)
    lines = report.lines(100)
    assert len(lines) <= 48
    assert max(map(len, lines)) <= 100
    assert str(report) == "\n".join(lines)


def test_json_has_every_finding(workdir: Path) -> None:
    report = look(workdir)
    again = json.loads(json.dumps(report.as_json()))
    titles = [section["title"] for section in again["sections"]]
    assert titles == ["ckptpipe", "processor and memory", "files", "object store", "GPU"]
    for section in again["sections"]:
        for one in section["findings"]:
            assert set(one) == {"name", "value", "state", "cure"}
            assert one["state"] in ("ok", "note", "missing")


def test_names_the_kernels_that_run(workdir: Path) -> None:
    report = look(workdir)
    assert finding(report, "copy kernel").value == copy.implementation()
    assert finding(report, "CRC32C kernel").value == checksum.implementation()


def test_threads_always_run(workdir: Path) -> None:
    assert finding(look(workdir), "threads engine").state == "ok"


def test_a_forbidden_io_uring_is_missing_with_its_reason(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes = (
        EngineProbe("io_uring", False, "io_uring_setup: Operation not permitted"),
        EngineProbe("threads", True),
    )
    monkeypatch.setattr(doctor, "probe", lambda: probes)
    found = finding(look(workdir), "io_uring engine")
    assert found.state == "missing"
    assert "Operation not permitted" in found.value
    assert "seccomp" in found.cure


def test_direct_io_of_a_missing_folder(tmp_path: Path) -> None:
    found = finding(look(tmp_path / "nowhere"), "direct I/O")
    assert found.state == "note"
    assert "No such file or directory" in found.value


def test_examining_leaves_no_file(workdir: Path) -> None:
    look(workdir)
    assert list(workdir.iterdir()) == []


def test_fuse_program(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert finding(look(workdir), "fusermount3").state == "missing"
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert finding(look(workdir), "fusermount3").value == "/usr/bin/fusermount3"


def test_no_gpu_driver(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(doctor_gpu, "CDLL", refuse)
    assert "no GPU driver found" in finding(look(workdir), "driver").value


def test_gpu_driver_version(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def cuDriverGetVersion(self, pointer: object) -> int:
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = 13040  # type: ignore[arg-type]
            return 0

    monkeypatch.setattr(doctor_gpu, "CDLL", lambda name: Driver())
    assert finding(look(workdir), "driver").value == "CUDA 13.4"


def test_no_secret_is_told(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLEEXAMPLE00")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-print-me")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:do-not-print-me@127.0.0.1:8333")
    report = look(workdir)
    told = str(report) + json.dumps(report.as_json())
    assert "do-not-print-me" not in told
    assert "AKIAEXAMPLEEXAMPLE00" not in told
    assert finding(report, "AWS credentials").value.startswith("by env")
    assert finding(report, "S3 endpoint").value.startswith("http://127.0.0.1:8333,")
