"""GPU codecs through the controller: what is asked for arrives, results and refusals come back whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptpipe
from ckptpipe.pipeline.controller.errors import ProtocolError
from ckptpipe.pipeline.controller.records import from_json, to_json
from tests.pipeline.controller.machine import SMALL, Machine, machine
from tests.simcuda.contents import COMPRESSIBLE

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-python: pip install 'ckptpipe[gpu]'")
SCRATCH = ["--gpu-scratch", "64MiB"]


@pytest.fixture
def here(workdir: Path) -> Iterator[Machine]:
    with machine(workdir) as made:
        yield made


@pytest.mark.parametrize("serve", [True, False])
def test_saved_and_restored(here: Machine, serve: bool) -> None:
    target = here.target(seed=COMPRESSIBLE)
    if serve:
        here.serve()
    pid = ("--pid", str(target.pid))
    told = here.run(
        "save", *pid, "--to", str(here.images), "--name", "s", "--compress", "auto", *SMALL, *SCRATCH
    )
    assert "codec on nvcomp-cuda (simulated)" in told and "codecs 64.0 MiB of each GPU" in told
    saved = here.json(
        *("save", *pid, "--to", str(here.images), "--name", "a", "--leave", "checkpointed"),
        *("--compress", "auto", "--allow-gpu-only", *SMALL, *SCRATCH),
    )
    (sink,) = saved["sinks"]
    assert sink["codec_backend"] == "nvcomp-cuda (simulated)"
    assert {decision["encoding"] for decision in sink["decisions"]} != {"none"}
    assert saved["facts"]["gpu_scratch_bytes"] == 64 << 20
    image = str(here.images / "a")
    refused = here.run(
        "restore", image, *pid, "--decompress-backend", "decompression-engine", *SMALL, *SCRATCH, code=2
    )
    assert "decompression engine" in refused
    assert here.state(target) == "CHECKPOINTED"
    back = here.json("restore", image, *pid, "--decompress-backend", "nvcomp-cuda", *SMALL, *SCRATCH)
    assert back["codec_backend"] == "nvcomp-cuda (simulated)"
    target.check()


def test_results_travel_with_what_was_decided() -> None:
    decision = {
        "streams": "a",
        "ratio": 1.2,
        "chunks": {"raw": 3},
        "sample": {"entropy": [1.0]},
        "rate": None,
    }
    sink = ckptpipe.SinkResult("u", "i", "required", True, decisions=[decision])
    assert from_json(ckptpipe.SinkResult, to_json(sink), "sink") == sink
    nested: dict[str, object] = {}
    for _ in range(5):
        nested = {"a": nested}
    sink.decisions = [nested]
    with pytest.raises(ProtocolError, match="nested deeper"):
        from_json(ckptpipe.SinkResult, to_json(sink), "sink")
    sink.decisions = [{"a": float("inf")}]
    with pytest.raises(ProtocolError, match="not finite"):
        from_json(ckptpipe.SinkResult, to_json(sink), "sink")
