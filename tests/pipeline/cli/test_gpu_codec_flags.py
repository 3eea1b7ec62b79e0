"""--gpu-scratch and --decompress-backend: what they reach, and what they say on a machine without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ckptpipe
from ckptpipe.pipeline import operations
from ckptpipe.pipeline.cli.exit import run
from ckptpipe.pipeline.controller.records import from_json, to_json
from ckptpipe.pipeline.controller.requests import RestoreRequest
from tests.pipeline.runs import SMALL, memory_dir
from tests.pipeline.runs import run as run_async

__all__ = ["memory_dir"]
MIB = 1 << 20


@pytest.fixture
def image(workdir: Path) -> str:
    data = {"x": b"a line that repeats itself\n" * 20_000}
    run_async(ckptpipe.save(data, to=workdir, name="a", compress="deflate:1", settings=SMALL))
    return str(workdir / "a")


@pytest.mark.parametrize("command", ["restore", "verify"])
def test_what_the_flags_reach(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ckptpipe.Settings] = []

    async def operation(url: str, *, settings: ckptpipe.Settings, **options: Any) -> None:
        seen.append(settings)
        raise ckptpipe.UsageError("seen")

    monkeypatch.setattr(operations, command, operation)
    to = ["--to", "/x"] if command == "restore" else []
    flags = ["--decompress-backend", "nvcomp-cuda", "--gpu-scratch", "64MiB"]
    assert run([command, "/images/a", *to, *flags]) == 2
    assert seen == [ckptpipe.Settings(decompress_backend="nvcomp-cuda", gpu_scratch_bytes=64 * MIB)]


def test_they_travel_to_a_controller() -> None:
    settings = ckptpipe.Settings(decompress_backend="decompression-engine", gpu_scratch_bytes=96 * MIB)
    request = RestoreRequest("/images/a", settings=settings)
    assert from_json(RestoreRequest, to_json(request), "restore") == request


def test_the_cpu_by_name(image: str, workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = str(workdir / "files")
    assert run(["restore", image, "--to", to, "--decompress-backend", "cpu", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["codec_backend"] == "cpu" and result["facts"]["gpu_scratch_bytes"] == 0


@pytest.mark.parametrize("backend", ["nvcomp-cuda", "decompression-engine"])
@pytest.mark.parametrize("command", ["restore", "verify"])
def test_a_gpu_by_name_where_there_is_none(
    image: str, workdir: Path, capsys: pytest.CaptureFixture[str], command: str, backend: str
) -> None:
    to = ["--to", str(workdir / "files")] if command == "restore" else []
    assert run([command, image, *to, "--decompress-backend", backend]) != 0
    assert "ckptpipe" in capsys.readouterr().err
    assert not (workdir / "files").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--decompress-backend", "gpu"], "'gpu' is not one of"),
        (["--gpu-scratch", "1MiB"], "too little for codecs"),
        (["--gpu-scratch", "1M"], "write 1MiB (binary) or 1MB"),
    ],
)
def test_what_makes_no_sense(
    image: str, workdir: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert run(["restore", image, "--to", str(workdir / "files"), *flags]) == 2
    assert words in capsys.readouterr().err
    assert not (workdir / "files").exists()
