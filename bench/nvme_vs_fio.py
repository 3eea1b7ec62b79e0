"""Is a save to a local disk as fast as the disk? File to nvme against fio; verify against fio's read.

The source is a file in memory (/dev/shm), so that only the writing meets the disk; where memory has no room
it lies on the disk, and the note says so. fio writes and reads one file of the same size, with blocks of the
chunk's size, the same depth, direct, preallocated, synced at the end. The competitors take turns in one run,
medians are compared, and everything written is removed between turns.

    python -m bench.nvme_vs_fio [--mib 2048] [--chunk 8MiB] [--depth 32] [--repeat 5]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.image_like import ImageLike
from bench.measured import Cost, Work, run_program, run_work
from bench.report import Answer, Table
from bench.scratch import GIB, memory_folder, scratch
from ckptpipe.pyx.io_engine import probe

MIB = 1 << 20


def save(source: str, target: str, chunk_bytes: int, depth: int) -> Work:
    import ckptpipe
    from ckptpipe.pipeline.settings import Settings
    from ckptpipe.pipeline.spec import SinkSpec

    settings = Settings(chunk_bytes=chunk_bytes, io_depth=depth, source_direct="off")
    sink = SinkSpec(f"nvme:{target}", name="image")

    def work() -> Mapping[str, Any]:
        result = ckptpipe.save_blocking(source, to=sink, name="image", settings=settings)
        only = result.sinks[0]
        return {"bytes": result.raw_bytes, "engine": only.engine, "direct": only.direct}

    return work


def verify(target: str, depth: int) -> Work:
    import ckptpipe
    from ckptpipe.pipeline.settings import Settings

    settings = Settings(io_depth=depth)

    def work() -> Mapping[str, Any]:
        result = ckptpipe.verify_blocking(f"nvme:{target}/image", settings=settings)
        return {"bytes": result.raw_bytes, "engine": result.engine, "direct": result.direct}

    return work


def fio(folder: Path, mode: str, nbytes: int, block: int, depth: int, engine: str) -> Cost:
    """fio's own clock, which leaves out its start and the laying out of the file."""
    cost = run_program(
        [
            "fio",
            "--name=ckptpipe",
            f"--filename={folder / 'fio.data'}",
            f"--rw={mode}",
            f"--bs={block}",
            f"--size={nbytes // block * block}",
            f"--iodepth={depth}",
            f"--ioengine={engine}",
            "--direct=1",
            "--fallocate=posix",
            "--end_fsync=1",
            "--invalidate=1",
            "--output-format=json",
        ],
        quiet=False,
    )
    output = cost.facts["stdout"]
    job = json.loads(output[output.index("{") :])["jobs"][0]  # remarks stand before it
    # A write is over when its fsync is: job_runtime counts it, the write's own runtime does not.
    milliseconds = job["job_runtime"] if mode == "write" else job[mode]["runtime"]
    return Cost(milliseconds / 1e3, cost.cpu_seconds, 0, {"bytes": job[mode]["io_bytes"]})


def fio_engine() -> str:
    """fio's name of the engine that ckptpipe takes here, so that both ask the kernel in the same way."""
    first = next(found.name for found in probe() if found.works)
    return {"threads": "psync"}.get(first, first)


def measure(
    nbytes: int = 2 * GIB,
    chunk_bytes: int = 8 * MIB,
    depth: int = 32,
    repeat: int = 5,
    engine: str = "",
) -> Answer:
    if shutil.which("fio") is None:
        sys.exit("fio is not installed: apt-get install fio")
    engine = engine or fio_engine()
    costs: dict[str, list[Cost]] = {"fio write": [], "save": [], "fio read": [], "verify": []}
    notes = []
    with scratch("nvme", 2 * nbytes + GIB) as folder, memory_folder("nvme-source", nbytes) as memory:
        source = (memory or folder) / "source.bf16"
        if memory is None:
            notes.append("no room in /dev/shm: the source was read from the same disk while it was written")
        blocks = max(1, nbytes // (8 * MIB))
        with source.open("wb") as file:
            file.writelines(ImageLike().weights(blocks))
        size = source.stat().st_size
        images = folder / "images"
        for turn in range(repeat):
            # Whoever goes second may find a busier or a quieter disk: take turns at that too.
            for who in ("fio", "ckptpipe") if turn % 2 else ("ckptpipe", "fio"):
                if who == "fio":
                    costs["fio write"].append(fio(folder, "write", size, chunk_bytes, depth, engine))
                    costs["fio read"].append(fio(folder, "read", size, chunk_bytes, depth, engine))
                    (folder / "fio.data").unlink()
                else:
                    costs["save"].append(
                        run_work(
                            save, source=str(source), target=str(images), chunk_bytes=chunk_bytes, depth=depth
                        )
                    )
                    costs["verify"].append(run_work(verify, target=str(images), depth=depth))
                    shutil.rmtree(images)
    for name in ("save", "verify"):
        facts = costs[name][-1].facts
        notes.append(f"{name}: engine {facts['engine']}, direct {facts['direct']}")
    table = Table(
        ("what", "MiB", "GB/s", "worst", "best", "CPU s/GB", "of fio"),
        ("", "", ".2f", ".2f", ".2f", ".2f", ".2f"),
    )
    for name, rival in (("fio write", ""), ("save", "fio write"), ("fio read", ""), ("verify", "fio read")):
        rates = [cost.facts["bytes"] / cost.seconds / 1e9 for cost in costs[name]]
        cpu = statistics.median(cost.cpu_seconds / (cost.facts["bytes"] / 1e9) for cost in costs[name])
        ratio = None
        if rival:
            theirs = statistics.median(cost.facts["bytes"] / cost.seconds / 1e9 for cost in costs[rival])
            ratio = statistics.median(rates) / theirs
        table.add(name, size // MIB, statistics.median(rates), min(rates), max(rates), cpu, ratio)
    notes.append(f"medians of {repeat} turns, fio with {engine}; to reach: 0.9 of fio")
    parameters = {
        "nbytes": size,
        "chunk_bytes": chunk_bytes,
        "depth": depth,
        "repeat": repeat,
        "fio_engine": engine,
    }
    return Answer("nvme_vs_fio", "File to nvme and back against fio", table, parameters, notes)


def main() -> None:
    from ckptpipe.storage_backends.quantities import parse_bytes

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--chunk", type=parse_bytes, default=8 * MIB)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--fio-engine", default="", help="default: the engine that ckptpipe takes here")
    a = parser.parse_args()
    measure(a.mib * MIB, a.chunk, a.depth, a.repeat, a.fio_engine).publish()


if __name__ == "__main__":
    main()
