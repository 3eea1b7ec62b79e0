"""Run every benchmark and gather the answers in RESULTS.md.

python -m bench.run [--only NAME ...]   # RESULTS.md keeps the last answer of those that are not run
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench import (
    compress_choice,
    deflate_restore,
    graph_overhead,
    launch_overhead,
    memory_flat,
    nvme_vs_fio,
    s3_vs_peers,
)
from bench.report import OUT, Answer, Table

RESULTS = Path(__file__).resolve().parent / "RESULTS.md"
BENCHMARKS: Mapping[str, Callable[[], Answer]] = {
    "graph_overhead": graph_overhead.measure,
    "nvme_vs_fio": nvme_vs_fio.measure,
    "s3_vs_peers": s3_vs_peers.measure,
    "s3_vs_peers_https": partial(s3_vs_peers.measure, https=True),
    "memory_flat": memory_flat.measure,
    "launch_overhead": launch_overhead.measure,
    "compress_choice": compress_choice.measure,
    "deflate_restore": deflate_restore.measure,
}
BY_HAND: Mapping[str, str] = {
    "launch_pieces": "launch_pieces",
    "gpu": "gpu",
    "gpu_load": "gpu_load grid",
    "gpu_start": "gpu_load start",
    "gpu_launch": "gpu_launch --only speed",
    "gpu_launch_workers": "gpu_launch --only workers",
    "gpu_launch_ways": "gpu_launch_workers",
    "gpu_launch_pages": "gpu_launch --only pages",
    "gpu_launch_save": "gpu_launch --only save",
    "gpu_launch_early": "gpu_launch --only early",
    "gpu_launch_refill": "gpu_launch --only refill",
    "gpu_codec": "gpu_codec",
    "gpu_compress": "gpu_compress",
}
"""Answers and what makes them, mostly on a machine with a GPU; they are gathered with the others."""
COMMANDS: Mapping[str, str] = {"s3_vs_peers_https": "s3_vs_peers --https", **BY_HAND}
"""What makes an answer, where that is not the benchmark of its name."""
HEAD = """# Results

Written by `make bench`; bench/README.md has the method. Compare figures within one table: its rows were
measured in turns in one run, and another machine, or another hour on a shared one, gives others.
"""


def results(answers: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of RESULTS.md from what each benchmark wrote as JSON."""
    return "\n".join([HEAD, *(section(answers[name]) for name in (*BENCHMARKS, *BY_HAND) if name in answers)])


def section(answer: Mapping[str, Any]) -> str:
    name, machine = answer["name"], answer["machine"]
    rows = answer["rows"]
    table = Table(tuple(rows[0]) if rows else (), answer["formats"])
    for row in rows:
        table.add(*row.values())
    packages = ", ".join(
        f"{package} {version}" for package, version in machine["packages"].items() if version
    )
    parameters = ", ".join(f"{key} {value}" for key, value in answer["parameters"].items())
    return "\n".join(
        [
            f"## {answer['question']}\n",
            f"`python -m bench.{COMMANDS.get(name, name)}`, {answer['date']}, commit {machine['commit'] or 'unknown'}: "
            f"{machine['processor']}, {machine['cpus']} CPUs, {machine['memory_gib']} GiB, "
            f"Linux {machine['kernel']}, Python {machine['python']}, {packages}. {parameters}.\n",
            table.markdown(),
            "",
            *(f"- {note}" for note in answer["notes"]),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=sorted(BENCHMARKS), default=list(BENCHMARKS))
    chosen = parser.parse_args().only
    for name, measure in BENCHMARKS.items():
        if name in chosen:
            measure().publish()
    answers = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in OUT.glob("*.json")}
    RESULTS.write_text(results(answers), encoding="utf-8")
    print(f"\n{RESULTS.relative_to(OUT.parent.parent)} is written")


if __name__ == "__main__":
    main()
