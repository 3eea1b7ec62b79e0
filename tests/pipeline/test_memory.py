"""Bounded memory: a source of 4 GiB in front of a sink of 10 MB/s holds what the rings hold, no more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.runs import MIB
from tests.pipeline.trees import look

ENOUGH = 40_000_000
"""Bytes through the sink: four seconds at its rate. A source that is not held back would send all 4 GiB."""

SCRIPT = """
import sys, ckptpipe
from ckptpipe.pipeline.interrupted import Interrupted
from ckptpipe.pipeline.context import GraphContext
from ckptpipe.pipeline.sinks import image
from ckptpipe.storage_backends.wrappers.limit import LimitBackend, RateLimit

where, compress, store, enough = sys.argv[1:]
rate = 10_000_000
rings = 0
make_ring = GraphContext.make_ring

def counted(self, *arguments):
    global rings
    ring = make_ring(self, *arguments)
    rings += ring.nbytes
    return ring

GraphContext.make_ring = counted
if where == "backend":
    opened = image.open_backend
    async def limited(*arguments):
        return LimitBackend(await opened(*arguments), RateLimit(rate))
    image.open_backend = limited

def progress(now):
    if now.done_bytes >= int(enough):
        print(rings, flush=True)

stages, reads = [], "source"
if compress:
    stages.append(ckptpipe.StageSpec("zstd", "compress", reads, {"codec": "zstd", "level": 1}))
    reads = "zstd"
if where == "stage":
    stages.append(ckptpipe.StageSpec("slow", "limit", reads, {"rate": rate}))
    reads = "slow"
spec = ckptpipe.GraphSpec(
    ckptpipe.SourceSpec("synthetic", {"bytes": 4 << 30}),
    (ckptpipe.SinkSpec(store, reads=reads), ckptpipe.SinkSpec("null:")),
    tuple(stages),
    image_name="i",
)
print("ready", flush=True)
sys.stdin.readline()
try:
    ckptpipe.run_graph_blocking(spec, progress=progress)
except Interrupted as error:
    sys.exit(error.exit_code)
"""


def status(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


@pytest.mark.parametrize(("where", "compress"), [("stage", ""), ("backend", ""), ("stage", "zstd")])
def test_a_slow_sink_holds_the_source_back(workdir: Path, where: str, compress: str) -> None:
    store = workdir / "store"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, where, compress, str(store), str(ENOUGH)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        before = status(process.pid, "VmRSS")
        process.stdin.write("\n")
        process.stdin.flush()
        rings = int(process.stdout.readline())
        growth = status(process.pid, "VmHWM") - before
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert growth < rings + 64 * MIB, f"grew by {growth >> 20} MiB with rings of {rings >> 20} MiB"
    assert process.returncode == 130, err
    assert look(store) == {} and not os.path.exists(store / "i")
