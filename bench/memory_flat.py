"""Does peak memory stay flat, whatever the size of the image and however slow the sink?

Synthetic sources of growing size into null, into nvme, and into null behind a rate limit; each run in a fresh
process, whose peak of resident memory over that at the start of the save is compared with its staging rings.

    python -m bench.memory_flat [--gib 1 4 16] [--rate 1GB/s]
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.measured import Work, run_work
from bench.report import Answer, Table
from bench.scratch import GIB, scratch

MIB = 1 << 20
ALLOWED_OVER_RINGS = 64 * MIB


def save(nbytes: int, url: str, rate: int) -> Work:
    """``nbytes`` of the synthetic source to ``url``, at ``rate`` bytes a second (0: as fast as it goes)."""
    import ckptpipe
    from ckptpipe.pipeline.spec import SOURCE, GraphSpec, SinkSpec, SourceSpec, StageSpec

    stages = (StageSpec("slow", "limit", SOURCE, {"rate": rate}),) if rate else ()
    spec = GraphSpec(
        source=SourceSpec("synthetic", {"bytes": nbytes, "pattern": "random"}),
        stages=stages,
        sinks=(SinkSpec(url, reads="slow" if rate else SOURCE),),
        image_name="flat",
    )

    def work() -> Mapping[str, Any]:
        facts = ckptpipe.run_graph_blocking(spec).facts
        return {"growth": facts.peak_rss_growth, "ring": facts.ring_bytes, "engine": facts.io_engine}

    return work


def measure(sizes: Sequence[int] = (GIB, 4 * GIB, 16 * GIB), rate: int = 10**9) -> Answer:
    table = Table(
        ("sink", "image MiB", "seconds", "ring MiB", "peak growth MiB", "over ring MiB"),
        ("", "", ".1f", ".1f", ".1f", ".1f"),
    )
    notes = []
    with scratch("memory", max(sizes) + GIB) as folder:
        for name in ("null", "nvme", "slow null"):
            for nbytes in sizes:
                target = folder / "images"
                url = f"nvme:{target}" if name == "nvme" else "null:"
                cost = run_work(save, nbytes=nbytes, url=url, rate=rate if name == "slow null" else 0)
                growth, ring = cost.facts["growth"], cost.facts["ring"]
                table.add(name, nbytes // MIB, cost.seconds, ring / MIB, growth / MIB, (growth - ring) / MIB)
                _remove(target)
    notes.append(
        f"slow null: held to {rate / 1e6:.0f} MB/s; allowed over the ring: {ALLOWED_OVER_RINGS // MIB} MiB"
    )
    return Answer(
        "memory_flat",
        "Peak resident memory against the image's size",
        table,
        {"sizes": list(sizes), "rate": rate},
        notes,
    )


def _remove(target: Path) -> None:
    if target.exists():
        shutil.rmtree(target)


def main() -> None:
    from ckptpipe.storage_backends.quantities import parse_rate

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rate", type=parse_rate, default=10**9)
    arguments = parser.parse_args()
    measure([int(gib * GIB) for gib in arguments.gib], arguments.rate).publish()


if __name__ == "__main__":
    main()
