"""What does the graph itself cost a chunk?

A synthetic source into a null sink: no byte is moved, every checksum and zero test is on. The cost of a chunk
is the slope between a short and a long run, so that opening, threads and ring count for nothing; the cost of
the raw CRC32C kernel over as many bytes of as much memory, measured the same way, is taken off.

    python -m bench.graph_overhead [--chunks 20000] [--repeat 5]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.measured import Work, run_work
from bench.report import Answer, Table

KIB = 1 << 10
CHUNK_SIZES = (4 * KIB, 64 * KIB, 8192 * KIB)
TARGET_MICROSECONDS = 20.0
SLOTS = 16
"""A ring of few slots is filled and warm early in the short run already."""


def graph(chunk_bytes: int, chunks: int) -> Work:
    """``chunks`` chunks from the synthetic source to null:."""
    import ckptpipe
    from ckptpipe.pipeline.settings import Settings
    from ckptpipe.pipeline.spec import GraphSpec, SinkSpec, SourceSpec

    spec = GraphSpec(
        source=SourceSpec("synthetic", {"bytes": chunk_bytes * chunks, "pattern": "random"}),
        sinks=(SinkSpec("null:"),),
    )
    settings = Settings(chunk_bytes=chunk_bytes, ring_bytes=SLOTS * chunk_bytes)

    def work() -> Mapping[str, Any]:
        result = ckptpipe.run_graph_blocking(spec, settings=settings)
        if result.chunks != chunks:
            raise RuntimeError(f"{result.chunks} chunks came through, not {chunks}")
        return {"loop": result.facts.loop, "ring_bytes": result.facts.ring_bytes}

    return work


def kernel(chunk_bytes: int, chunks: int) -> Work:
    """The CRC32C kernel over as many bytes, in as many calls, in a ring like the graph's."""
    from ckptpipe.pyx.checksum import crc32c, implementation
    from ckptpipe.pyx.staging import StagingRing

    ring = StagingRing(SLOTS, chunk_bytes)
    leases = [lease for _ in range(SLOTS) if (lease := ring.try_acquire()) is not None]
    for lease in leases:
        with memoryview(lease) as view:
            view[:] = b"\x5a" * chunk_bytes

    def work() -> Mapping[str, Any]:
        for number in range(chunks):
            crc32c(leases[number % SLOTS])
        return {"implementation": implementation()}

    return work


def measure(chunks: int = 20_000, repeat: int = 5, sizes: Sequence[int] = CHUNK_SIZES) -> Answer:
    table = Table(
        ("chunk KiB", "chunks", "graph us", "CRC32C us", "overhead us", "overhead %", "wall us"),
        ("", "", ".1f", ".1f", ".1f", ".0f", ".1f"),
    )
    notes = []
    for size in sizes:
        count = min(chunks, max(8 * SLOTS, (8 << 30) // size))  # 8 GiB are enough
        short, rows = max(4 * SLOTS, count // 8), []
        for _ in range(repeat):
            few, many = (
                run_work(graph, chunk_bytes=size, chunks=short),
                run_work(graph, chunk_bytes=size, chunks=count),
            )
            raw_few = run_work(kernel, chunk_bytes=size, chunks=short)
            raw_many = run_work(kernel, chunk_bytes=size, chunks=count)
            notes = [f"event loop {many.facts['loop']}, CRC32C {raw_many.facts['implementation']}"]
            span = count - short
            rows.append(
                (
                    (many.cpu_seconds - few.cpu_seconds) / span * 1e6,
                    (raw_many.cpu_seconds - raw_few.cpu_seconds) / span * 1e6,
                    (many.seconds - few.seconds) / span * 1e6,
                )
            )
        graph_us, kernel_us, wall_us = (statistics.median(row[i] for row in rows) for i in range(3))
        over = statistics.median(row[0] - row[1] for row in rows)
        table.add(
            size // KIB, count, graph_us, kernel_us, over, 100 * over / graph_us if graph_us else 0.0, wall_us
        )
    notes.append(f"medians of {repeat}; to reach: at most {TARGET_MICROSECONDS:.0f} us of CPU a chunk")
    return Answer(
        "graph_overhead",
        "CPU time of the graph a chunk, null to null, all checksums on",
        table,
        {"chunks": chunks, "repeat": repeat, "sizes": list(sizes)},
        notes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunks", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    measure(arguments.chunks, arguments.repeat).publish()


if __name__ == "__main__":
    main()
