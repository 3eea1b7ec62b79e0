"""The benchmark of the GPU's codecs runs, small, on the simulated GPU: it checks what it should, and its table is whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench import gpu_codec, gpu_timeline, tensor_like
from bench.gpu_timeline import Gap, Span
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


FETCH = "Memcpy DtoH (Device -> Pinned)"
SPANS = [
    Span(0, 30, "crc"),
    Span(20, 50, "compress"),
    Span(50, 60, FETCH),
    Span(55, 95, "crc"),
    Span(60, 70, FETCH),
    Span(75, 80, "Memcpy HtoD (Pinned -> Device)"),
    Span(90, 110, FETCH),
    Span(111, 112, FETCH),
]


def test_a_timeline_tells_when_the_link_stood_still() -> None:
    assert gpu_timeline.busy(SPANS) == 111
    assert gpu_timeline.busy([span for span in SPANS if span.is_kernel]) == 90
    assert gpu_timeline.gaps(SPANS) == [
        Gap(70, 90, {"crc": 20, "Memcpy HtoD (Pinned -> Device)": 5}),
        Gap(110, 111, {}),
    ]
    told = gpu_timeline.told(SPANS)
    assert "DtoH busy 0.04 ms, kernels busy 0.09 ms; first DtoH after 50 us; 2 gaps" in told
    assert "gap of 20 us at 70: crc 20, Memcpy HtoD (Pinned -> Device) 5" in told
    assert "gap of 1 us at 110: nothing" in told
    assert gpu_timeline.told([]) == "nothing ran on the GPU"


def test_a_timeline_needs_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_timeline, "available", lambda: False)
    with pytest.raises(SystemExit):
        gpu_codec.main([*SMALL, "--profile"])
    assert "--profile needs torch" in capsys.readouterr().err


def test_a_timeline_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    @contextmanager
    def recorded(spans: list[Span]) -> Iterator[None]:
        yield
        spans.extend(SPANS)

    monkeypatch.setattr(gpu_timeline, "available", lambda: True)
    monkeypatch.setattr(gpu_timeline, "recorded", recorded)
    with SimWorld(gpus=1) as world, world.attached():
        assert gpu_codec.main([*SMALL, "--profile", "--only", "encode", "--plans", "ans:f16"]) == 0
    assert capsys.readouterr().out.count("span 0.11 ms") == 1
