"""The benchmark of the GPU's codecs runs, small, on the simulated GPU: it checks what it should, and its table is whole."""

from __future__ import annotations

import pytest

from bench import gpu_codec, tensor_like
from ckptpipe.pyx.device_codec import EncodePlan
from tests.simcuda import SimWorld

SMALL = [
    "--gib",
    "0.004",
    "--chunks",
    "1",
    "--scratch",
    "32",
    "--ring",
    "8",
    "--pattern",
    "65536",
    "--no-files",
]


def test_it_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with SimWorld(gpus=1) as world, world.attached():
        assert gpu_codec.main([*SMALL, "--plans", "deflate:0 planes2", "ans:f16"]) == 0
    printed = capsys.readouterr().out
    assert "all are right" in printed
    assert printed.count(": right") == len(gpu_codec.CHECKED)
    for row in ("encode deflate:0 planes2", "decode deflate:0 planes2", "encode ans:f16", "decode ans:f16"):
        assert f"\n{row} 32 " in printed  # as it is measured
        assert f"\n{row} " in printed.partition("\nwhat ")[2]  # in the table


def test_it_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_codec, "inflate", lambda stored, found: b"")
    monkeypatch.setattr(gpu_codec, "CHECKED", {"deflate:0": EncodePlan(2, 0)})
    with SimWorld(gpus=1) as world, world.attached():
        assert gpu_codec.main([*SMALL, "--only", "check"]) == 1
    assert "deflate:0, bf16, 65536 bytes: zlib reads other bytes" in capsys.readouterr().out


@pytest.mark.parametrize("kind", list(tensor_like.KINDS))
@pytest.mark.parametrize("nbytes", [1, 2, 4095, 4096])
def test_data_has_the_length_that_was_asked_for(kind: str, nbytes: int) -> None:
    assert len(tensor_like.KINDS[kind](nbytes)) == nbytes
